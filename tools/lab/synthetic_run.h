// synthetic_run.h: a made-up healthy run, of any length and size.
//
// What false alarms cost is a matter of a million steps and a thousand heads,
// more than was recorded.  A synthetic run has the levels, spreads,
// noise and trends of the recorded healthy and benign runs, on the signals that
// the wire carries, and one thing that recorded runs have little of.
//
// In ln, per head, with unit noise u, and tau = ln(step / 5000):
//   x(step) = level + exponent tau + wander g sin(1.05 tau + phase) + sigma u(step)
// Heads' levels are spread.  Their slow trends (amplitude g normal over heads,
// phase uniform) take them to and fro, so that the spread stays as it is.  In
// the recorded runs heads that start high fall, and the other way round.
//
//   signal          level   head  wander  sigma  95 %   exponent
//   drift ratio     0.95    0.6   0.38    0.12   0.26   0
//   spread          3.8     1.0   0.29    0.085  0.14   0
//   tied rows       0.027   0.6   0.38    0.30   0.60   0
//   largest score   25      0.8   0.29    0.12   0.23   0
//   entropy ratio   0.46    0.5   0.23    0.055  0.18   0
//   sigma(W_Q)      5.0     0.28          0.007  0.012  0.39, over heads 0.16
//   loss            1.65                  0.08
//   gradient norm   0.55                  0.10, kurtosis 9
//
// "head": standard deviation over heads, of which `wander` is that of the slow
// trend; "95 %": of sigma over heads.  Large heads are the quieter ones: sigma
// goes with level^-0.56 for the drift ratio and level^-0.3 for tied rows.  Two
// thirds of the noise's variance are white, one third is AR(0.98).  The
// drift ratios of 11,000 steps were compared with those of the 6 quiet runs of
// tests/testdata/runs that report them, from step 1,000 on, samples 10 steps
// apart (recorded in brackets):
//   * standard deviation within 640 steps 0.11 (0.10), 95 % 0.20 (0.23);
//   * about a line over the run 0.14 (0.14), 95 % 0.26 (0.30), with a
//     correlation of neighbours of 0.4 (0.5);
//   * exponents of step, 5 and 95 % of heads, -0.59 and 0.57 (-0.52 and 0.73).
//
// What is no head: synthetic_places.h.
//
// The key-gradient leak, which those runs do not report: level 4e-4, sigma 0.2
// as in the healthy layer of tests/testdata/tiny/bf16-*; its spread over heads
// (0.5) is assumed.

#ifndef BELLWETHER_TOOLS_LAB_SYNTHETIC_RUN_H_
#define BELLWETHER_TOOLS_LAB_SYNTHETIC_RUN_H_

#include <cstdint>

#include "server/offline/recorded_run.h"

namespace bellwether::server {

enum class SyntheticKind : uint8_t {
  kAsRecorded,
  kAr90,        // All noise of a head is AR(0.9) from sample to sample.
  kAr98,        // AR(0.98): it wanders for 500 steps.
  kHeavyTails,  // Student's t with 3 degrees of freedom, white.
  kLogGrowth,   // All grow with step^0.4, as the median head of the fastest recorded run.
  kSeasonal,    // Waves of 400 to 4,000 steps, as large as the noise.
  kRestarts,    // A new attempt every 2,000 to 4,000 steps, up to 500 steps back; announced or not.
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
  bool places = true;     // Whether it reports what is no head: synthetic_places.h.
  uint64_t seed = 1;
};

// The same options give the same run with one C++ standard library.
void WalkSyntheticRun(const SyntheticOptions& options, RunListener* listener);

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SYNTHETIC_RUN_H_
