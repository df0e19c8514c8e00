// Goal: batch means, medians and windows are what they say, with holes, NaN
// and a ring that has wrapped.
// Method: small series by hand.

#include "server/detect/batch_series.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "server/detect/archive.h"
#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
constexpr float kNoValue = std::numeric_limits<float>::quiet_NaN();

TEST(BatchSeriesTest, MeansIgnoreWhatIsNoNumber) {
  BatchSeries series(3, 4);
  EXPECT_FALSE(series.present());
  series.Add(std::vector<float>{1, kNoValue, NotMeasured()});
  series.Add(std::vector<float>{3, 5, NotMeasured()});
  ASSERT_TRUE(series.Close(20));
  EXPECT_EQ(series.newest(0), 2);
  EXPECT_EQ(series.newest(1), 5);
  EXPECT_TRUE(std::isnan(series.newest(2)));
  EXPECT_EQ(series.median(), 2);  // The lower one of two.
  // Nothing new: no row, and what was newest stays.
  EXPECT_FALSE(series.Close(40));
  EXPECT_EQ(series.rows(), 1);
  series.Add(std::vector<float>{kNoValue, 7, kNoValue});
  ASSERT_TRUE(series.Close(60));
  EXPECT_EQ(series.newest(0), 2);
  EXPECT_EQ(series.newest(1), 7);
}

TEST(BatchSeriesTest, TheWindowIsARingOldestFirst) {
  BatchSeries series(2, 4);
  for (int i = 1; i <= 6; ++i) {
    series.Add(std::vector<float>{static_cast<float>(i), 2});
    ASSERT_TRUE(series.Close(i * 20));
  }
  std::vector<float> values, steps;
  series.Window(0, series.rows(), false, &values, &steps);
  EXPECT_THAT(values, ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(steps, ElementsAre(60, 80, 100, 120));
  series.Window(0, 2, true, &values, &steps);
  EXPECT_THAT(values, ElementsAre(2.5f, 3));  // Against the lower median 2.
  EXPECT_EQ(series.span_steps(4), 60);
  EXPECT_EQ(series.span_steps(2), 20);
}

TEST(BatchSeriesTest, RiseComparesTheEnds) {
  BatchSeries series(1, 16);
  for (int i = 0; i < 5; ++i) {
    series.Add(std::vector<float>{1});
    series.Close(i * 20);
  }
  EXPECT_EQ(series.Rise(0, series.rows(), false), 1);  // Ends overlap.
  for (int i = 5; i < 10; ++i) {
    series.Add(std::vector<float>{4});
    series.Close(i * 20);
  }
  EXPECT_EQ(series.Rise(0, series.rows(), false), 4);
  series.ForgetWindow();
  EXPECT_EQ(series.rows(), 0);
  EXPECT_EQ(series.newest(0), 4);
}

TEST(BatchSeriesTest, AStateThatDoesNotFitIsSeen) {
  BatchSeries series(3, 4);
  series.Add(std::vector<float>{1, 2, 3});
  series.Close(20);
  std::string bytes;
  StateWriter writer(&bytes);
  writer(series);
  BatchSeries same(3, 4);
  StateReader reader(bytes);
  reader(same);
  EXPECT_TRUE(reader.at_end());
  EXPECT_TRUE(same.Consistent());
  EXPECT_EQ(same.newest(2), 3);
  BatchSeries other(5, 4);
  StateReader again(bytes);
  again(other);
  EXPECT_FALSE(other.Consistent());
}

}  // namespace
}  // namespace bellwether::server
