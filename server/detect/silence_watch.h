// silence_watch.h: what has stopped reporting while others go on.
//
// A rule finds nothing where its signals do not arrive, which looks like health.  Three kinds of places are
// followed, each held against its own kind, since one that is measured seldom is no silence of the others:
//   heads    each signal of heads in each layer, in samples that have any signal of heads.
//   tensors  each named tensor, in samples that have any signal of tensors.
//   run      loss, gradient norm, learning rate, and heads as such, in samples that have any of these.
// A place that has reported kReportsLeast times is silent after kHeadsLeast or kOthersLeast samples without it, and
// after kLongest times its longest pause so far.  So what takes turns, or is logged now and then, is not.
//
// Samples that lack a rank do not count: that rank is silent, which its deadline tells.  What is announced may
// change what is measured: Forget().
//
// The state is 5 bytes a place.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_SILENCE_WATCH_H_
#define BELLWETHER_SERVER_DETECT_SILENCE_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr uint8_t kReportsLeast = 8;
inline constexpr uint16_t kHeadsLeast = 16, kOthersLeast = 64;
inline constexpr uint16_t kLongest = 4;
// Evidence: samples of its kind since a place last reported.
inline constexpr char kSamplesWithout[] = "samples_without";

class SilenceWatch {
 public:
  // Takes a sample in.
  void Observe(const StepSample& sample);
  // What is silent after the last sample, worst first; `tensors`: their names, null = none are named.  It is news
  // each time that twice as many places are silent as were when it last was.
  std::vector<Finding> Find(const RowNames* tensors);
  // Begins anew: a new attempt, or something that changes what is measured.
  void Forget();
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(layers_), a(signals_), a(heads_), a(tensors_), a(run_), a(told_);
  }
  bool Consistent() const;

 private:
  // Of one kind.
  struct Places {
    std::vector<uint16_t> without;  // Samples since it last reported; not counted before it first did.
    std::vector<uint16_t> longest;  // The longest pause that has ended.
    std::vector<uint8_t> reports;   // Up to kReportsLeast.
    template <class A>
    void Visit(A& a) {
      a(without), a(longest), a(reports);
    }
    size_t size() const { return without.size(); }
    void Grow(size_t size);
    void Note(size_t place, bool reports_now);
    uint16_t LimitOf(size_t place, uint16_t least) const;
    bool IsSilent(size_t place, uint16_t least) const { return without[place] > LimitOf(place, least); }
    bool Consistent() const { return longest.size() == size() && reports.size() == size(); }
    size_t memory_bytes() const { return without.capacity() * 4 + reports.capacity(); }
  };

  void ObserveHeads(const StepSample& sample);
  void ObserveTensors(const StepSample& sample);
  void ObserveRun(const StepSample& sample);
  // Each returns how many places are silent.
  size_t FindHeads(std::vector<Finding>* findings) const;
  size_t FindTensors(const RowNames* names, std::vector<Finding>* findings) const;
  size_t FindOfRun(std::vector<Finding>* findings) const;

  int32_t layers_ = 0;
  std::vector<SignalId> signals_;  // Of heads, as they first came.
  Places heads_;                   // [signals_][layers_]
  Places tensors_;                 // By row.
  Places run_;
  uint32_t told_ = 0;  // Silent places, when they last were news.
  int64_t step_ = -1;  // Of the last sample.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SILENCE_WATCH_H_
