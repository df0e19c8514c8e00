// Goal: a span of time is told in the unit that people would take, and rounded.
// Method: spans on both sides of each change of the unit.

#include "bellwether/time_text.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace bellwether {
namespace {

TEST(TimeTextTest, SpansAreRoundedInTheUnitThatFits) {
  constexpr double kHour = 3600, kDay = 86400;
  for (const auto& [seconds, text] : {std::pair<double, std::string>(0, "0 s"),
                                      {-5, "0 s"},
                                      {2.6, "3 s"},
                                      {89, "89 s"},
                                      {119, "2 min"},
                                      {25.6 * 60, "26 min"},
                                      {89 * 60, "89 min"},
                                      {1.95 * kHour, "1.9 h"},
                                      {47 * kHour, "47.0 h"},
                                      {3.24 * kDay, "3.2 days"}}) {
    EXPECT_EQ(TimeText(seconds), text) << seconds;
  }
}

}  // namespace
}  // namespace bellwether
