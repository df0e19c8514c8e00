// Any text is a policy or a list of findings; one that is good can be explained,
// and its text gives a policy again.

#include <string_view>

#include "server/act/policy.h"
#include "server/act/policy_text.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  const auto policy = ParsePolicy({reinterpret_cast<const char*>(data), size}, "policy.yml");
  if (!policy.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(policy.status()) && !policy.status().message().empty());
    return 0;
  }
  FUZZ_CHECK(!ExplainPolicy(**policy).empty());
  FUZZ_CHECK(ParsePolicy((*policy)->text, "again").ok());
  return 0;
}
