// Goal: an address to listen on names a port that there is.
// Method: by hand.

#include "server/util/host_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

TEST(HostPortTest, APortIsDecimalAndFitsSixteenBits) {
  EXPECT_EQ(SplitHostPort("k", "127.0.0.1:0")->port, 0);
  EXPECT_EQ(SplitHostPort("k", "[::1]:65535")->port, 65535);
  EXPECT_EQ(SplitHostPort("k", "[::1]:65535")->host, "[::1]");
  EXPECT_EQ(SplitHostPort("k", "localhost:7070")->host, "localhost");
  for (const char* bad : {"", "localhost", "a:", "a:65536", "a:99999", "a:-1", "a:+1", "a: 1", "a:1 ", "a:0x50",
                          "a:010", "a:http", "a:18446744073709551696", "a:7070\n"}) {
    EXPECT_THAT(std::string(SplitHostPort("grpc.listen_address", bad).status().message()),
                ::testing::HasSubstr(": must be host:port, the port a decimal number of 0 to 65535"))
        << bad;
  }
}

TEST(HostPortTest, LookUpsTakeIpv6AddressesWithoutBrackets) {
  EXPECT_EQ(BareHost("[::1]"), "::1");
  for (const char* same : {"127.0.0.1", "localhost", "[", "[]", "[::1", ""}) EXPECT_EQ(BareHost(same), same);
}

}  // namespace
}  // namespace bellwether::server
