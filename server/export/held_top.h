// held_top.h: what is worth a series each stays so for a while.
//
// Whatever was among the worst keeps its series for `hold_ns`, so that a graph does not fall apart when two
// change places.  At most `held_max` of a run are kept in all: of those out of the top, the ones that
// were chosen longest ago leave first.  Not thread-safe.

#ifndef BELLWETHER_SERVER_EXPORT_HELD_TOP_H_
#define BELLWETHER_SERVER_EXPORT_HELD_TOP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "server/store/run_table.h"

namespace bellwether::server {

template <typename Key>
class HeldTop {
 public:
  HeldTop(size_t held_max, int64_t hold_ns) : held_max_(held_max), hold_ns_(hold_ns) {}

  // `top`, and behind it what was in it lately, chosen last first.  `is_gone(key)`: the run has no such one.
  template <typename IsGone>
  std::vector<Key> Hold(RunId run, const std::vector<Key>& top, int64_t now_ns, const IsGone& is_gone) {
    std::map<Key, int64_t>& held = held_until_ns_[run];
    std::erase_if(held, [&](const auto& entry) { return entry.second <= now_ns || is_gone(entry.first); });
    for (const Key& key : top) held[key] = now_ns + hold_ns_;
    const std::set<Key> in_top(top.begin(), top.end());
    std::vector<std::pair<int64_t, Key>> rest;
    for (const auto& [key, until] : held) {
      if (!in_top.contains(key)) rest.emplace_back(-until, key);
    }
    std::sort(rest.begin(), rest.end());
    std::vector<Key> chosen = top;
    for (const auto& [order, key] : rest) {
      if (chosen.size() < held_max_) {
        chosen.push_back(key);
      } else {
        held.erase(key);
        ++evicted_;
      }
    }
    return chosen;
  }

  // Forgets the runs that are not in `runs`.
  void Keep(const std::set<RunId>& runs) {
    std::erase_if(held_until_ns_, [&runs](const auto& entry) { return !runs.contains(entry.first); });
  }

  // Those that left before `hold_ns` because of `held_max`.
  uint64_t evicted() const { return evicted_; }

 private:
  const size_t held_max_;
  const int64_t hold_ns_;
  std::map<RunId, std::map<Key, int64_t>> held_until_ns_;
  uint64_t evicted_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HELD_TOP_H_
