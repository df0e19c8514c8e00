// Goal: a tenant gets what his quota says, to the last stream and frame, and no
// more; what ends gives back; nobody else notices.
// Method: a clock that stands still unless it is moved.

#include "server/access/quota.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/util/grpc_status.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

class QuotaTest : public ::testing::Test {
 protected:
  FakeClock clock_;
  Counters counters_;
  Quotas quotas_{&counters_, &clock_};
};

TEST_F(QuotaTest, StreamsRunsAndConnectionsAtTheLimitAndBeyond) {
  quotas_.Set({{"t", {.connections_max = 2, .streams_max = 3, .runs_max = 2}}});
  auto a = quotas_.Open("t", "peer1");
  auto b = quotas_.Open("t", "peer1");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_TRUE((*a)->EnterRun("run1").ok());
  EXPECT_TRUE((*b)->EnterRun("run2").ok());
  auto c = quotas_.Open("t", "peer2");
  ASSERT_TRUE(c.ok());
  EXPECT_THAT(std::string((*c)->EnterRun("run3").message()), HasSubstr("2 runs"));
  const absl::Status fourth = quotas_.Open("t", "peer1").status();
  EXPECT_EQ(fourth.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(fourth.message()), HasSubstr("3 streams"));
  c->reset();  // Its run was refused: it gives back the stream only.
  auto d = quotas_.Open("t", "peer1");
  ASSERT_TRUE(d.ok());
  EXPECT_THAT(std::string((*d)->EnterRun("run9").message()), HasSubstr("2 runs"));
  b->reset();
  EXPECT_TRUE((*d)->EnterRun("run9").ok()) << "what ended gave back";
  auto e = quotas_.Open("t", "peer9");
  ASSERT_TRUE(e.ok());
  EXPECT_TRUE((*e)->EnterRun("run1").ok()) << "no further run";
  e->reset();
  d->reset();
  auto f = quotas_.Open("t", "peer8");
  ASSERT_TRUE(f.ok());
  EXPECT_THAT(std::string(quotas_.Open("t", "peer7").status().message()), HasSubstr("2 connections"));
  ASSERT_TRUE(quotas_.Open("other", "peer1").ok());
  EXPECT_EQ(*quotas_.Open("other", "peer1"), nullptr) << "no quota";
  EXPECT_EQ(counters_.counter("bellwether_quota_refused_total", {{"quota", "runs"}})->value(), 2);
  EXPECT_EQ(counters_.counter("bellwether_quota_refused_total", {{"quota", "connections"}})->value(), 1);
}

TEST_F(QuotaTest, ARateIsKeptToTheFrame) {
  quotas_.Set({{"t", {.frames_per_second_max = 10, .bytes_per_second_max = 1000}}});
  const auto use = quotas_.Open("t", "p");
  ASSERT_TRUE(use.ok());
  for (int i = 0; i < 10; ++i) EXPECT_EQ((*use)->Charge(10), 0) << i;
  const int64_t wait_ns = (*use)->Charge(10);
  EXPECT_NEAR(static_cast<double>(wait_ns), 1e8, 1e3) << "the eleventh";
  clock_.Advance(wait_ns);
  EXPECT_NEAR(static_cast<double>((*use)->Charge(10)), 1e8, 1e3);
  clock_.Advance(10'000'000'000);
  EXPECT_NEAR(static_cast<double>((*use)->Charge(3000)), 2e9, 1e3) << "by bytes, of which a second's worth was there";
  quotas_.Set({});
  EXPECT_EQ((*use)->Charge(1'000'000), 0) << "the quota is gone";
}

TEST(RetryInfoTest, TravelsAsGrpcStatusDetails) {
  const grpc::Status status = ToGrpc(ExhaustedFor("full", 5'250));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // google.rpc.Status {8, "full", Any {type, RetryInfo {Duration {5 s, 250,000,000 ns}}}}
  const std::string type = "type.googleapis.com/google.rpc.RetryInfo";
  const std::string info = {0x0a, 0x07, 0x08, 0x05, 0x10, '\x80', '\xe5', '\x9a', 0x77};
  const std::string any =
      std::string("\x0a") + static_cast<char>(type.size()) + type + "\x12" + static_cast<char>(info.size()) + info;
  EXPECT_EQ(status.error_details(),
            std::string("\x08\x08\x12\x04") + "full" + "\x1a" + static_cast<char>(any.size()) + any);
}

}  // namespace
}  // namespace bellwether::server
