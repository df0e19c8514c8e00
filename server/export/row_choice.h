// row_choice.h: which tensors and modules of a run are worth a series each.
//
// Of each signal of kRowSignals the `rows_top` rows whose newest values are furthest from zero; NaN is
// furthest of all.  A row that has no value, or zero, is never chosen.  A row that was chosen stays a
// while, as heads do (held_top.h): at most twice rows_top of each signal.  Not thread-safe.

#ifndef BELLWETHER_SERVER_EXPORT_ROW_CHOICE_H_
#define BELLWETHER_SERVER_EXPORT_ROW_CHOICE_H_

#include <compare>
#include <cstdint>
#include <set>
#include <vector>

#include "server/export/held_top.h"
#include "server/model/row_values.h"
#include "server/store/run_table.h"

namespace bellwether::server {

struct RowChoiceOptions {
  int32_t rows_top = 8;  // Of each signal; 0 = none.
  int64_t hold_ns = int64_t{15} * 60 * 1'000'000'000;
};

struct ChosenRow {
  size_t signal = 0;  // Of kRowSignals.
  int32_t row = 0;
  auto operator<=>(const ChosenRow&) const = default;
};

class RowChoice {
 public:
  explicit RowChoice(const RowChoiceOptions& options)
      : options_(options), held_(2 * kRowSignals.size() * static_cast<size_t>(options.rows_top), options.hold_ns) {}

  // By signal, the worst first; behind them those that were so lately.
  std::vector<ChosenRow> Choose(const RunSnapshot& run, int64_t now_ns);
  // Forgets the runs that are not in `runs`.
  void Keep(const std::set<RunId>& runs) { held_.Keep(runs); }

 private:
  const RowChoiceOptions options_;
  HeldTop<ChosenRow> held_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_ROW_CHOICE_H_
