// Goal: a build without the cluster says so where one is wanted, and serves alone else.
// Method: its code, compiled here beside a build that has the cluster.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/app/cluster_part.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

TEST(ClusterPartNoneTest, ADatabaseIsRefusedByNameOfTheOption) {
  ClusterOptions options;
  options.dsns = {"host=/run/postgresql"};
  const absl::Status status = CheckClusterBuild(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("BELLWETHER_CLUSTER=OFF"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cluster.dsn_file"));
  EXPECT_EQ(ClusterPart::Make({.cluster = options}, nullptr, nullptr, nullptr, nullptr).status(), status);
}

TEST(ClusterPartNoneTest, AServerAloneIsNotRefused) { EXPECT_TRUE(CheckClusterBuild(ClusterOptions()).ok()); }

}  // namespace
}  // namespace bellwether::server
