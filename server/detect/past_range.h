// past_range.h: between which values a series lay, in two whole blocks of its past.
//
// A block is of kBlock values.  The one under way is no past: what rises slowly is not held against itself.
// So the past is kBlock values old at most, and 2 kBlock long.  What is not finite must not be added.
//
// Plain values; not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_PAST_RANGE_H_
#define BELLWETHER_SERVER_DETECT_PAST_RANGE_H_

#include <algorithm>
#include <array>
#include <cstdint>

namespace bellwether::server {

template <int kBlock, class T = float>
class PastRange {
 public:
  static_assert(kBlock > 0 && kBlock <= 255);

  void Add(T value) {
    Range& now = blocks_[2];
    if (count_ == 0) now = {value, value};
    now = {std::min(now.low, value), std::max(now.high, value)};
    if (++count_ == kBlock) Close();
  }
  // What is under way is past from now on.  Few values are no block of their own, which would be narrow: they
  // join the one before, or wait for more where there is none.
  void Close() {
    if (count_ == 0) return;
    if (2 * count_ < kBlock) {
      if (whole_ == 0) return;
      blocks_[1] = {std::min(blocks_[1].low, blocks_[2].low), std::max(blocks_[1].high, blocks_[2].high)};
      count_ = 0;
      return;
    }
    std::rotate(blocks_.begin(), blocks_.begin() + 1, blocks_.end());
    count_ = 0;
    whole_ = std::min<uint8_t>(2, static_cast<uint8_t>(whole_ + 1));
  }

  // Whether there is a past.
  bool known() const { return whole_ == 2; }
  // REQUIRES: known().
  T low() const { return std::min(blocks_[0].low, blocks_[1].low); }
  T high() const { return std::max(blocks_[0].high, blocks_[1].high); }
  bool empty() const { return whole_ == 0 && count_ == 0; }
  // Of all that is kept, the block under way included.  REQUIRES: !empty().
  float middle() const {
    const size_t first = 2u - whole_, end = count_ > 0 ? 3 : 2;
    Range all = blocks_[first];
    for (size_t i = first + 1; i < end; ++i) {
      all = {std::min(all.low, blocks_[i].low), std::max(all.high, blocks_[i].high)};
    }
    return 0.5f * (static_cast<float>(all.low) + static_cast<float>(all.high));
  }

  template <class A>
  void Visit(A& a) {
    for (Range& block : blocks_) a(block.low), a(block.high);
    a(count_), a(whole_);
  }
  bool Consistent() const { return count_ < kBlock && whole_ <= 2; }

 private:
  struct Range {
    T low{}, high{};
  };
  std::array<Range, 3> blocks_{};  // The oldest first; the last is under way.
  uint8_t count_ = 0;              // Of the block under way.
  uint8_t whole_ = 0;              // Blocks before it.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_PAST_RANGE_H_
