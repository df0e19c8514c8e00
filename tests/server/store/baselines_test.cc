// Goal: what is learned survives a crash, stays within its limits with the
// newest runs kept, and a row that cannot be read is dropped, not fatal.
// Method: the real database; a crash is a copy of its folder while it is open.
#include "server/store/baselines.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "server/store/record_codec.h"
#include "tests/support/crash_copy.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

BaselinePercentiles Learned(RunId run, const std::string& kind, float level) {
  BaselinePercentiles bands{.run = run,
                            .name = "run-" + std::to_string(run),
                            .kind = kind,
                            .attempt = 1,
                            .step = 5000,
                            .steps_recorded = 500,
                            .learned_unix_ns = 7};
  bands.uuid[0] = static_cast<uint8_t>(run);
  // In no order: the table sorts.
  for (const SignalId signal : {SignalId::kLogitMax, SignalId::kDriftRatio}) {
    for (const int range : {9, 3}) {
      Band band{.signal = signal, .range = static_cast<uint8_t>(range), .values = 10};
      band.quantiles.fill(level * static_cast<float>(range));
      bands.bands.push_back(band);
    }
  }
  return bands;
}

class BaselinesTest : public testing::Test {
 protected:
  void Open(const Baselines::Options& options = {}) {
    baselines_.reset();
    database_.reset();
    auto opened = Database::Open({.directory = path_});
    ASSERT_TRUE(opened.ok()) << opened.status();
    database_ = *std::move(opened);
    baselines_ = std::make_unique<Baselines>(options, database_.get(), &counters_);
    ASSERT_TRUE(baselines_->Load().ok());
  }
  // Goes on with what is on disk now.
  void Crash() {
    const std::string copy = path_ + "-copy";
    CrashCopy(path_, copy);
    path_ = copy;
  }
  double refused(const char* limit) {
    return counters_.counter("bellwether_baseline_limit_refused_total", {{"limit", limit}})->value();
  }
  double runs() { return counters_.gauge("bellwether_baseline_runs")->value(); }

  TempDirectory directory_;
  std::string path_ = directory_.path() + "/db";
  Counters counters_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<Baselines> baselines_;
};

TEST_F(BaselinesTest, FindsSiblingsAtTheStageWithoutTheRunItself) {
  Open();
  ASSERT_TRUE(baselines_->Put(Learned(1, "gpt", 1)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(2, "gpt", 3)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(3, "llama", 100)).ok());
  const int64_t step = BandBegin(9) + 1;
  const SiblingBand both = baselines_->Find("gpt", 9, SignalId::kDriftRatio, step);
  EXPECT_EQ(both.runs, 2u);
  EXPECT_EQ(both.min, 9);
  EXPECT_EQ(both.max, 27);
  EXPECT_EQ(both.step_begin, BandBegin(9));
  const SiblingBand other = baselines_->Find("gpt", 2, SignalId::kDriftRatio, step);
  EXPECT_EQ(other.runs, 1u);
  EXPECT_EQ(other.max, 9);
  EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kDriftRatio, BandBegin(10)).runs, 0u) << "nobody got there";
  EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kKeyLeak, step).runs, 0u) << "nobody reported it";
  EXPECT_EQ(baselines_->Find("bert", 9, SignalId::kDriftRatio, step).runs, 0u);
  EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kDriftRatio, -1).runs, 0u);
}

// With own signals as means, or maxima, of these names, whose level is 1, 2, ... by their place.
BaselinePercentiles WithOwn(RunId run, const std::vector<std::string>& names, SignalId matrix) {
  BaselinePercentiles bands = Learned(run, "gpt", 1);
  bands.own = names;
  for (size_t i = names.size(); i > 0; --i) {
    Band band{.signal = matrix, .own = static_cast<uint16_t>(i), .range = 9, .values = 10};
    band.quantiles.fill(static_cast<float>(i));
    bands.bands.push_back(band);
  }
  return bands;
}

TEST_F(BaselinesTest, OwnSignalsAreFoundByName) {
  Open();
  ASSERT_TRUE(baselines_->Put(WithOwn(1, {"kl", "reward"}, SignalId::kOwnMean)).ok());
  ASSERT_TRUE(baselines_->Put(WithOwn(2, {"a", "b", "kl"}, SignalId::kOwnMean)).ok());
  ASSERT_TRUE(baselines_->Put(WithOwn(3, {"kl"}, SignalId::kOwnMax)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(4, "gpt", 1)).ok());
  for (const bool crashed : {false, true}) {
    if (crashed) {
      Crash();
      Open();
    }
    const int64_t step = BandBegin(9);
    const SiblingBand kl = baselines_->Find("gpt", 9, SignalId::kOwnMean, step, "kl");
    EXPECT_EQ(kl.runs, 2u) << "a maximum is not held against means";
    EXPECT_EQ(kl.min, 1);
    EXPECT_EQ(kl.max, 3);
    EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kOwnMean, step, "reward").max, 2);
    EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kOwnMean, step, "entropy").runs, 0u);
    EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kOwnMean, step).runs, 0u) << "no name";
    EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kDriftRatio, step).runs, 4u);
  }
}

TEST_F(BaselinesTest, WithoutOwnSignalsServersOfBeforeReadIt) {
  EXPECT_EQ(EncodeBaselinePercentiles(Learned(1, "gpt", 1))[0], 1);
  const std::string bytes = EncodeBaselinePercentiles(WithOwn(1, {"kl"}, SignalId::kOwnMean));
  EXPECT_EQ(bytes[0], 2);
  Open();
  BaselinePercentiles lost = WithOwn(1, {"kl"}, SignalId::kOwnMean);
  lost.bands.back().own = 2;  // It has one name.
  ASSERT_TRUE(database_->PutBands(1, EncodeBaselinePercentiles(lost)).ok());
  ASSERT_TRUE(baselines_->Load().ok());
  EXPECT_EQ(baselines_->Get(1), nullptr);
}

