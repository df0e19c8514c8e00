// rule_tests.h: runs tests of rules through the server's own judge.

#ifndef BELLWETHER_SERVER_OFFLINE_RULE_TESTS_H_
#define BELLWETHER_SERVER_OFFLINE_RULE_TESTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/detect/judge_options.h"
#include "server/offline/rule_test_file.h"

namespace bellwether::server {

// What was expected and did not come, or came unexpectedly: a line each.
std::vector<std::string> RunRuleTest(const RuleTest& test, const JudgeOptions& options);

struct RuleTestResult {
  std::string name;
  std::vector<std::string> failures;  // Empty: passed.
};

// Runs all tests of a file, by the rules that it names.  NOT_FOUND: a file that
// cannot be read.  INVALID_ARGUMENT: findings in one of the files.
absl::StatusOr<std::vector<RuleTestResult>> RunRuleTests(const std::string& path);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_RULE_TESTS_H_
