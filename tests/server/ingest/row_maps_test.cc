// Goal: a tensor has one row in a run, in whatever order its ranks count it, over all
// attempts; what has no row is left out and counted.
// Method: two ranks that name the same tensors in other orders, frames of both, and a copy
// that was saved and restored.

#include "server/ingest/row_maps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bellwether::server {
namespace {

using testing::ElementsAre;

constexpr Layout kMappedLayout{.layers = 1, .heads = 2, .kv_heads = 2, .ranks = 2, .tensors = 4};

NamesMessage Tensors(int32_t first, std::vector<std::string> names, uint32_t attempt = 0) {
  return {.attempt = attempt, .granularity = Granularity::kTensor, .first = first, .names = std::move(names)};
}

// Rows [begin, begin + values) as the rank counts them.
RankFrame Sums(int32_t begin, std::vector<float> values, uint32_t attempt = 0) {
  RankFrame frame;
  frame.attempt = attempt;
  frame.blocks = {{SignalId::kReplicaSumLow, begin, static_cast<int32_t>(values.size()), 0, 1, 0}};
  frame.values = std::move(values);
  return frame;
}

class RowMapsTest : public testing::Test {
 protected:
  // By the run's rows; -1 where the rank reported nothing.
  std::vector<float> Rows(uint32_t rank, const RankFrame& frame) {
    const RankFrame translated = maps_.Translate(rank, frame, kMappedLayout, &left_out_);
    std::vector<float> rows(static_cast<size_t>(kMappedLayout.tensors), -1);
    for (const RankBlock& block : translated.blocks) {
      for (int32_t i = 0; i < block.layer_count; ++i) {
        rows[static_cast<size_t>(block.layer_begin + i)] = translated.values[block.offset + static_cast<size_t>(i)];
      }
    }
    return rows;
  }
  RowMaps maps_;
  RunRows rows_;
  uint64_t left_out_ = 0;
};

TEST_F(RowMapsTest, ATensorHasOneRowWhateverARankCounts) {
  EXPECT_EQ(maps_.Add(0, Tensors(0, {"a", "b", "c"}), &rows_), 0);
  EXPECT_EQ(maps_.Add(1, Tensors(0, {"d", "c", "b"}), &rows_), 0);
  EXPECT_THAT(rows_.tensors.names(), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(Rows(0, Sums(0, {1, 2, 3})), ElementsAre(1, 2, 3, -1));
  EXPECT_THAT(Rows(1, Sums(0, {4, 3, 2})), ElementsAre(-1, 2, 3, 4));
  EXPECT_THAT(Rows(1, Sums(1, {3})), ElementsAre(-1, -1, 3, -1));
  EXPECT_EQ(left_out_, 0);
}

TEST_F(RowMapsTest, ValuesWithoutARowAreLeftOutAndCounted) {
  maps_.Add(0, Tensors(0, {"a", "b"}), &rows_);
  EXPECT_THAT(Rows(0, Sums(1, {2, 3})), ElementsAre(-1, 2, -1, -1));
  EXPECT_EQ(left_out_, 1);
  EXPECT_THAT(Rows(1, Sums(0, {1, 2})), ElementsAre(-1, -1, -1, -1)) << "it has named nothing";
  EXPECT_EQ(left_out_, 3);
  EXPECT_THAT(Rows(0, Sums(0, {1}, /*attempt=*/1)), ElementsAre(-1, -1, -1, -1)) << "nor in this attempt";
  EXPECT_EQ(left_out_, 4);
}

TEST_F(RowMapsTest, TheSameNamesAgainChangeNothingOthersAreRefused) {
  maps_.Add(0, Tensors(0, {"a", "b"}), &rows_);
  EXPECT_EQ(maps_.Add(0, Tensors(1, {"b", "c"}), &rows_), 0);
  EXPECT_EQ(maps_.Add(0, Tensors(0, {"b"}), &rows_), 1) << "row 0 is a";
  EXPECT_EQ(maps_.Add(0, Tensors(4, {"e"}), &rows_), 1) << "row 3 is missing";
  EXPECT_THAT(Rows(0, Sums(0, {1, 2, 3})), ElementsAre(1, 2, 3, -1));
}

// Its values would be those of two tensors.
TEST_F(RowMapsTest, ANameTwiceIsRefusedAlone) {
  EXPECT_EQ(maps_.Add(0, Tensors(0, {"a", "b", "a", "c"}), &rows_), 1);
  EXPECT_EQ(maps_.Add(0, Tensors(4, {"b", "d"}), &rows_), 1);
  EXPECT_THAT(rows_.tensors.names(), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(Rows(0, Sums(0, {1, 2, 9, 3, 9, 4})), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(left_out_, 2);
}

TEST_F(RowMapsTest, ANewAttemptNamesAnewAndKeepsTheRunsRows) {
  maps_.Add(0, Tensors(0, {"a", "b"}), &rows_);
  EXPECT_EQ(maps_.Add(0, Tensors(0, {"b", "a"}, /*attempt=*/1), &rows_), 0);
  EXPECT_THAT(Rows(0, Sums(0, {2, 1}, /*attempt=*/1)), ElementsAre(1, 2, -1, -1));
  EXPECT_EQ(maps_.Add(0, Tensors(2, {"c"}, /*attempt=*/0), &rows_), 1) << "a straggler";
  EXPECT_THAT(rows_.tensors.names(), ElementsAre("a", "b"));
}

TEST_F(RowMapsTest, MapsSurviveASave) {
  maps_.Add(0, Tensors(0, {"a", "b", "c"}), &rows_);
  maps_.Add(1, Tensors(0, {"c", "c", "a"}), &rows_);
  std::string state;
  ByteWriter out(&state);
  maps_.Save(&out);
  maps_ = {};
  ByteReader in(state);
  ASSERT_TRUE(maps_.Restore(&in));
  EXPECT_TRUE(in.done());
  EXPECT_THAT(Rows(1, Sums(0, {3, 9, 1})), ElementsAre(1, -1, 3, -1));
  EXPECT_EQ(maps_.Add(1, Tensors(3, {"a"}), &rows_), 1) << "it has that";
  state.resize(state.size() / 2);
  ByteReader cut(state);
  EXPECT_FALSE(maps_.Restore(&cut));
}

TEST_F(RowMapsTest, TooManyTensorsAreRefusedOneByOne) {
  std::vector<std::string> names;
  for (int i = 0; i < kNamedRowsMax; ++i) names.push_back(std::to_string(i));
  EXPECT_EQ(maps_.Add(0, Tensors(0, names), &rows_), 0);
  EXPECT_EQ(maps_.Add(1, Tensors(0, {"new", "5"}), &rows_), 1);
  EXPECT_THAT(Rows(1, Sums(0, {1, 2})), ElementsAre(-1, -1, -1, -1)) << "row 5 is beyond this layout";
}

TEST_F(RowMapsTest, FramesOfHeadsStayAsTheyAre) {
  RankFrame frame;
  frame.blocks = {{SignalId::kRows, 0, 1, 0, 2, 0}, {SignalId::kLoss, 0, 1, 0, 1, 2}};
  frame.values = {1, 2, 3};
  EXPECT_TRUE(RowMaps::IsPlain(frame));
  EXPECT_FALSE(RowMaps::IsPlain(Sums(0, {1})));
}

}  // namespace
}  // namespace bellwether::server
