// Any text is a rules file or a list of findings; one that is good says the same
// when its text is read again.

#include <string_view>

#include "server/detect/rules_file.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  const auto rules = ParseRules({reinterpret_cast<const char*>(data), size}, "rules.yml");
  if (!rules.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(rules.status()) && !rules.status().message().empty());
    return 0;
  }
  FUZZ_CHECK(ParseRules((*rules)->text, "again").ok());
  return 0;
}
