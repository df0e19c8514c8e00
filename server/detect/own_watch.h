// own_watch.h: what a job's own signals (mon.log) show by themselves, with no rules file.
//
// nonfinite  A cell is NaN or infinite after own.finite_values finite values in a row.  What is so from the
//            start, or now and then, is how the job says that there is none.
// limit      A value is beyond a limit that the job has declared.
// past       A cell of a name that the field has has left its own past, to the side that is bad:
//            rewards and entropies fall, KL divergences and logits of routers rise (PastOf in own_signals.h).
//
// The past of a cell are means of own.batch_values values, kOwnWindowBatches of them, all at least
// kOwnLagBatches old: a fall that takes some batches is none of what it is held against.  A mean is off if
// two things hold.  It is beyond all of them by own.range_factor times their range; of what rises and is
// positive, by that of their logarithms, too.  And it has risen to own.rise_factor times their median, or
// fallen by own.fall_share of it.  What drifts, grows or wanders has a wide range, whatever its noise is
// like; so no distribution is assumed.  own.hold_batches in a row are information, own.persist_batches a
// warning.  What is off enters no past until it has been so for own.relearn_batches; then it is the new
// normal, learnt afresh.
//
// apart      What compares the policy that is trained with the one that samples was 0 exactly, in kOwnZeros values
//            in a row, and is not in two: both computed the same, and do no more.  Or it was kOwnRounding at most,
//            as the same sums in another order are, and is above kOwnApart.  A warning, until it is so for
//            kOwnApartMax values.
//
// The state is 2 bytes a cell, and 0.4 KB for each of the first kOwnPastsMax cells with a past.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_OWN_WATCH_H_
#define BELLWETHER_SERVER_DETECT_OWN_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/model/own_signals.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// Cells of a run that are held against their own past: the first so many.
inline constexpr size_t kOwnPastsMax = 256;
inline constexpr uint16_t kOwnZeros = 32, kOwnApartMax = 1000;
inline constexpr float kOwnRounding = 1e-6f, kOwnApart = 1e-4f;
// Cells that are followed while they are wrong, and that one alert tells of, each once.
inline constexpr size_t kOwnWrongMax = 64;

class OwnWatch {
 public:
  explicit OwnWatch(const OwnOptions& options) : options_(options) {}
  void SetOptions(const OwnOptions& options) { options_ = options; }

  struct Context {
    bool pasts = true;        // Whether any is held against its past.
    bool warming = false;     // The first steps of the run.
    bool excused = false;     // Something announced disturbs it.
    int64_t quiet_steps = 0;  // After which what was wrong is news again.
  };
  // Judges a sample; `rows`: of the run, null = none are named.  False: it has no own values.
  bool Observe(const StepSample& sample, const RunRows* rows, const Context& context);
  // What is wrong in the last sample, worst first; it points into `rows`.  The first is news if any of them
  // is, and its words tell of that one, too.
  std::vector<Finding>* findings() { return &findings_; }
  // Levels may have moved: pasts are learnt anew.
  void Forget();
  // A new attempt begins, at an earlier step.
  void Rewind();

  // Cells with a past that had no room, since this process watches the run.
  uint64_t cells_left_out() const { return cells_left_out_; }

  // Whether there is anything to save.
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(finite_), a(wrong_), news_.VisitTold(a), a(pasts_), a(row_of_past_);
  }
  // What came later, which older states lack.
  template <class A>
  void VisitLater(A& a) {
    a(zeros_);
  }
  template <class A>
  void VisitLatest(A& a) {
    a(most_);
  }
  bool Consistent() const;

 private:
  // kPastLong: so long that it is a warning.
  enum class Kind : uint8_t { kNonfinite, kLimit, kPast, kPastLong, kApart };
  // A cell that is wrong, or was so lately.
  struct Wrong {
    uint32_t row = 0;
    Kind kind = Kind::kNonfinite;
    int64_t since = 0, last = 0;
    template <class A>
    void Visit(A& a) {
      a(row), a(kind), a(since), a(last);
    }
  };
  struct Past {
    uint32_t row = 0;
    PastSide side = PastSide::kNone;
    double sum = 0;              // Of the batch under way,
    uint16_t count = 0;          // and of how many values.
    std::vector<float> batches;  // A ring of kOwnWindowBatches + kOwnLagBatches, the oldest at `oldest`.
    uint16_t oldest = 0;
    uint16_t off = 0;  // Batches in a row that were off.
    int64_t since = 0;
    template <class A>
    void Visit(A& a) {
      a(row), a(side), a(sum), a(count), a(batches), a(oldest), a(off), a(since);
    }
  };
  // Of a cell that compares policies.
  struct Zeros {
    uint16_t zeros = 0;   // In a row, kOwnZeros at most,
    uint16_t others = 0;  // and behind them of others.
    int64_t since = 0;
    template <class A>
    void Visit(A& a) {
      a(zeros), a(others), a(since);
    }
  };
  // Of one cell in one sample.
  struct Reading {
    uint32_t row = 0;
    Kind kind = Kind::kNonfinite;
    Severity severity = Severity::kWarning;
    double value = 0, threshold = 0, baseline = 0;
    int64_t since = 0;
    bool news = false;
  };

  static bool IsPast(Kind kind) { return kind == Kind::kPast || kind == Kind::kPastLong; }
  void Grow(const RunRows& rows);
  void Take(uint32_t row, float value, const OwnSignal& signal, const Context& context, int64_t step);
  void Compare(uint32_t row, size_t past, float value, int64_t step);
  // A batch of `past` is whole.
  void Judge(float batch, int64_t step, Past* past);
  void Remember(int64_t step, int64_t quiet_steps);
  void Tell(const RunRows& rows, int64_t step);

  OwnOptions options_;
  std::vector<uint8_t> finite_;        // By row: finite values in a row, own.finite_values at most.
  std::vector<uint16_t> row_of_past_;  // By row: 1 + the index of its past; 0: it has none.
  std::vector<Past> pasts_;
  std::vector<Zeros> zeros_;  // By index of pasts_, as far as any compares policies.
  std::vector<float> most_;   // The same: the largest of those that count as 0.
  std::vector<Wrong> wrong_;  // At most kOwnWrongMax.
  News news_;
  uint64_t cells_left_out_ = 0;
  // Of the last sample.
  std::vector<Reading> readings_;
  std::vector<Finding> findings_;
  std::vector<float> matrix_, scratch_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_OWN_WATCH_H_
