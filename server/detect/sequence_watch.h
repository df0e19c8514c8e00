// sequence_watch.h: batches that are not what they were, by what mon.losses() tells.
//
// repeated  Nearly all labels that count are the same as the one before: sequences.repeated_share, where no
//           step of the past had sequences.usual_share.  What is so from the start is how the data is.
// loss      The largest loss of a sequence lies beyond all of its past by sequences.range_factor times its
//           range, and by that of the logarithms, and is sequences.rise_factor times the largest of it.
// odd       Two or three of the newest batches are odd (odd_batches.h): bad data, a warning.
// nothing   There is nothing to learn.  No label counts, two steps long.  Or for eight steps nearly all labels repeat
//           the one before while the loss is not up.  Or for as long the batch has exactly as many labels, and
//           repeated ones, as the step before, where both had always varied.
//
// The past of the first two are the last 256 to 384 values (PastRange).  What is wrong enters none until it has
// been so for sequences.relearn_values; then it is the new normal.  One value is information,
// sequences.hold_values in a row are a warning.  The job names the largest sequences in an event of the step.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_SEQUENCE_WATCH_H_
#define BELLWETHER_SERVER_DETECT_SEQUENCE_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/detect/odd_batches.h"
#include "server/detect/past_range.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr size_t kSequenceWordsMax = 256;  // Bytes, of one event.
inline constexpr int64_t kBadDataSteps = 40;      // What lasts longer may be a step change of the loss.

class SequenceWatch {
 public:
  explicit SequenceWatch(const SequencesOptions& options) : options_(options) {}
  void SetOptions(const SequencesOptions& options) { options_ = options; }

  // Names the largest sequences of its step; other events are ignored.
  void OnEvent(const RunEvent& event);
  struct Context {
    bool excused = false;     // Something announced may change what is usual: it is learnt, and not judged.
    int64_t quiet_steps = 0;  // After which what was wrong is news again.
    bool rate_rose = false;   // The learning rate did, lately: a loss that jumps need not be the data's.
  };
  // Judges a sample.  False: it tells of no sequence, or is excused.
  bool Observe(const StepSample& sample, const Context& context);
  std::vector<Finding>* findings() { return &findings_; }
  // A new attempt begins.
  void Rewind();
  bool has_seen() const { return seen_; }
  // Bad data is about, and was not for long: a loss that is up may be its.
  bool bad_data() const { return odd_.lasts() && odd_.last_step() - odd_.first_step() < kBadDataSteps; }
  bool bad_data_ended() const { return odd_.ended(); }
  bool nothing_to_learn() const { return nothing_; }
  size_t memory_bytes() const { return odd_.memory_bytes(); }

  template <class A>
  void Visit(A& a) {
    a(seen_), a(excused_), a(repeated_), a(loss_), a(news_), a(words_step_), a(words_loss_), a(words_);
  }
  // What older states do not have.
  template <class A>
  void VisitLater(A& a) {
    a(odd_), a(odd_told_), a(nothing_), a(masked_), a(masked_since_), a(had_labels_), a(constant_), a(constant_since_),
        a(same_labels_);
    a(same_repeated_), a(same_), a(same_longest_), a(same_changes_), a(same_since_);
  }
  bool Consistent() const {
    return repeated_.past.Consistent() && loss_.past.Consistent() && words_.size() <= kSequenceWordsMax &&
           odd_.Consistent();
  }

 private:
  struct Course {
    PastRange<128> past;
    uint16_t off = 0;  // Values in a row.
    int64_t since = -1;
    template <class A>
    void Visit(A& a) {
      a(past), a(off), a(since);
    }
  };
  // Of a job that tells no losses of sequences: by the step's alone.
  bool ObserveMean(const StepSample& sample, const Context& context);
  // Counts batches that have nothing to learn; true: the findings say so.
  bool FindNothing(const StepSample& sample);
  void AddNothing(SignalId signal, const char* detector, double value, double threshold, int32_t count, int64_t since,
                  std::string summary);
  void FindOdd(const StepSample& sample);
  // The next value of a course, which is off or not; the finding where it is.
  Finding* Take(float value, bool off, float threshold, SignalId signal, const char* detector, int64_t step,
                Course* course);

  SequencesOptions options_;
  bool seen_ = false;
  bool excused_ = false;  // The last sample was.
  Course repeated_, loss_;
  OddBatches odd_;
  int64_t odd_told_ = -1;  // First step of the newest bad data that was told.
  bool nothing_ = false;   // The last sample had nothing to learn.
  // Steps in a row, and since when: without a label that counts,
  int32_t masked_ = 0;
  int64_t masked_since_ = -1;
  int32_t had_labels_ = 0;  // Steps that had some.
  // with nearly all labels the same,
  int32_t constant_ = 0;
  int64_t constant_since_ = -1;
  // and with as many labels, and repeated ones, as the step before.
  float same_labels_ = -1, same_repeated_ = -1;
  int32_t same_ = 0, same_longest_ = 0, same_changes_ = 0;
  int64_t same_since_ = -1;
  News news_;
  // What the job has said of its largest sequences, and of which step.
  int64_t words_step_ = -1;
  double words_loss_ = 0;
  std::string words_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SEQUENCE_WATCH_H_
