// Goal: whatever the device does, every run gets the CPU's hits: alone, with other
// threads' runs in one pass, and when the device fails in the middle; a library
// that does not fit is refused with a sentence.
// Method: a library that computes on the CPU and fails on demand
// (tests/support/fake_gpu_bank.cc); the real one: tests/kernels/detector_bank_gpu_test.cc.

#include "server/detect/gpu_bank.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/detect/bank_choice.h"
#include "tests/support/bank_run.h"

namespace bellwether::server {
namespace {

using ::bellwether::testing::RandomBankRun;
using ::testing::HasSubstr;

class GpuBankTest : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("BELLWETHER_FAKE_BANK_PASSES");
    unsetenv("BELLWETHER_FAKE_BANK_ABI");
  }

  std::unique_ptr<GpuBank> Open() {
    auto bank = GpuBank::Open(BELLWETHER_FAKE_BANK, [this](const std::string& why) {
      ++failures_;
      why_ = why;
    });
    EXPECT_TRUE(bank.ok()) << bank.status();
    return *std::move(bank);
  }

  std::atomic<int> failures_ = 0;
  std::string why_;
};

// `threads` threads with a run each, 40 batches; the hits must be the CPU's.
void Race(DetectorBank* bank, int threads) {
  std::vector<std::thread> shards;
  for (int i = 0; i < threads; ++i) {
    shards.emplace_back([bank, i] {
      RandomBankRun run({.heads = 100 + i, .key = static_cast<uint64_t>(i + 1), .seed = static_cast<uint32_t>(i + 1)});
      RandomBankRun same({.heads = 100 + i, .seed = static_cast<uint32_t>(i + 1)});
      for (int batch = 0; batch < 40; ++batch) {
        run.NextBatch();
        bank->Evaluate(run.run());
        run.Settle();
        same.NextBatch();
        kernels::cpu::EvaluateDetectors(same.run());
        same.Settle();
        ASSERT_EQ(run.hits(), same.hits());
      }
      bank->Forget(static_cast<uint64_t>(i + 1));
    });
  }
  for (std::thread& shard : shards) shard.join();
}

TEST_F(GpuBankTest, ManyShardsShareItsPasses) {
  const auto bank = Open();
  EXPECT_EQ(bank->device(), "fake device");
  Race(bank.get(), 8);
  EXPECT_STREQ(bank->backend(), "cuda");
  EXPECT_GE(bank->passes(), 40);
  EXPECT_LE(bank->passes(), 8 * 40);
  EXPECT_EQ(failures_, 0);
}

TEST_F(GpuBankTest, AFailureLosesNoTickAndIsToldOnce) {
  setenv("BELLWETHER_FAKE_BANK_PASSES", "25", 1);
  const auto bank = Open();
  Race(bank.get(), 8);
  EXPECT_STREQ(bank->backend(), "cpu");
  EXPECT_EQ(bank->passes(), 25);
  EXPECT_EQ(failures_, 1);
  EXPECT_THAT(why_, HasSubstr("fell off the bus"));
}

TEST_F(GpuBankTest, AutoFallsBackToTheCpuAndOnFails) {
  const auto ignore = [](const std::string&) {};
  BankOptions options{.gpu = "auto", .library = "/no/such/library.so"};
  auto bank = OpenBank(options, ignore);
  ASSERT_TRUE(bank.ok());
  EXPECT_EQ(*bank, nullptr);
  options.gpu = "on";
  bank = OpenBank(options, ignore);
  EXPECT_EQ(bank.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(bank.status().message()), HasSubstr("/no/such/library.so"));
  options.library = BELLWETHER_FAKE_BANK;
  bank = OpenBank(options, ignore);
  ASSERT_TRUE(bank.ok());
  EXPECT_NE(*bank, nullptr);
  options.gpu = "off";
  bank = OpenBank(options, ignore);
  ASSERT_TRUE(bank.ok());
  EXPECT_EQ(*bank, nullptr);
  options.gpu = "yes";
  EXPECT_THAT(std::string(OpenBank(options, ignore).status().message()),
              HasSubstr("gpu is yes, but must be auto, on or off"));
}

TEST_F(GpuBankTest, ALibraryOfAnotherBuildIsRefused) {
  setenv("BELLWETHER_FAKE_BANK_ABI", "7", 1);
  const auto bank = GpuBank::Open(BELLWETHER_FAKE_BANK, [](const std::string&) {});
  EXPECT_EQ(bank.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(bank.status().message()), HasSubstr("its interface is 7"));
}

}  // namespace
}  // namespace bellwether::server
