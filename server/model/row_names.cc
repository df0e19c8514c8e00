#include "server/model/row_names.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

RowNames::RowNames(std::vector<std::string> names) : names_(std::move(names)), by_name_(names_.size()) {
  std::iota(by_name_.begin(), by_name_.end(), 0);
  std::ranges::sort(by_name_, {}, [this](int32_t row) -> std::string_view { return name(row); });
}

int32_t RowNames::Add(std::string_view name) {
  const auto at = Seek(name);
  if (Holds(at, name)) return *at;
  if (size() >= kNamedRowsMax) return -1;
  by_name_.insert(at, size());
  names_.emplace_back(name);
  return size() - 1;
}

std::string NameOr(const char* kind, const RowNames* names, size_t row) {
  const bool known = names != nullptr && row < names->names().size();
  return known ? names->names()[row] : absl::StrCat(kind, " ", row);
}

int32_t RowNames::Find(std::string_view name) const {
  const auto at = Seek(name);
  return Holds(at, name) ? *at : -1;
}

std::vector<int32_t>::const_iterator RowNames::Seek(std::string_view name) const {
  return std::ranges::lower_bound(by_name_, name, {},
                                  [this](int32_t row) -> std::string_view { return this->name(row); });
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
