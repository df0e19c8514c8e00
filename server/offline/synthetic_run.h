// synthetic_run.h: a healthy run that nobody trained, of any length and size.
//
// What false alarms cost is a matter of a million steps and a thousand heads,
// and nobody has recorded so many.  A synthetic run has the levels, spreads,
// noise and trends of the recorded healthy and benign runs, on the signals that
// the wire carries, and one thing that recorded runs have little of.
//
// In ln, per head:  x(step) = level + exponent ln(step / 1000) + sigma u(step)
// with unit noise u.  Measured on the 7 runs of tests/testdata/runs, from step
// 1,000 on, samples 10 steps apart; "head": standard deviation over a run's
// heads, "95 %": of sigma over heads, "lag 1": correlation of neighbours.
//
//   signal          level, head    sigma, 95 %   lag 1  exponent, head
//   drift ratio     0.95    0.6    0.145  0.30   0.5     0.07  0.38
//   spread          3.8     1.0    0.11   0.18   0.6    -0.03  0.25
//   tied rows       0.027   0.6    0.30   0.60   0.1    -0.06  0.30
//   largest score   25      0.8    0.14   0.26   0.4    -0.08  0.30
//   entropy ratio   0.46    0.5    0.06   0.20   0.4     0.03  0.20
//   sigma(W_Q)      3.0     0.28   0.007  0.012  0.9     0.39  0.20
//   loss            1.65           0.08          0.0
//   gradient norm   0.55           0.10          0.05, kurtosis 7 to 25
//
// The key-gradient leak, which those runs do not report: level 4e-4, sigma 0.2
// as in the healthy layer of tests/testdata/tiny/bf16-*; its spread over heads
// (0.5) is assumed.  A correlation of 0.5 at lag 1 of which a tenth is left
// within 640 steps is half white noise and half AR(0.98).

#ifndef BELLWETHER_SERVER_OFFLINE_SYNTHETIC_RUN_H_
#define BELLWETHER_SERVER_OFFLINE_SYNTHETIC_RUN_H_

#include <cstdint>

#include "server/offline/recorded_run.h"

namespace bellwether::server {

enum class SyntheticKind : uint8_t {
  kAsRecorded,
  kAr90,        // All noise of a head is AR(0.9) from sample to sample.
  kAr98,        // AR(0.98): it wanders for 500 steps.
  kHeavyTails,  // Student's t with 3 degrees of freedom, white.
  kLogGrowth,   // Every head grows with ln(step), up to twice as much as recorded.
  kSeasonal,    // Waves of 400 to 4,000 steps, as large as the noise.
  kRestarts,    // A new attempt every 2,000 to 4,000 steps, up to 500 steps back; told or not.
  kMissing,     // Cells, signals, samples, and 500 steps at a time are missing.
  kPeriods,     // Heads are sampled every 5, 10, 20, 50 or 100 steps, by turns.
};
inline constexpr int kSyntheticKinds = 9;

// "as recorded", "AR(0.9)", ...
const char* NameOf(SyntheticKind kind);

struct SyntheticOptions {
  SyntheticKind kind = SyntheticKind::kAsRecorded;
  int32_t layers = 32, heads = 32;
  int64_t steps = 25000;
  bool key_leak = false;  // Whether the run reports it.
  uint64_t seed = 1;
};

// The same options give the same run with one C++ standard library.
void WalkSyntheticRun(const SyntheticOptions& options, RunListener* listener);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_SYNTHETIC_RUN_H_
