// head_choice.h: which heads of a run are worth a series each.
//
// The worst `heads_top` by stage, then by the leading signal's value.  A head
// that was chosen stays for `hold_ns`, so that a graph does not fall apart when
// two heads change places.  At most `held_max` heads of a run are kept in all.
// Of the heads out of the top, those that were chosen longest ago leave first.
// Not thread-safe.

#ifndef BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_
#define BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_

#include <cstdint>
#include <map>
#include <set>
#include <vector>

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
  explicit HeadChoice(const HeadChoiceOptions& options) : options_(options) {}

  // Worst first.  Empty while the run has no head signals.  NaN is worst of
  // all; a head that was not measured is never chosen for its value.
  std::vector<Head> Choose(const RunSnapshot& run, int64_t now_ns);

  // Forgets the runs that are not in `runs`.
  void Keep(const std::set<RunId>& runs);

  // Heads that left before `hold_ns` because of `held_max`.
  uint64_t evicted() const { return evicted_; }

 private:
  const HeadChoiceOptions options_;
  std::map<RunId, std::map<Head, int64_t>> held_until_ns_;
  uint64_t evicted_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HEAD_CHOICE_H_
