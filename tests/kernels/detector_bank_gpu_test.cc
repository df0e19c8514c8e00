// Goal: the bank on the GPU gives the medians and hits of the CPU's, bit for bit: many runs
// in a pass, holes, missed rows, runs that come and go.  Needs a GPU; skips without one
// unless BELLWETHER_REQUIRE_GPU=1.
// Method: the same random runs through both.

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "bellwether/kernels/gpu_bank.h"
#include "tests/support/bank_run.h"

namespace bellwether::kernels {
namespace {

using bellwether::testing::RandomBankRun;

class GpuBankTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char device[256];
    if (bw_bank_open(&bank_, device) == 0) return;
    const char* const required = std::getenv("BELLWETHER_REQUIRE_GPU");
    ASSERT_FALSE(required != nullptr && std::strcmp(required, "1") == 0) << bw_bank_error();
    GTEST_SKIP() << bw_bank_error();
  }
  void TearDown() override {
    if (bank_ != nullptr) bw_bank_close(bank_);
  }

  // Evaluates all runs in one pass on the GPU and each on the CPU, and compares.
  void Compare(const std::vector<std::unique_ptr<RandomBankRun>>& runs, int batch) {
    std::vector<BankRun*> pass;
    for (const auto& run : runs) pass.push_back(run->run());
    ASSERT_EQ(bw_bank_evaluate(bank_, pass.data(), static_cast<int32_t>(pass.size())), 0) << bw_bank_error();
    for (const auto& run : runs) {
      const std::vector<uint64_t> hits = run->hits();
      float medians[RandomBankRun::kTracks];
      for (int t = 0; t < RandomBankRun::kTracks; ++t) medians[t] = run->run()->track[t].median;
      cpu::EvaluateDetectors(run->run());
      ASSERT_EQ(hits, run->hits()) << run->run()->heads << " heads, batch " << batch;
      for (int t = 0; t < RandomBankRun::kTracks; ++t) {
        ASSERT_EQ(std::memcmp(&medians[t], &run->run()->track[t].median, sizeof(float)), 0)
            << medians[t] << " and " << run->run()->track[t].median;
      }
      run->Settle();
    }
  }

  bw_bank* bank_ = nullptr;
};

TEST_F(GpuBankTest, GpuHitsEqualTheCpus) {
  std::vector<std::unique_ptr<RandomBankRun>> runs;
  uint64_t key = 0;
  for (const int64_t heads : {1, 31, 64, 257, 1000, 16384}) {
    for (const int32_t window : {20, 64}) {
      runs.push_back(
          std::make_unique<RandomBankRun>(bellwether::testing::BankRunOptions{.heads = heads,
                                                                              .window = window,
                                                                              .key = ++key,
                                                                              .seed = static_cast<uint32_t>(key),
                                                                              .noise = heads == 1000 ? 0.5f : 0.05f,
                                                                              .holes = heads == 64 ? 0.2f : 0.01f}));
    }
  }
  for (int batch = 0; batch < 150; ++batch) {
    for (const auto& run : runs) run->NextBatch();
    // Rows that the device has not seen: the CPU had to do some batches alone.
    if (batch % 37 == 36) {
      for (const auto& run : runs) {
        cpu::EvaluateDetectors(run->run());
        run->Settle();
      }
      continue;
    }
    Compare(runs, batch);
    if (HasFatalFailure()) return;
  }
  for (uint64_t gone = 1; gone <= key; ++gone) EXPECT_EQ(bw_bank_forget(bank_, gone), 0);
  EXPECT_EQ(bw_bank_forget(bank_, 999), 0) << "unknown keys are none";
}

TEST_F(GpuBankTest, EmptyPassesSucceed) {
  EXPECT_EQ(bw_bank_evaluate(bank_, nullptr, 0), 0);
  RandomBankRun run({.heads = 5});
  run.NextBatch();
  run.run()->tests = 0;
  BankRun* pass = run.run();
  EXPECT_EQ(bw_bank_evaluate(bank_, &pass, 1), 0) << bw_bank_error();
}

}  // namespace
}  // namespace bellwether::kernels
