// rank_jump.h: a series that is higher than all of its past from one value on.
//
// It holds if kRankHigher of the newest kRankNewest values are above each of the kRankPast before those.  Their middle
// is above that of the past by `least`, and by 1.5 times as much as the highest of the past.  Of values in any order
// that has a chance of 3e-9 a look, whatever they scatter by: 45 of the 1.5e10 ways in which the highest 8 of 74 can
// lie.  Losses wander, which makes it likelier: in 180,000 steps of healthy recordings no loss and no gradient norm did
// it.
//
// And the past ended as low as it was, the first values above it are as high as all, and they rise no more: what
// rises from step to step is no jump.  It has to be twice as far as the middle of kRankNewest values has wandered
// above those before, lately.  Where neighbours of the past are alike, eight in a row say little.  There the first of
// them must come at once: by 1.5 times as much as any two neighbours of the past differ.  It is over once the newest
// values lie in the past again, or the new level is the usual one.
//
// Plain values; not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_RANK_JUMP_H_
#define BELLWETHER_SERVER_DETECT_RANK_JUMP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bellwether::server {

inline constexpr size_t kRankPast = 64;
inline constexpr size_t kRankNewest = 10;
inline constexpr size_t kRankHigher = 8;

class RankJump {
 public:
  // `least` has the unit of the values.  REQUIRES: a finite value.
  void Observe(int64_t step, double value, double least);
  // What was before is no past of what comes.
  void Forget();
  bool holds() const { return since_ >= 0; }
  // REQUIRES below: holds().
  int64_t since() const { return since_; }     // The first value above all before.
  double level() const { return level_; }      // The middle of the past,
  double highest() const { return highest_; }  // its highest value,
  double value() const { return value_; }      // and the middle of the newest.
  size_t memory_bytes() const { return values_.capacity() * sizeof(Value); }
  bool Consistent() const { return values_.size() <= kRankPast + kRankNewest; }

  template <class A>
  void Visit(A& a) {
    a(values_), a(since_), a(held_), a(wandered_), a(level_), a(highest_), a(value_);
  }

 private:
  struct Value {
    int64_t step = -1;
    float value = 0;
    template <class A>
    void Visit(A& a) {
      a(step), a(value);
    }
  };
  double NewestMiddle() const;
  void Wander();
  void Look(double least);

  std::vector<Value> values_;  // Oldest first.
  int64_t since_ = -1;
  int32_t held_ = 0;    // Values since it holds; else since the last look at how far they wander.
  float wandered_ = 0;  // Forgotten by half in some 350 values.
  double level_ = 0, highest_ = 0, value_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RANK_JUMP_H_
