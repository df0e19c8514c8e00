// detector_bank.h: which heads of a run satisfy the detectors' tests at the end of
// a batch.
//
// A series is one signal of one head, thinned to batch means; a track is that signal
// of all heads of a run, struct of arrays.  A test compares the newest means with a
// threshold that follows the track's median head; it may also ask that the series has
// risen over its window, and that the rise is a trend.  What follows from a hit (how
// long it must hold, which stage, which alert) is the caller's.
//
//   hit = x > max(absolute, factor max(median, floor))
//         and, if windows >= 0, for one of the windows
//             rise of its newest `rows` rows >= rise_min
//             and, if trend, the fit to them (trend.h) has z >= z_min, r2 >= r2_min
//             and doubles within doubling_steps_max
//   median = the lower median of the track's newest finite values
//   rise   = mean of the three newest finite values / that of the three oldest; 1 if
//            there are fewer than 6, or the oldest are not above 0
//
// `relative` divides each row by its median before rise and trend.
//
// cpu:: is the specification; cuda:: (GpuBank) gives the same bits for every float:
// comparisons, IEEE sums in one order, and a logarithm of our own (trend_parts.h).

#ifndef BELLWETHER_KERNELS_DETECTOR_BANK_H_
#define BELLWETHER_KERNELS_DETECTOR_BANK_H_

#include <cstdint>

#include "bellwether/kernels/trend.h"

namespace bellwether::kernels {

inline constexpr int32_t kBankTracksMax = 16;
inline constexpr int32_t kBankTestsMax = 16;
inline constexpr int32_t kBankWindowsMax = 2;
inline constexpr int32_t kBankRowsMax = 64;
inline constexpr int64_t kBankHeadsMax = int64_t{1} << 20;

// One signal of all heads.  The window is a ring: row `age` of 0 (oldest) to rows - 1
// lies at (next - rows + age) mod window.
struct BankTrack {
  // [heads], NaN = never measured; null: no head ever was, and no test is a hit.
  const float* newest = nullptr;
  // [window][heads], NaN = not measured in that batch; null without a window.
  const float* ring = nullptr;
  const float* ring_median = nullptr;  // [window]; of the row at `slot`: not yet
  const float* ring_step = nullptr;    // [window]
  int32_t window = 0;                  // 0..64
  int32_t rows = 0;                    // 0..window
  int32_t next = 0;                    // 0..window - 1
  // The batch that just ended measured something: `median` is wanted, and stands for
  // ring_median[slot].  slot: where the newest row lies, -1 without a window.
  bool fresh = false;
  int32_t slot = -1;
  // Rows ever written to the ring, this batch's included: how a copy on another device
  // knows whether it is complete.
  int64_t rows_written = 0;
  // Whether the row at `slot` differs from `newest`: some heads were not measured.
  bool holes = false;
  float median = 0;  // In: of the batch before.  Out, if fresh: NaN if nothing is finite.
};

struct BankWindow {
  int32_t rows = 0;  // 1..track.rows
  double rise_min = 0;
  double doubling_steps_max = 0;
};

struct BankTest {
  int32_t track = 0;
  double absolute = 0;
  double factor = 0;
  double floor = 0;
  // -1: the value alone decides.  0: no window is long enough yet, no hit.
  int32_t windows = -1;
  BankWindow window[kBankWindowsMax];
  bool relative = false;
  bool trend = false;
  int32_t points_min = 0;
  double z_min = 0;
  double r2_min = 0;
  // [heads], 1 = the caller has no use for this head's hit, which may then be left at
  // 0; null = all are wanted.
  const uint8_t* unwanted = nullptr;
};

struct BankRun {
  int64_t heads = 0;   // 0..2^20
  int32_t tracks = 0;  // 0..16
  int32_t tests = 0;   // 0..16
  // Not 0, and of no other run in this process: names the copy on another device.
  uint64_t key = 0;
  BankTrack track[kBankTracksMax];
  BankTest test[kBankTestsMax];
  // Out, [tests][HitWords(heads)]: bit h % 64 of word h / 64.
  uint64_t* hits = nullptr;
};

// A NaN median counts as `floor`.
constexpr double ThresholdOf(double absolute, double factor, double floor, double median) {
  const double level = factor * (median > floor ? median : floor);
  return level > absolute ? level : absolute;
}

constexpr int64_t HitWords(int64_t heads) { return (heads + 63) / 64; }

// The lower median of the finite values among `count`: of two the smaller; NaN if there
// are none.  `scratch` holds `count` floats.
float LowerMedian(const float* values, int64_t count, float* scratch);

// The rise that a test asks for, as defined above.
float RiseOf(const BankTrack& track, int64_t heads, int64_t head, int32_t rows, bool relative);

// Whether the head passes the windows of a test that has some, its value aside.  If the
// test asks for a trend, `*trend` is the one that passed.
bool PassesWindows(const BankTest& test, const BankTrack& track, int64_t heads, int64_t head, Trend* trend);

// Copies the newest `rows` values of a series, oldest first, and their steps.
void CopyWindow(const BankTrack& track, int64_t heads, int64_t head, int32_t rows, bool relative, float* values,
                float* steps);

}  // namespace bellwether::kernels

namespace bellwether::kernels::cpu {

// Any thread; not two at a time over one run.
void EvaluateDetectors(BankRun* run);

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_DETECTOR_BANK_H_
