// bank_run.h: runs for a detector bank, made from a seed: their windows fill, wrap and
// have holes, some of their series grow.

#ifndef BELLWETHER_TESTS_SUPPORT_BANK_RUN_H_
#define BELLWETHER_TESTS_SUPPORT_BANK_RUN_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "bellwether/kernels/detector_bank.h"

namespace bellwether::testing {

struct BankRunOptions {
  int64_t heads = 256;
  int32_t window = 64;
  uint64_t key = 1;
  uint32_t seed = 1;
  float noise = 0.1f;
  float holes = 0.01f;  // Share of cells that a batch does not measure.
  int grow_each = 16;   // Every so many heads one doubles each 8 batches.
};

// Four tracks, of which the last has no window, and a test of each kind.
class RandomBankRun {
 public:
  explicit RandomBankRun(const BankRunOptions& options) : options_(options), random_(options.seed) {
    const auto heads = static_cast<size_t>(options.heads);
    for (int t = 0; t < kTracks; ++t) {
      newest_[t].assign(heads, std::numeric_limits<float>::quiet_NaN());
      if (t == kTracks - 1) continue;
      ring_[t].assign(heads * static_cast<size_t>(options.window), 0);
      ring_median_[t].assign(static_cast<size_t>(options.window), 0);
      ring_step_[t].assign(static_cast<size_t>(options.window), 0);
    }
    run_.heads = options.heads;
    run_.tracks = kTracks;
    run_.key = options.key;
    hits_.resize(kTests * static_cast<size_t>(kernels::HitWords(options.heads)));
    run_.hits = hits_.data();
  }
  RandomBankRun(const RandomBankRun&) = delete;
  RandomBankRun& operator=(const RandomBankRun&) = delete;

  // Ends a batch: new means for all tracks, and the tests as a server would set them.
  void NextBatch() {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    ++batch_;
    const auto heads = static_cast<size_t>(options_.heads);
    for (int t = 0; t < kTracks; ++t) {
      kernels::BankTrack& track = run_.track[t];
      const bool windowed = t != kTracks - 1;
      const int32_t slot = windowed ? next_ : -1;
      bool holes = false;
      for (size_t h = 0; h < heads; ++h) {
        const bool grows = options_.grow_each > 0 && h % static_cast<size_t>(options_.grow_each) == 0;
        const float growth = grows ? std::exp2(static_cast<float>(batch_ % 100) / 8.0f) : 1.0f;
        float value = growth * std::exp(options_.noise * normal(random_));
        if (uniform(random_) < options_.holes) value = std::numeric_limits<float>::quiet_NaN();
        holes |= std::isnan(value);
        if (!std::isnan(value)) newest_[t][h] = value;
        if (windowed) ring_[t][static_cast<size_t>(slot) * heads + h] = value;
      }
      track.newest = newest_[t].data();
      track.fresh = true;
      track.holes = holes;
      track.slot = slot;
      if (!windowed) continue;
      ring_step_[t][static_cast<size_t>(slot)] = static_cast<float>(batch_ * 20);
      track.ring = ring_[t].data();
      track.ring_median = ring_median_[t].data();
      track.ring_step = ring_step_[t].data();
      track.window = options_.window;
      track.rows = std::min(batch_, options_.window);
      track.next = (slot + 1) % options_.window;
      ++track.rows_written;
    }
    next_ = (next_ + 1) % options_.window;
    SetTests();
  }

  // After an evaluation: what Settle() of a BatchSeries does.
  void Settle() {
    for (int t = 0; t < kTracks - 1; ++t)
      ring_median_[t][static_cast<size_t>(run_.track[t].slot)] = run_.track[t].median;
  }

  kernels::BankRun* run() { return &run_; }
  const std::vector<uint64_t>& hits() const { return hits_; }
  bool Hit(int test, int64_t head) const {
    const auto words = static_cast<size_t>(kernels::HitWords(options_.heads));
    return (hits_[static_cast<size_t>(test) * words + static_cast<size_t>(head / 64)] >> (head % 64) & 1) != 0;
  }

  static constexpr int kTracks = 4;
  static constexpr int kTests = 5;

 private:
  void SetTests() {
    run_.tests = kTests;
    const int32_t rows = run_.track[0].rows;
    // By value; by rise; by trend over two windows; relative; of the track without one.
    run_.test[0] = {.track = 0, .absolute = 1.2, .factor = 1.1, .floor = 1.0};
    run_.test[1] = {.track = 1, .factor = 1.05, .windows = 1};
    run_.test[1].window[0] = {.rows = rows, .rise_min = 1.1};
    run_.test[2] = {.track = 2, .factor = 1.0, .floor = 0.5, .trend = true, .points_min = 8, .z_min = 4, .r2_min = 0.8};
    run_.test[2].windows = rows >= 16 ? 2 : 0;
    run_.test[2].window[0] = {.rows = rows, .rise_min = 1.05, .doubling_steps_max = 2000};
    run_.test[2].window[1] = {.rows = std::min(rows, 16), .rise_min = 1.02, .doubling_steps_max = 500};
    run_.test[3] = run_.test[2];
    run_.test[3].track = 1;
    run_.test[3].relative = true;
    run_.test[3].r2_min = 0;
    run_.test[4] = {.track = 3, .absolute = 1.5};
  }

  const BankRunOptions options_;
  std::mt19937 random_;
  int32_t batch_ = 0;
  int32_t next_ = 0;
  std::vector<float> newest_[kTracks], ring_[kTracks], ring_median_[kTracks], ring_step_[kTracks];
  std::vector<uint64_t> hits_;
  kernels::BankRun run_;
};

}  // namespace bellwether::testing

#endif  // BELLWETHER_TESTS_SUPPORT_BANK_RUN_H_
