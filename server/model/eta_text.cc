#include "server/model/eta_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bellwether::server {
namespace {

std::string TimeText(double seconds) {
  constexpr double kMinute = 60, kHour = 3600, kDay = 86400;
  if (seconds < 1.5 * kMinute) return absl::StrFormat("%.0f s", seconds);
  if (seconds < 1.5 * kHour) return absl::StrFormat("%.0f min", seconds / kMinute);
  if (seconds < 2 * kDay) return absl::StrFormat("%.1f h", seconds / kHour);
  return absl::StrFormat("%.1f days", seconds / kDay);
}

}  // namespace

std::string EtaText(const Eta& eta) {
  if (!eta.known) return {};
  std::string text = absl::StrFormat("%.0f steps (80 %%: %.0f to %.0f)", eta.steps, eta.lower_steps, eta.upper_steps);
  if (eta.step_seconds > 0) absl::StrAppend(&text, ", about ", TimeText(eta.steps * eta.step_seconds));
  return text;
}

}  // namespace bellwether::server
