// body_template.h: the body of a webhook in its receiver's words.
//
// A template is one JSON document.  {{name}} in a text of it stands for a value of the
// notification, {{name|html}} for the value with &, < and > written as &amp;, &lt; and &gt;.
// {"{{alerts}}": X} stands for a list: X once for each alert, the first kAlertsMax of them.
// A list's item or a map's field is left out if it has placeholders and all are empty.
//
// Values become texts of JSON, so no value can end one.  docs/operate/alerting.md has all names.

#ifndef BELLWETHER_SERVER_EXPORT_BODY_TEMPLATE_H_
#define BELLWETHER_SERVER_EXPORT_BODY_TEMPLATE_H_

#include <cstddef>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "absl/status/statusor.h"

namespace bellwether::server {

// Immutable: thread-safe.
class BodyTemplate {
 public:
  static constexpr size_t kBytesMax = 64 << 10;  // Of its file.
  static constexpr int kDepthMax = 16;
  static constexpr size_t kAlertsMax = 10;  // Chats cut long messages off; the page shows the rest.

  // INVALID_ARGUMENT: no JSON, or it names the place, what stands there and what is legal.
  static absl::StatusOr<BodyTemplate> Parse(std::string_view text);

  // `notification` is a body of Alertmanager's webhook (webhook.h).
  nlohmann::json Fill(const nlohmann::json& notification) const;

 private:
  explicit BodyTemplate(std::shared_ptr<const nlohmann::json> root);
  std::shared_ptr<const nlohmann::json> root_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_BODY_TEMPLATE_H_
