// run_windows.h: the newest steps of one run, raw, in memory.
//
// One window per signal, [step][cell], so that an append is a copy; a full one
// is encoded and kept until the database has it.
//
// Append, Seal, Save and Restore belong to one thread; Collect and the counts
// may be called from any.

#ifndef BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_
#define BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/store/series_reader.h"
#include "server/store/step_sample.h"

namespace bellwether::server {

// Signal 0: what a step is, as the bit patterns of four cells.
inline constexpr uint8_t kMetaSignal = 0;
inline constexpr size_t kMetaCells = 4;
void EncodeMeta(const StepSample& sample, float* cells);
void DecodeMeta(const std::vector<float>& cells, StepSample* sample);

class RunWindows {
 public:
  struct Sealed {
    uint64_t number = 0;  // Rises within the run.
    uint8_t signal = 0;
    uint32_t part = 0;
    uint32_t attempt = 0;
    int64_t first_step = 0;
    std::shared_ptr<const std::string> bytes;
  };

  RunWindows(const Layout& layout, size_t window_steps, int zstd_level)
      : layout_(layout), window_steps_(window_steps), zstd_level_(zstd_level) {}

  absl::Status Append(const StepSample& sample);
  void SealAll();
  std::vector<Sealed> TakeSealed() const;  // They stay until Forget().
  void Forget(uint64_t number_max);

  std::string Save() const;
  absl::Status Restore(std::string_view state);

  const Layout& layout() const { return layout_; }
  // Of the signal's parts [part_begin, part_end).
  void Collect(uint8_t signal, uint32_t part_begin, uint32_t part_end, std::vector<MemoryWindow>* windows) const;
  std::set<uint8_t> Signals() const;
  int64_t memory_bytes() const;

 private:
  struct Open {
    size_t cells = 0;
    std::vector<int64_t> steps;
    std::vector<float> values;  // [window_steps][cells]
  };
  void AppendRow(uint8_t signal, int64_t step, std::span<const float> row);
  void Seal(uint8_t signal, Open* open);

  const Layout layout_;
  const size_t window_steps_;
  const int zstd_level_;
  mutable absl::Mutex mutex_;
  uint32_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;
  bool any_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint8_t, Open> open_;  // Written under mutex_; its owner reads without.
  std::deque<Sealed> sealed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RUN_WINDOWS_H_
