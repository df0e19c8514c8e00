// Goal: a number that the job has named itself has one row in a run, whichever rank says it; what
// names it otherwise is left out, by cause and in words.
// Method: frames of two ranks in other orders, definitions that disagree, and too many of all.

#include "server/ingest/own_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/store/record_codec.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::SizeIs;
using testing::UnorderedElementsAre;

OwnSignal Signal(const std::string& name, Granularity granularity = Granularity::kRun, Merge merge = Merge::kMean) {
  return {.name = name, .granularity = granularity, .merge = merge};
}

class OwnValuesTest : public testing::Test {
 protected:
  void Say(const OwnSignal& signal, std::vector<float> values, int32_t layer = 0, int32_t head = 0) {
    frame_.own.push_back({signal, layer, head, values.size(), frame_.values.size()});
    frame_.own.back().signal.attempt = frame_.attempt;
    frame_.values.insert(frame_.values.end(), values.begin(), values.end());
  }
  // What the frame said, by the names of cells; it is then empty.
  std::map<std::string, float> Take(OwnRows* rows = nullptr) {
    std::optional<RunRows> grown;
    refused_.clear();
    const RankFrame out =
        (rows == nullptr ? own_ : *rows).Translate(std::exchange(frame_, {}), rows_, &grown, &refused_);
    if (grown.has_value()) rows_ = *std::move(grown);
    EXPECT_THAT(out.own, IsEmpty());
    std::map<std::string, float> cells;
    for (const RankBlock& block : out.blocks) {
      matrices_[block.signal] += block.layer_count;
      for (int32_t i = 0; i < block.layer_count; ++i) {
        const std::string& name = rows_.own.names().at(static_cast<size_t>(block.layer_begin + i));
        EXPECT_TRUE(cells.emplace(name, out.values[block.offset + static_cast<size_t>(i)]).second) << name;
      }
    }
    return cells;
  }

  RankFrame frame_;
  RunRows rows_;
  OwnRows own_;
  std::vector<OwnRefusal> refused_;
  std::map<SignalId, int> matrices_;
};

TEST_F(OwnValuesTest, ACellHasOneRowWhicheverRankSaysIt) {
  Say(Signal("reward"), {1});
  Say(Signal("load", Granularity::kExpert, Merge::kSum), {2, 3}, /*layer=*/1, /*head=*/4);
  Say(Signal("z", Granularity::kLayer, Merge::kMax), {5, 6}, /*layer=*/2);
  EXPECT_THAT(Take(), UnorderedElementsAre(Pair("reward", 1), Pair("load[1,4]", 2), Pair("load[1,5]", 3),
                                           Pair("z[2]", 5), Pair("z[3]", 6)));
  EXPECT_THAT(matrices_, UnorderedElementsAre(Pair(SignalId::kOwnMean, 1), Pair(SignalId::kOwnSum, 2),
                                              Pair(SignalId::kOwnMax, 2)));
  EXPECT_EQ(rows_.own.size(), 5);
  Say(Signal("load", Granularity::kExpert, Merge::kSum), {7, 8, 9}, /*layer=*/1, /*head=*/3);
  Say(Signal("reward"), {4});
  EXPECT_THAT(Take(), UnorderedElementsAre(Pair("reward", 4), Pair("load[1,3]", 7), Pair("load[1,4]", 8),
                                           Pair("load[1,5]", 9)));
  EXPECT_EQ(rows_.own.size(), 6) << "one is new";
  EXPECT_EQ(rows_.FindOwn("load")->heads, 6);
  EXPECT_THAT(refused_, IsEmpty());
}

TEST_F(OwnValuesTest, ARestartFindsTheRowsAgain) {
  Say(Signal("a"), {1});
  Say(Signal("b"), {2});
  Take();
  OwnRows fresh;
  Say(Signal("b"), {3});
  EXPECT_THAT(Take(&fresh), ElementsAre(Pair("b", 3)));
  EXPECT_EQ(rows_.own.size(), 2);
}

TEST_F(OwnValuesTest, StoredSignalsComeBackWhole) {
  OwnSignal kl = Signal("kl");
  kl.unit = "nats";
  kl.help = "to the reference";
  kl.low = -0.5;
  frame_.attempt = 3;
  Say(kl, {1});
  Say(Signal("load", Granularity::kExpert, Merge::kSum), {2, 3}, /*layer=*/1, /*head=*/4);
  Take();
  rows_.tensors.Add("embed");
  const std::string bytes = EncodeRunRows(rows_);
  const auto back = DecodeRunRows(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->tensors.names(), rows_.tensors.names());
  EXPECT_EQ(back->own.names(), rows_.own.names());
  ASSERT_THAT(back->own_signals, SizeIs(2));
  const OwnSignal& again = back->own_signals[0];
  EXPECT_EQ(again.name, "kl");
  EXPECT_EQ(again.unit, "nats");
  EXPECT_EQ(again.help, "to the reference");
  EXPECT_EQ(again.low, -0.5);
  EXPECT_FALSE(again.high.has_value());
  EXPECT_EQ(again.attempt, 3);
  EXPECT_EQ(back->own_signals[1].merge, Merge::kSum);
  EXPECT_EQ(back->own_signals[1].heads, 6);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeRunRows(std::string_view(bytes).substr(0, size)).ok()) << size;
  }
  rows_.own_signals.clear();
  EXPECT_EQ(EncodeRunRows(rows_)[0], 1) << "a server of before reads what it knows";
}

