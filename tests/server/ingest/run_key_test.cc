// Goal: the server knows which uuid a client makes of a name, and keeps any other
// one apart by the name.
// Method: the client's own function beside the server's.

#include "server/ingest/run_key.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "client_lib/src/run_uuid.h"

namespace bellwether::server {
namespace {

TEST(RunKeyTest, IsTheClientsHashOfAName) {
  for (const std::string& name : {std::string("a"), std::string("team-a/llama_7b.x:3"), std::string(128, 'z')}) {
    uint8_t theirs[16];
    client::RunUuidFromName(name.c_str(), theirs);
    const RunUuid ours = UuidOfClient(name);
    EXPECT_EQ(std::memcmp(ours.data(), theirs, sizeof(theirs)), 0) << name;
    EXPECT_EQ(UuidOfBoth(ours, name), ours);
  }
}

TEST(RunKeyTest, AnotherUuidIsTheNamesOwn) {
  const RunUuid of_a = UuidOfClient("a");
  EXPECT_NE(UuidOfBoth(of_a, "b"), of_a);
  EXPECT_NE(UuidOfBoth(of_a, "b"), UuidOfBoth(of_a, "c"));
  EXPECT_NE(UuidOfBoth(of_a, "b"), UuidOfClient("b"));
  EXPECT_EQ(UuidOfBoth(of_a, "b"), UuidOfBoth(of_a, "b"));
}

}  // namespace
}  // namespace bellwether::server
