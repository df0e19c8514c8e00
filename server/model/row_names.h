// row_names.h: which tensor, or module, a row of a run's matrices is.
//
// Ranks name what they report, each in an order of its own.  The run has one order: a
// name gets the next row when it first comes, and keeps it over all attempts.  So a
// series goes on when the job restarts with another number of processes.
//
// Own signals are no names of ranks, but have rows in the same way: one for each of their cells.
//
// A RowNames never forgets.  Not thread-safe; readers share immutable copies.

#ifndef BELLWETHER_SERVER_MODEL_ROW_NAMES_H_
#define BELLWETHER_SERVER_MODEL_ROW_NAMES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bellwether/signal_table.h"
#include "server/model/own_signals.h"

namespace bellwether::server {

inline constexpr int32_t kNamedRowsMax = 16384;  // Of a run, of each kind.
inline constexpr size_t kRowNameBytesMax = 256;

class RowNames {
 public:
  RowNames() = default;
  explicit RowNames(std::vector<std::string> names);  // By row, each once.

  // The row of `name`, which is added if it is new; -1 = kNamedRowsMax others are there.
  int32_t Add(std::string_view name);
  // -1 = there is no such row.
  int32_t Find(std::string_view name) const;
  const std::vector<std::string>& names() const { return names_; }
  int32_t size() const { return static_cast<int32_t>(names_.size()); }

 private:
  const std::string& name(int32_t row) const { return names_[static_cast<size_t>(row)]; }
  // The first row, by name, whose name is not before this one.
  std::vector<int32_t>::const_iterator Seek(std::string_view name) const;
  bool Holds(std::vector<int32_t>::const_iterator at, std::string_view wanted) const {
    return at != by_name_.end() && name(*at) == wanted;
  }

  std::vector<std::string> names_;
  std::vector<int32_t> by_name_;  // Rows in the order of their names: a map would take more than the names do.
};

// Of a row that may have no name yet: `kind` and its number.  `names` may be null.
std::string NameOr(const char* kind, const RowNames* names, size_t row);

struct RunRows {
  RowNames tensors, modules;
  RowNames own;  // By row, as OwnCellName() says.
  std::vector<OwnCell> own_cells;
  std::vector<OwnSignal> own_signals;  // In the order in which they first came; at most kOwnSignalsMax.

  // REQUIRES: OfNamedRows(granularity).
  RowNames& of(Granularity granularity) { return const_cast<RowNames&>(std::as_const(*this).of(granularity)); }
  const RowNames& of(Granularity granularity) const {
    return granularity == Granularity::kTensor ? tensors : granularity == Granularity::kModule ? modules : own;
  }

  // Null: there is none of that name.  Valid until a signal is added.
  const OwnSignal* FindOwn(std::string_view name) const;
  // The row of a cell, -1: it has none.
  int32_t OwnRow(const OwnSignal& signal, int32_t layer, int32_t head) const;
  // -1: kNamedRowsMax others are there.
  int32_t AddOwnCell(const OwnCell& cell);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ROW_NAMES_H_
