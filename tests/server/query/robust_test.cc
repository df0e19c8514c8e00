// Goal: the peer score is the robust z of robust.h, also where MAD is 0.
// Method: small sets whose median and MAD are known by hand.
#include "server/query/robust.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace bellwether::server {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(RobustTest, IsMedianAndMad) {
  const PeerStatistics peers = DescribePeers({5, 1, 3, 2, 4});  // |x - 3| = 2 2 0 1 1
  EXPECT_EQ(peers.median, 3);
  EXPECT_DOUBLE_EQ(peers.scale, 1.4826);
  EXPECT_DOUBLE_EQ(peers.Score(3 + 2 * 1.4826), 2);
  EXPECT_DOUBLE_EQ(peers.Score(3 - 1.4826), -1);
}

TEST(RobustTest, TakesTheMeanOfTheMiddleTwo) { EXPECT_EQ(DescribePeers({4, 1, 2, 9}).median, 3); }

TEST(RobustTest, AnOutlierMovesNeither) {
  const PeerStatistics peers = DescribePeers({1, 2, 3, 4, 1e30});
  EXPECT_EQ(peers.median, 3);
  EXPECT_DOUBLE_EQ(peers.scale, 1.4826);
  EXPECT_GE(peers.Score(1e30), 1e29);
}

TEST(RobustTest, EqualMajorityFallsBackToTheMeanDeviation) {
  const PeerStatistics peers = DescribePeers({1, 1, 1, 5});  // Mean |x - 1| = 1.
  EXPECT_DOUBLE_EQ(peers.scale, 1.2533);
  EXPECT_DOUBLE_EQ(peers.Score(5), 4 / 1.2533);
}

TEST(RobustTest, EqualPeersGiveZero) { EXPECT_EQ(DescribePeers({2, 2, 2}).Score(2), 0); }

TEST(RobustTest, NonfiniteValuesNeitherCountNorScore) {
  const PeerStatistics peers = DescribePeers({kNan, 1, 2, 3, kInf, -kInf});
  EXPECT_EQ(peers.median, 2);
  EXPECT_TRUE(std::isnan(peers.Score(kNan)));
  EXPECT_TRUE(std::isnan(peers.Score(kInf)));
  EXPECT_TRUE(std::isnan(DescribePeers({kNan}).median));
  EXPECT_TRUE(std::isnan(DescribePeers({}).Score(1)));
}

}  // namespace
}  // namespace bellwether::server
