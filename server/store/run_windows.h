// run_windows.h: the newest steps of one run, raw, in memory.
//
// One window per signal, [step][cell], so that an append is a copy.  As long as
// the store's budget lasts a window holds a whole chunk and becomes one.  What
// a save finds in it is also stored as unfinished rows, which a restart reads
// back and the chunk supersedes.  Beyond the budget a window holds a few steps
// only and is stored as it is; the packer makes chunks of stored windows.
// Which of the two is decided when a signal comes first, for good.
//
// Append, SealAll, Save and the Restore functions belong to one thread; Collect
// and the counts may be called from any.

#ifndef BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_
#define BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/model/step_sample.h"
#include "server/store/derived_spans.h"
#include "server/store/series_reader.h"

namespace bellwether::server {

// kMetaSignal: what a step is, as the bit patterns of four cells.
inline constexpr size_t kMetaCells = 4;
void EncodeMeta(const StepSample& sample, float* cells);
void DecodeMeta(const std::vector<float>& cells, StepSample* sample);

// Bytes that all runs share.  Thread-safe.
class MemoryBudget {
 public:
  explicit MemoryBudget(int64_t bytes) : left_(bytes) {}
  bool Take(int64_t bytes);  // False: there are not as many left.
  void Return(int64_t bytes) { left_ += bytes; }

 private:
  std::atomic<int64_t> left_;
};

class RunWindows {
 public:
  struct Options {
    size_t window_steps = 32;  // Of a signal beyond the budget.
    size_t chunk_steps = 256;  // More for signals with few cells.
    int zstd_level = 1;
    // Chunks of many cells take time to make: signals, and runs with different
    // numbers here, fill theirs at different steps.
    uint64_t stagger = 0;
  };
  // Steps [first_step, ...) of a window that has not become a chunk yet.
  struct Unfinished {
    uint16_t signal = 0;
    uint32_t attempt = 0;
    int64_t first_step = 0;
    std::vector<std::string> parts;
  };
  // A row that was stored as Unfinished and is no longer needed.
  struct Superseded {
    uint32_t part = 0;
    int64_t first_step = 0;
    size_t bytes = 0;
  };
  // What is ready to be stored for good.
  struct Sealed {
    uint64_t number = 0;  // Rises within the run.
    uint16_t signal = 0;
    uint32_t attempt = 0;
    int64_t first_step = 0;
    bool is_chunk = false;  // Else a window.
    // Of kGroupCells cells each for a chunk, of kPartCells for a window.
    std::vector<std::shared_ptr<const std::string>> rows;
    std::vector<std::string> summaries;  // Of a chunk or a derived signal, by group.
    std::vector<Superseded> superseded;
  };

  // `budget` must outlive this object.
  RunWindows(const Layout& layout, const Options& options, MemoryBudget* budget);
  ~RunWindows();

  // The sample's layout may have grown (Layout::GrowTo).
  absl::Status Append(const StepSample& sample);
  void SealAll();
  // For a save, one at a time.  Seals the windows that nothing else keeps, and
  // returns what the others have not stored yet.  That counts as stored from
  // then on, so that a window that is sealed before the save ends supersedes
  // it.
  std::vector<Unfinished> TakeUnfinished();
  // That save failed, or its result is not known.
  void NotStored();
  std::vector<std::shared_ptr<const Sealed>> TakeSealed() const;  // They stay until Forget().
  void Forget(uint64_t number_max);

  // All but values: those are in Sealed and Unfinished.
  std::string Save() const;
  absl::Status Restore(std::string_view state);
  // One stored Unfinished, by rising step for each signal; after Restore().
  absl::Status RestoreUnfinished(const Unfinished& stored);

  const Layout& layout() const { return layout_; }
  // Cells [cell_begin, cell_end) of the signal.
  void Collect(uint16_t signal, size_t cell_begin, size_t cell_end, std::vector<MemoryBlock>* blocks) const;
  int64_t memory_bytes() const;

 private:
  struct Open {
    size_t cells = 0;
    size_t steps_max = 0;   // Of this window; room is for
    size_t steps_full = 0;  // these.
    bool becomes_chunk = false;
    std::vector<int64_t> steps;
    std::vector<float> values;           // [steps_full][cells]
    size_t stored = 0;                   // Rows that are stored as unfinished.
    std::vector<Superseded> superseded;  // As which they are stored.
  };
  // Windows of signals that have more cells now begin anew.
  void Grow(const Layout& layout);
  Open* FindOrOpen(uint16_t signal, size_t cells) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AppendRow(uint16_t signal, int64_t step, std::span<const float> row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How long the window is until it is sealed, when it begins with all others.
  size_t FirstSteps(uint16_t signal, const Open& open) const;
  void Seal(uint16_t signal, Open* open);
  std::vector<std::string> EncodeParts(const Open& open, size_t first_row) const;
  void Push(std::shared_ptr<Sealed> sealed);
  void PushDerived(const std::vector<DerivedSpans::Finished>& finished);

  Layout layout_;  // Its owner's.
  const Options options_;
  MemoryBudget* const budget_;
  mutable absl::Mutex mutex_;
  DerivedSpans derived_ ABSL_GUARDED_BY(mutex_);
  uint32_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;
  bool any_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t budget_taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint16_t, Open> open_;                    // Written under mutex_; its owner reads without.
  std::vector<std::pair<uint16_t, int64_t>> taken_;  // The owner's: signal and first step of what was last taken.
  std::deque<std::shared_ptr<const Sealed>> sealed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_
