// Goal: on a model with two heads in all, where no head has peers and the
// drift ratio says nothing, the failing bf16 kernel is warned of in the right
// layer before its weights leave the fp32 twin's, and the fp32 twin is never
// critical.
// Method: recordings of both kernels, four seeds each (testdata/tiny).

#include <gtest/gtest.h>

#include "tests/support/judged_run.h"

namespace bellwether::server {
namespace {

const std::string kTinyFolder = BELLWETHER_TESTDATA "/tiny/";

int64_t SigmaPassesThreeTimesItsTwin(const RecordedRun& low, const RecordedRun& twin) {
  for (size_t i = 0; i < std::min(low.items.size(), twin.items.size()); ++i) {
    const auto sigma = low.items[i].sample.matrix(SignalId::kWqSigma);
    const auto healthy = twin.items[i].sample.matrix(SignalId::kWqSigma);
    if (!sigma.empty() && sigma[1] > 3 * healthy[1]) return low.items[i].sample.step;
  }
  return -1;
}

TEST(TinyRunsTest, FailingKernelIsWarnedAndItsTwinIsNotCritical) {
  int in_time = 0;
  for (const char* seed : {"1", "2", "3", "4"}) {
    SCOPED_TRACE(seed);
    const auto low = ReadRecordedRun(kTinyFolder + "bf16-" + seed + ".bwrun");
    const auto twin = ReadRecordedRun(kTinyFolder + "fp32-" + seed + ".bwrun");
    ASSERT_TRUE(low && twin);
    const int64_t passes = SigmaPassesThreeTimesItsTwin(*low, *twin);
    ASSERT_GT(passes, 0);
    const Verdict verdict = Judge(*low);
    in_time += verdict.first_warning >= 0 && verdict.first_warning < passes && verdict.warning.strongest.layer == 1 &&
               verdict.warning.rule == "drift";
    ASSERT_GE(verdict.first_critical, verdict.first_warning);
    EXPECT_EQ(verdict.critical.strongest.layer, 1);
    EXPECT_EQ(Judge(*twin).first_critical, -1);
  }
  EXPECT_GE(in_time, 3);
}

TEST(TinyRunsTest, TheLeakIsAmongTheEvidence) {
  const auto low = ReadRecordedRun(kTinyFolder + "bf16-1.bwrun");
  ASSERT_TRUE(low);
  const Verdict verdict = Judge(*low);
  bool found = false;
  for (const Evidence& evidence : verdict.warning.evidence) {
    if (evidence.signal != "key_leak") continue;
    found = true;
    EXPECT_GT(evidence.value, evidence.baseline);
    EXPECT_GT(evidence.threshold, 0);
    EXPECT_LE(evidence.first_step, verdict.warning.step);
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace bellwether::server