TEST_F(OwnValuesTest, DisagreementsAreRefusedAndTheRestIsTaken) {
  OwnSignal kl = Signal("kl");
  kl.unit = "nats";
  kl.low = 0;
  Say(kl, {1});
  Take();
  OwnSignal other = kl;
  other.merge = Merge::kSum;
  Say(other, {2});
  other = kl;
  other.granularity = Granularity::kLayer;
  Say(other, {3, 3}, /*layer=*/0);
  other = kl;
  other.unit = "bits";
  Say(other, {4});
  other = kl;
  other.low = -1;
  Say(other, {5});
  Say(Signal("reward"), {6});
  EXPECT_THAT(Take(), ElementsAre(Pair("reward", 6)));
  ASSERT_THAT(refused_, SizeIs(4));
  EXPECT_EQ(refused_[0].why, "merge is sum, and was mean before");
  EXPECT_EQ(refused_[1].why, "granularity is layer, and was run before");
  EXPECT_EQ(refused_[1].values, 2);
  EXPECT_EQ(refused_[2].why, "unit is \"bits\", and was \"nats\" before");
  EXPECT_EQ(refused_[3].why, "low is -1, and was 0 before");
  for (const OwnRefusal& each : refused_) EXPECT_EQ(std::string(NameOf(each.cause)), "disagrees");
  Say(Signal("kl"), {7});
  EXPECT_THAT(Take(), ElementsAre(Pair("kl", 7))) << "what says nothing of it agrees";
}

TEST_F(OwnValuesTest, ALaterAttemptMaySayOtherWords) {
  OwnSignal kl = Signal("kl");
  kl.unit = "nats";
  kl.high = 1;
  Say(kl, {1});
  Take();
  frame_.attempt = 1;
  kl.unit = "bits";
  kl.high = 2;
  Say(kl, {2});
  EXPECT_THAT(Take(), ElementsAre(Pair("kl", 2)));
  EXPECT_EQ(rows_.FindOwn("kl")->unit, "bits");
  EXPECT_EQ(rows_.FindOwn("kl")->high, 2);
  frame_.attempt = 2;
  kl.merge = Merge::kMax;
  Say(kl, {3});
  EXPECT_THAT(Take(), IsEmpty()) << "but how ranks merge stays";
}

TEST_F(OwnValuesTest, LimitsThatAreSaidOneByOneDoNotCross) {
  OwnSignal kl = Signal("kl");
  kl.low = 1;
  Say(kl, {1});
  Take();
  OwnSignal other = Signal("kl");
  other.high = 0.5;
  Say(other, {2});
  EXPECT_THAT(Take(), IsEmpty());
  ASSERT_THAT(refused_, SizeIs(1));
  EXPECT_EQ(refused_[0].why, "low is 1, and high is 0.5: low must be at most high");
  EXPECT_FALSE(rows_.FindOwn("kl")->high.has_value());
  frame_.attempt = 1;
  Say(other, {3});
  EXPECT_THAT(Take(), ElementsAre(Pair("kl", 3)));
  EXPECT_EQ(rows_.FindOwn("kl")->high, 0.5) << "a later attempt may say it otherwise";
  EXPECT_FALSE(rows_.FindOwn("kl")->low.has_value());
}

TEST_F(OwnValuesTest, NamesOfTheCatalogueAreRefused) {
  Say(Signal("drift_ratio"), {1});
  Say(Signal("loss"), {1});
  Say(Signal("kl"), {2});
  EXPECT_THAT(Take(), ElementsAre(Pair("kl", 2)));
  ASSERT_THAT(refused_, SizeIs(2));
  EXPECT_THAT(refused_[0].why, HasSubstr("catalogue"));
}

TEST_F(OwnValuesTest, ARunHasSoManySignalsAndCells) {
  for (size_t i = 0; i < kOwnSignalsMax + 2; ++i) Say(Signal(absl::StrCat("s", i)), {1});
  EXPECT_THAT(Take(), SizeIs(kOwnSignalsMax));
  EXPECT_THAT(refused_, SizeIs(2));
  const std::vector<float> many(1024, 1);
  const OwnSignal first = rows_.own_signals[0];
  rows_ = {};
  own_ = {};
  for (int32_t layer = 0; layer < kNamedRowsMax / 1024 + 1; ++layer) {
    Say(Signal("load", Granularity::kExpert), many, layer);
  }
  EXPECT_THAT(Take(), SizeIs(static_cast<size_t>(kNamedRowsMax)));
  ASSERT_THAT(refused_, SizeIs(1));
  EXPECT_EQ(refused_[0].values, 1024);
  EXPECT_EQ(std::string(NameOf(refused_[0].cause)), "cells");
  Say(Signal("load", Granularity::kExpert), many, kNamedRowsMax / 1024);
  EXPECT_THAT(Take(), IsEmpty()) << "and again";
  EXPECT_EQ(first.name, "s0");
}

}  // namespace
}  // namespace bellwether::server
