#include "server/model/row_names.h"

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

}  // namespace bellwether::server
