// Any text is an access file, a file of tokens, of rules' tests or a template of a webhook, or is
// refused in words.  (Configuration, rules and policy have targets of their own.)
//
// The first byte chooses the reader.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "server/access/access_file.h"
#include "server/access/token_file.h"
#include "server/export/body_template.h"
#include "server/offline/rule_test_file.h"
#include "tests/fuzz/fuzz.h"

namespace {

template <typename Parsed>
bool IsGood(const Parsed& parsed) {
  FUZZ_CHECK(parsed.ok() || (absl::IsInvalidArgument(parsed.status()) && !parsed.status().message().empty()));
  return parsed.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  bellwether::FuzzInput input(data, size);
  const auto reader = input.Take<uint8_t>();
  const std::string_view text = input.rest();
  switch (reader % 4) {
    case 0:
      IsGood(ParseAccess(text, "access.yml"));
      break;
    case 1:
      IsGood(ParseTokens(text, "tokens"));
      break;
    case 2:
      IsGood(ParseRuleTests(text, "rules_test.yml"));
      break;
    default: {
      const auto made = BodyTemplate::Parse(text);
      if (!IsGood(made)) break;
      const nlohmann::json labels = {{"severity", "critical"}, {"alertname", "drift"}, {"run", "\"}"}};
      const nlohmann::json texts = {{"summary", "a\nb"}, {"do", ""}};
      const nlohmann::json alert = {{"status", "firing"},  {"labels", labels}, {"annotations", texts},
                                    {"startsAt", "s"},     {"endsAt", "e"},    {"generatorURL", "http://g"},
                                    {"fingerprint", "0af"}};
      const nlohmann::json notification = {
          {"status", "firing"},    {"receiver", "r"},        {"externalURL", "http"},      {"otherAlertsFiring", 3},
          {"groupLabels", labels}, {"commonLabels", labels}, {"commonAnnotations", texts}, {"alerts", {alert, alert}}};
      FUZZ_CHECK(!made->Fill(notification).dump().empty());
    }
  }
  return 0;
}
