// row_choice.h: which tensors, modules, ranks and cells of own signals of a run are worth a series each.
//
// Of each signal of kRowSignals the `rows_top` rows whose newest values are furthest from zero; NaN is
// furthest of all.  A row that has no value, or zero, is never chosen.  A row that was chosen stays a
// while, as heads do (held_top.h): at most twice rows_top of each signal.
//
// Of each own signal of a run it is as many of its cells, zero or not.  The worst of each come first, in the
// order in which they were named, then the second of each.  Together they are kOwnRowsFactor * rows_top, and
// at most twice as many with those that stay a while.  Not thread-safe.

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

// The first of kRowSignals, which are of the catalogue.
inline constexpr size_t kCatalogueRowSignals = 11;
// All own signals of a run have so many times the rows that one of them may have.
inline constexpr size_t kOwnRowsFactor = 8;

// Of an index of kRowSignals: its rows are cells of own signals.
constexpr bool IsOwnMatrix(size_t signal) { return signal >= kCatalogueRowSignals; }
static_assert(kRowSignals[kCatalogueRowSignals] == SignalId::kOwnMean);

struct RowChoiceOptions {
  int32_t rows_top = 8;  // Of each signal, of the catalogue or a run's own; 0 = none.
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
      : options_(options),
        held_(kCatalogueRowSignals, HeldTop<ChosenRow>(2 * static_cast<size_t>(options.rows_top), options.hold_ns)),
        held_own_(2 * kOwnRowsFactor * static_cast<size_t>(options.rows_top), options.hold_ns) {}

  // By signal, the worst first; behind them those that were so lately; own signals last.
  std::vector<ChosenRow> Choose(const RunSnapshot& run, int64_t now_ns);
  // Forgets the runs that are not in `runs`.
  void Keep(const std::set<RunId>& runs) {
    for (HeldTop<ChosenRow>& held : held_) held.Keep(runs);
    held_own_.Keep(runs);
  }

 private:
  std::vector<ChosenRow> OwnTop(const RunSnapshot& run) const;

  const RowChoiceOptions options_;
  std::vector<HeldTop<ChosenRow>> held_;  // By signal of the catalogue.
  HeldTop<ChosenRow> held_own_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_ROW_CHOICE_H_
