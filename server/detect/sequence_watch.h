// sequence_watch.h: batches whose sequences are not what they were, by what mon.losses() tells.
//
// repeated  Nearly all labels that count are the same as the one before: sequences.repeated_share, where no
//           step of the past had sequences.usual_share.  What is so from the start is how the data is.
// loss      The largest loss of a sequence lies beyond all of its past by sequences.range_factor times its
//           range, and by that of the logarithms, and is sequences.rise_factor times the largest of it.
//
// The past are the last 256 to 384 values (PastRange).  What is wrong enters none until it has been so for
// sequences.relearn_values; then it is the new normal.  One value is information, sequences.hold_values in a
// row are a warning.  The job names the largest sequences in an event of the step (OnEvent).
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
#include "server/detect/past_range.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr size_t kSequenceWordsMax = 256;  // Bytes, of one event.

class SequenceWatch {
 public:
  explicit SequenceWatch(const SequencesOptions& options) : options_(options) {}
  void SetOptions(const SequencesOptions& options) { options_ = options; }

  // Names the largest sequences of its step; other events are ignored.
  void OnEvent(const RunEvent& event);
  struct Context {
    bool excused = false;     // Something announced may change what is usual: it is learnt, and not judged.
    int64_t quiet_steps = 0;  // After which what was wrong is news again.
  };
  // Judges a sample.  False: it tells of no sequence, or is excused.
  bool Observe(const StepSample& sample, const Context& context);
  std::vector<Finding>* findings() { return &findings_; }
  // A new attempt begins.
  void Rewind();
  bool has_seen() const { return seen_; }

  template <class A>
  void Visit(A& a) {
    a(seen_), a(excused_), a(repeated_), a(loss_), a(news_), a(words_step_), a(words_loss_), a(words_);
  }
  bool Consistent() const {
    return repeated_.past.Consistent() && loss_.past.Consistent() && words_.size() <= kSequenceWordsMax;
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
  // The next value of a course, which is off or not; the finding where it is.
  Finding* Take(float value, bool off, float threshold, SignalId signal, const char* detector, int64_t step,
                Course* course);

  SequencesOptions options_;
  bool seen_ = false;
  bool excused_ = false;  // The last sample was.
  Course repeated_, loss_;
  News news_;
  // What the job has said of its largest sequences, and of which step.
  int64_t words_step_ = -1;
  double words_loss_ = 0;
  std::string words_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SEQUENCE_WATCH_H_
