// Goal: a launch is the run's next attempt, or the one that it began, whatever number
// its ranks tell.

#include "server/ingest/launches.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace bellwether::server {
namespace {

constexpr int64_t kFirst = 1'790'000'000'000, kSecond = kFirst + 60'000, kThird = kSecond + 60'000;

TEST(LaunchesTest, FirstLaunchHasTheAttemptItStates) {
  const Launches launches;
  EXPECT_EQ(launches.AttemptOf(kFirst, 0), 0);
  EXPECT_EQ(launches.AttemptOf(kFirst, 3), 3);
}

TEST(LaunchesTest, RanksOfOneLaunchShareOneAttempt) {
  Launches launches;
  launches.Begin(kFirst, 0);
  launches.Begin(kSecond, 1);
  for (const uint32_t told : {0, 1, 7}) EXPECT_EQ(launches.AttemptOf(kSecond, told), 1) << told;
}

TEST(LaunchesTest, LaterLaunchIsNextAttemptOrAHigherStatedOne) {
  Launches launches;
  launches.Begin(kFirst, 4);
  EXPECT_EQ(launches.AttemptOf(kSecond, 0), 5);  // A node that is new begins at 0.
  EXPECT_EQ(launches.AttemptOf(kSecond, 4), 5);
  EXPECT_EQ(launches.AttemptOf(kSecond, 9), 9);
}

TEST(LaunchesTest, EarlierLaunchKeepsItsAttempt) {
  Launches launches;
  launches.Begin(kFirst, 0);
  launches.Begin(kThird, 3);
  EXPECT_EQ(launches.AttemptOf(kFirst, 2), 0);
  // It said hello to nobody while it lived: it fits between them by its number, or not at all.
  EXPECT_EQ(launches.AttemptOf(kSecond, 1), 1);
  EXPECT_EQ(launches.AttemptOf(kSecond, 0), std::nullopt);
  EXPECT_EQ(launches.AttemptOf(kSecond, 3), std::nullopt);
  EXPECT_EQ(launches.AttemptOf(kSecond, 4), 4);  // It came later, and its clock is behind.
  EXPECT_EQ(launches.AttemptOf(kFirst - 1, 0), std::nullopt);
}

TEST(LaunchesTest, WithoutALaunchTimeTheStatedAttemptCounts) {
  Launches launches;
  launches.Begin(0, 2);
  EXPECT_EQ(launches.AttemptOf(0, 1), 1);
  EXPECT_EQ(launches.AttemptOf(kFirst, 2), 2);  // The others of this attempt may tell none.
  EXPECT_EQ(launches.AttemptOf(kFirst, 0), 3);  // Nobody would wait for what is behind.
  launches.Begin(kFirst, 2);
  launches.Begin(0, 6);
  EXPECT_EQ(launches.AttemptOf(kSecond, 6), 6);
  EXPECT_EQ(launches.AttemptOf(kSecond, 0), 7);
}

TEST(LaunchesTest, TheNewestAreRemembered) {
  Launches launches;
  for (int64_t i = 0; i < 100; ++i) launches.Begin(kFirst + i, static_cast<uint32_t>(i));
  EXPECT_EQ(launches.newest_attempt(), 99);
  EXPECT_EQ(launches.AttemptOf(kFirst + 99, 0), 99);
  EXPECT_EQ(launches.AttemptOf(kFirst + 84, 0), 84);
  EXPECT_EQ(launches.AttemptOf(kFirst + 83, 83), 83);  // By its number.
}

TEST(LaunchesTest, LaunchFarAheadOfTheClockIsNotCredible) {
  EXPECT_EQ(Launches::Credible(kFirst, kFirst - 3'600'000), kFirst);
  EXPECT_EQ(Launches::Credible(kFirst, kFirst - 3'600'001), 0);
  EXPECT_EQ(Launches::Credible(kFirst, kThird), kFirst);
}

}  // namespace
}  // namespace bellwether::server
