// probe_expectations.h: the probe held to naive_probe.h.  Counts must be equal, sums
// agree to 1e-5, the signed bias to 1e-3 of the sum of absolute errors.

#ifndef BELLWETHER_TESTS_KERNELS_PROBE_EXPECTATIONS_H_
#define BELLWETHER_TESTS_KERNELS_PROBE_EXPECTATIONS_H_

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels::testing {

inline void ExpectStats(const Case& a, const char* what) {
  const bool with_delta = a.p.d_o.data != nullptr;
  for (int64_t h = 0; h < a.p.heads; ++h) {
    SCOPED_TRACE(::testing::Message() << what << ", head " << h);
    const std::vector<double> naive = NaiveStats(a, h);
    for (int stat : {kProbeRows, kProbeTiedRowsBf16, kProbeTiedRowsEps, kProbeTiedRowsEpsPaper, kProbeSaturatedRows,
                     kProbeNonfiniteRows, kProbeLogitMax}) {
      EXPECT_EQ(static_cast<double>(a.Out(stat, h)), naive[static_cast<size_t>(stat)]) << "stat " << stat;
    }
    for (int stat : {kProbeCommonModeSum, kProbeSpreadSum, kProbeEntropySum, kProbeSinkSum, kProbeDeltaBiasSumsq,
                     kProbeDeltaAbsSum, kProbeDeltaErrorAbsSum}) {
      const double value = naive[static_cast<size_t>(stat)];
      EXPECT_LE(std::fabs(static_cast<double>(a.Out(stat, h)) - value), 1e-5 * std::fabs(value) + 1e-12)
          << "stat " << stat << " is " << a.Out(stat, h) << ", should be " << value;
    }
    if (!with_delta) continue;
    EXPECT_LE(std::fabs(static_cast<double>(a.Out(kProbeDeltaBiasSum, h)) - naive[kProbeDeltaBiasSum]),
              1e-3 * naive[kProbeDeltaErrorAbsSum] + 1e-12);
  }
  for (int64_t g = 0; g < a.p.kv_heads; ++g) {
    SCOPED_TRACE(::testing::Message() << what << ", key head " << g);
    const auto [sequences, coherence] = NaiveKeys(a, g);
    EXPECT_EQ(static_cast<double>(a.KvOut(kProbeKvSequences, g)), sequences);
    EXPECT_NEAR(static_cast<double>(a.KvOut(kProbeKvKeyCoherenceSum, g)), coherence, 1e-5 * coherence);
  }
}

// Runs both implementations and compares each with the definitions.
inline void Check(Case& a, bool with_delta) {
  a.Bind(with_delta);
  ASSERT_EQ(cpu::ProbeReference(a.p), Status::kOk);
  ExpectStats(a, "reference");
  a.Bind(with_delta);
  ASSERT_EQ(Probe(a.p, {}), Status::kOk) << LastErrorMessage();
  ExpectStats(a, "fast path");
}

}  // namespace bellwether::kernels::testing

#endif  // BELLWETHER_TESTS_KERNELS_PROBE_EXPECTATIONS_H_
