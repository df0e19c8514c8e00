#include "server/model/eta_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bellwether/time_text.h"

namespace bellwether::server {

std::string EtaText(const Eta& eta) {
  if (!eta.known) return {};
  std::string text = absl::StrFormat("%.0f steps (80 %%: %.0f to %.0f)", eta.steps, eta.lower_steps, eta.upper_steps);
  if (eta.step_seconds > 0) absl::StrAppend(&text, ", about ", TimeText(eta.steps * eta.step_seconds));
  return text;
}

}  // namespace bellwether::server
