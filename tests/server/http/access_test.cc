// Goal: cookies count by their whole name, and hosts are the right ones.
// Method: tables of what must pass and what must not, near misses included.

#include "server/http/access.h"

#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

TEST(AccessTest, CookiesByTheirWholeName) {
  EXPECT_EQ(CookieValue("a=1; bellwether_7071=xyz; c=", "bellwether_7071"), "xyz");
  EXPECT_EQ(CookieValue("xbellwether_7071=xyz", "bellwether_7071"), "");
  EXPECT_EQ(CookieValue("bellwether_7071", "bellwether_7071"), "");
  EXPECT_EQ(CookieValue("", "a"), "");
}

TEST(AccessTest, HostsAreAddressesLoopbackOrNamed) {
  for (const char* good : {"127.0.0.1", "127.0.0.1:7071", "[::1]", "[::1]:7071", "localhost:1", "LOCALHOST",
                           "10.1.2.3:80", "Watch.example:7071"}) {
    EXPECT_TRUE(HostIsAllowed(good, {"watch.example"})) << good;
  }
  for (const char* bad : {"", "evil.example", "127.0.0.1.evil.example", "localhost.evil", "[::1", "xwatch.example"}) {
    EXPECT_FALSE(HostIsAllowed(bad, {"watch.example"})) << bad;
  }
  EXPECT_TRUE(HostIsAllowed("anything", {"*"}));
}

}  // namespace
}  // namespace bellwether::server
