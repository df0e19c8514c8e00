// head_choice.h: which heads of a run are worth a series each.
//
// The worst `heads_top` by stage, then by the leading signal's value, and those
// that were so lately (held_top.h).  Not thread-safe.

#ifndef BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_
#define BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_

#include <cstdint>
#include <set>
#include <vector>

#include "server/export/held_top.h"
#include "server/store/run_table.h"

namespace bellwether::server {

struct HeadChoiceOptions {
  bool all = false;        // Every head, nothing else counts.
  int32_t heads_top = 32;  // 0 = none
  int32_t held_max = 128;  // >= heads_top
  int64_t hold_ns = int64_t{15} * 60 * 1'000'000'000;
};

class HeadChoice {
 public:
  explicit HeadChoice(const HeadChoiceOptions& options)
      : options_(options), held_(static_cast<size_t>(options.held_max), options.hold_ns) {}

  // Worst first.  Empty while the run has no head signals.  NaN is worst of
  // all; a head that was not measured is never chosen for its value.
  std::vector<Head> Choose(const RunSnapshot& run, int64_t now_ns);

  // Forgets the runs that are not in `runs`.
  void Keep(const std::set<RunId>& runs) { held_.Keep(runs); }

  // Heads that left before `hold_ns` because of `held_max`.
  uint64_t evicted() const { return held_.evicted(); }

 private:
  const HeadChoiceOptions options_;
  HeldTop<Head> held_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_
