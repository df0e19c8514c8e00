// head_tests.h: the built-in tests of a head, as a detector bank takes them.
//
// A test holds at a batch's end or not; for how long it must, and what follows,
// is HeadRules' business.  Source: docs/concepts/detection.md.

#ifndef BELLWETHER_SERVER_DETECT_HEAD_TESTS_H_
#define BELLWETHER_SERVER_DETECT_HEAD_TESTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bellwether/kernels/detector_bank.h"
#include "server/detect/batch_series.h"
#include "server/detect/judge_options.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// The signals that are watched.
enum HeadTrack : size_t { kRatio, kCommonMode, kLeak, kTied, kSigma, kLogitMax, kEntropy, kHeadTracks };

struct HeadTrackInfo {
  SignalId signal;
  const char* name;
  bool window;  // Whether its past is looked at.
};
extern const std::array<HeadTrackInfo, kHeadTracks> kHeadTrackInfo;

enum HeadTest : size_t {
  kGrowth,        // of the drift ratio
  kLevel,         // of the drift ratio
  kCommonGrowth,  // of the common mode
  kLeaking,
  kTies,
  kNorm,
  kLogit,
  kHeadTests
};

// Makes `test` ask for exponential growth by `trend`: over the whole window, or as
// often doubled within the newest part of it.
void AskForGrowth(const TrendOptions& trend, const BatchSeries& series, kernels::BankTest* test);

// The rule, or the part of one, that the test belongs to.
Builtin BuiltinOf(HeadTest test);

// Consecutive batches that the test must hold.
int32_t HoldBatches(const JudgeOptions& options, HeadTest test);

// Above what a value is a hit, given the median head's.
double ThresholdOf(const JudgeOptions& options, HeadTest test, double median);

// Fills in `run` but for its key, hits and what is unwanted.  `series`: one per
// track, of `heads` heads each; its batches have just been closed.
void SetRun(const JudgeOptions& options, const std::vector<BatchSeries>& series, size_t heads, kernels::BankRun* run);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_HEAD_TESTS_H_
