#include "server/model/row_names.h"

#include <algorithm>
#include <utility>

namespace bellwether::server {

RowNames::RowNames(std::vector<std::string> names) : names_(std::move(names)) {
  for (size_t row = 0; row < names_.size(); ++row) rows_.emplace(names_[row], static_cast<int32_t>(row));
}

int32_t RowNames::Add(std::string_view name) {
  if (const int32_t row = Find(name); row >= 0) return row;
  if (size() >= kNamedRowsMax) return -1;
  names_.emplace_back(name);
  rows_.emplace(name, size() - 1);
  return size() - 1;
}

int32_t RowNames::Find(std::string_view name) const {
  const auto found = rows_.find(name);
  return found == rows_.end() ? -1 : found->second;
}

const OwnSignal* RunRows::FindOwn(std::string_view name) const {
  for (const OwnSignal& signal : own_signals) {
    if (signal.name == name) return &signal;
  }
  return nullptr;
}

int32_t RunRows::OwnRow(const OwnSignal& signal, int32_t layer, int32_t head) const {
  return own.Find(OwnCellName(signal, layer, head));
}

int32_t RunRows::AddOwnCell(const OwnCell& cell) {
  OwnSignal& signal = own_signals[static_cast<size_t>(cell.signal)];
  const int32_t before = own.size();
  const int32_t row = own.Add(OwnCellName(signal, cell.layer, cell.head));
  if (row < before) return row;
  own_cells.push_back(cell);
  signal.layers = std::max(signal.layers, cell.layer + 1);
  signal.heads = std::max(signal.heads, cell.head + 1);
  return row;
}

}  // namespace bellwether::server
