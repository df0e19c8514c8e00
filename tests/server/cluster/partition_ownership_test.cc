// Goal: a run is admitted where its partition is served, and new runs get numbers that
// no run of the partition has.
// Method: one table of two databases; the server alone beside it.

#include "server/cluster/partition_ownership.h"

#include <gtest/gtest.h>

#include <string>

namespace bellwether::server {
namespace {

const RunUuid kUuid = {1, 2, 3};

class PartitionOwnershipTest : public testing::Test {
 protected:
  const uint32_t partition_ = PartitionOf(kUuid, 2);
  const RunId first_ = FirstRunOf(partition_);
  PartitionOwnership ownership_{2, [](uint32_t partition) { return "server-of-" + std::to_string(partition); }};
};

TEST_F(PartitionOwnershipTest, OnlyServedPartitionsAdmitRuns) {
  std::string address;
  const absl::Status refused = ownership_.Admit(kUuid, &address);
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_EQ(address, "server-of-" + std::to_string(partition_));
  EXPECT_FALSE(ownership_.Serves(first_ + 7));

  ownership_.BeginPartition(partition_);
  EXPECT_FALSE(ownership_.Serves(first_ + 7)) << "it is not taken up yet";
  ownership_.ServePartition(partition_);
  address.clear();
  EXPECT_TRUE(ownership_.Admit(kUuid, &address).ok());
  EXPECT_EQ(address, "");
  EXPECT_TRUE(ownership_.Serves(first_ + 7));
  EXPECT_FALSE(ownership_.Serves(FirstRunOf(partition_ + 1) + 7));
  EXPECT_EQ(ownership_.LaneOf(kUuid), DatabaseOf(partition_));

  ownership_.FencePartition(partition_);
  EXPECT_FALSE(ownership_.Admit(kUuid, &address).ok());
  EXPECT_FALSE(ownership_.Serves(first_ + 7));
}

TEST_F(PartitionOwnershipTest, AFencedPartitionIsNotWhole) {
  ownership_.ServePartition(partition_);
  EXPECT_FALSE(ownership_.HasWhole(first_ + 1)) << "its series of before are missing";
  ownership_.CompletePartition(partition_);
  EXPECT_TRUE(ownership_.HasWhole(first_ + 1));
  ownership_.FencePartition(partition_);
  EXPECT_FALSE(ownership_.HasWhole(first_ + 1));
  ownership_.CompletePartition(partition_);  // Too late.
  EXPECT_FALSE(ownership_.HasWhole(first_ + 1));
}

TEST_F(PartitionOwnershipTest, NewNumbersAreAboveKnownOnes) {
  ownership_.BeginPartition(partition_);
  EXPECT_EQ(ownership_.NextRun(kUuid), first_ + 1);
  ownership_.RecordRun(first_ + 9);
  ownership_.RecordRun(first_ + 5);
  EXPECT_EQ(ownership_.NextRun(kUuid), first_ + 10);
  ownership_.BeginPartition(partition_);  // Another server may have removed runs.
  EXPECT_EQ(ownership_.NextRun(kUuid), first_ + 1);
}

TEST(AlwaysHereTest, EveryRunIsServedHere) {
  AlwaysHere alone;
  std::string address;
  EXPECT_TRUE(alone.Admit(kUuid, &address).ok());
  EXPECT_EQ(address, "");
  EXPECT_TRUE(alone.Serves(1));
  EXPECT_TRUE(alone.HasWhole(1));
  EXPECT_EQ(alone.LaneOf(kUuid), 0u);
  EXPECT_EQ(alone.NextRun(kUuid), 1u);
  alone.RecordRun(41);
  EXPECT_EQ(alone.NextRun(kUuid), 42u);
}

}  // namespace
}  // namespace bellwether::server