TEST_F(BaselinesTest, LearnedAndForgottenRunsSurviveACrash) {
  Open();
  ASSERT_TRUE(baselines_->Put(Learned(1, "gpt", 1)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(2, "gpt", 2)).ok());
  ASSERT_TRUE(baselines_->Remove(1).ok());
  ASSERT_TRUE(baselines_->Remove(7).ok()) << "not known: nothing to do";
  Crash();
  Open();
  EXPECT_EQ(baselines_->Get(1), nullptr);
  const auto kept = baselines_->Get(2);
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(EncodeBaselinePercentiles(*kept).size(), EncodeBaselinePercentiles(Learned(2, "gpt", 2)).size());
  EXPECT_EQ(kept->name, "run-2");
  EXPECT_EQ(kept->uuid[0], 2);
  EXPECT_EQ(kept->attempt, 1u);
  EXPECT_EQ(kept->step, 5000);
  EXPECT_EQ(kept->steps_recorded, 500u);
  EXPECT_EQ(kept->learned_unix_ns, 7);
  EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kLogitMax, BandBegin(3)).p50, 6);
  EXPECT_EQ(runs(), 1);
}

TEST_F(BaselinesTest, ARunCountsOnceAndUnderItsNewestKind) {
  Open();
  ASSERT_TRUE(baselines_->Put(Learned(1, "gpt", 1)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(1, "gpt", 5)).ok());
  EXPECT_EQ(baselines_->Find("gpt", 9, SignalId::kDriftRatio, BandBegin(9)).max, 45);
  ASSERT_TRUE(baselines_->Put(Learned(1, "llama", 5)).ok());
  EXPECT_TRUE(baselines_->Siblings("gpt", 0).empty());
  ASSERT_EQ(baselines_->List().size(), 1u);
  EXPECT_EQ(baselines_->List()[0][0]->kind, "llama");
  EXPECT_EQ(runs(), 1);
}

TEST_F(BaselinesTest, TheNewestRunsOfAKindStay) {
  Open({.runs_per_kind_max = 2});
  ASSERT_TRUE(baselines_->Put(Learned(5, "gpt", 1)).ok());
  ASSERT_TRUE(baselines_->Put(Learned(6, "gpt", 1)).ok());
  EXPECT_EQ(refused("runs_per_kind"), 0) << "at the limit";
  EXPECT_TRUE(baselines_->HasRoomFor(7, "gpt"));
  EXPECT_TRUE(baselines_->HasRoomFor(5, "gpt")) << "it is there";
  EXPECT_FALSE(baselines_->HasRoomFor(4, "gpt"));
  EXPECT_TRUE(baselines_->HasRoomFor(4, "llama"));
  ASSERT_TRUE(baselines_->Put(Learned(7, "gpt", 1)).ok());
  EXPECT_EQ(refused("runs_per_kind"), 1);
  ASSERT_TRUE(baselines_->Put(Learned(4, "gpt", 1)).ok());
  EXPECT_EQ(refused("runs_per_kind"), 2);
  Crash();
  Open({.runs_per_kind_max = 2});
  ASSERT_EQ(baselines_->Siblings("gpt", 0).size(), 2u);
  EXPECT_EQ(baselines_->Siblings("gpt", 0)[0]->run, 7u);
  EXPECT_EQ(baselines_->Siblings("gpt", 0)[1]->run, 6u);
}

TEST_F(BaselinesTest, AllKindsTogetherAreBounded) {
  Open({.runs_max = 3});
  for (const RunId run : {2, 3, 4}) ASSERT_TRUE(baselines_->Put(Learned(run, "kind-" + std::to_string(run), 1)).ok());
  EXPECT_EQ(refused("runs"), 0);
  EXPECT_FALSE(baselines_->HasRoomFor(1, "new"));
  ASSERT_TRUE(baselines_->Put(Learned(5, "new", 1)).ok());
  EXPECT_EQ(refused("runs"), 1);
  EXPECT_EQ(baselines_->Get(2), nullptr);
  EXPECT_EQ(runs(), 3);
}

TEST_F(BaselinesTest, ARowThatCannotBeReadIsDroppedForGood) {
  Open();
  ASSERT_TRUE(baselines_->Put(Learned(1, "gpt", 1)).ok());
  std::string newer = EncodeBaselinePercentiles(Learned(2, "gpt", 1));
  newer[0] = 99;
  ASSERT_TRUE(database_->PutBands(2, newer).ok());
  ASSERT_TRUE(database_->PutBands(3, "damaged").ok());
  ASSERT_TRUE(database_->PutBands(4, EncodeBaselinePercentiles(Learned(8, "gpt", 1))).ok());
  BaselinePercentiles late = Learned(5, "gpt", 1);
  late.bands = {{.signal = SignalId::kLoss, .range = kBandRanges}};
  ASSERT_TRUE(database_->PutBands(5, EncodeBaselinePercentiles(late)).ok());
  Open();
  EXPECT_EQ(runs(), 1);
  EXPECT_NE(baselines_->Get(1), nullptr);
  EXPECT_EQ(database_->ListBands()->size(), 1u);
}

}  // namespace
}  // namespace bellwether::server
