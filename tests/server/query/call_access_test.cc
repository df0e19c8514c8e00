// Goal: no call of service Query is without a rule of who may make it, and those
// that change something are not for readers.
// Method: the service's own description lists the calls.

#include "server/query/call_access.h"

#include <gtest/gtest.h>

#include <string>

#include "bellwether/v1/query.pb.h"

namespace bellwether::server {
namespace {

TEST(CallAccessTest, EveryCallHasItsRule) {
  const auto* const service = v1::GetRunRequest::descriptor()->file()->FindServiceByName("Query");
  ASSERT_NE(service, nullptr);
  ASSERT_GT(service->method_count(), 20);
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string name = service->method(i)->name();
    const CallRule rule = RuleOf(name);
    const bool reads = name.rfind("Get", 0) == 0 || name.rfind("List", 0) == 0 || name.rfind("Watch", 0) == 0 ||
                       name == "TopHeads" || name == "CompareRuns" || name == "ExportRun";
    EXPECT_EQ(rule.role == Role::kRead, reads) << name;
    EXPECT_TRUE(reads || rule.changes) << name;
    EXPECT_EQ(rule.role == Role::kAdmin, name == "SetPolicy" || name == "DeleteRun")
        << name << ": has no rule of its own";
  }
  EXPECT_EQ(RuleOf("Anything").role, Role::kAdmin);
}

}  // namespace
}  // namespace bellwether::server
