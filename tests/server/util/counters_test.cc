// Goal: the same name and labels are the same counter; a histogram's buckets
// are right at their bounds; nothing is lost between threads.
// Method: values at and beside every bound; threads that add.
#include "server/util/counters.h"

#include <gmock/gmock.h>

#include <thread>

namespace bellwether::server {
namespace {

TEST(CountersTest, SameNameAndLabelsAreOneCounterListedInOrder) {
  Counters counters;
  Counter* const a = counters.counter("a_total", {{"reason", "x"}});
  EXPECT_EQ(counters.counter("a_total", {{"reason", "x"}}), a);
  EXPECT_NE(counters.counter("a_total", {{"reason", "y"}}), a);
  a->Add();
  a->Add(2.5);
  counters.gauge("0_gauge")->Set(4);
  counters.histogram("b_seconds");
  const auto entries = counters.List();
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].name, "0_gauge");
  EXPECT_EQ(entries[0].gauge->value(), 4);
  EXPECT_EQ(entries[1].counter->value(), 3.5);
  EXPECT_NE(entries[3].histogram, nullptr);
}

TEST(CountersTest, HistogramBucketsIncludeTheirUpperBound) {
  Histogram histogram({1, 2});
  for (const double value : {0.5, 1.0, 1.5, 2.0, 2.5}) histogram.Observe(value);
  EXPECT_THAT(histogram.counts(), testing::ElementsAre(2, 2, 1));
  EXPECT_EQ(histogram.sum(), 7.5);
}

TEST(CountersTest, LosesNothingBetweenThreads) {
  Counters counters;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&counters] {
      for (int i = 0; i < 10000; ++i) counters.counter("n_total")->Add();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counters.counter("n_total")->value(), 40000);
}

}  // namespace
}  // namespace bellwether::server
