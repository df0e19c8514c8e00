#include "server/engine/disk_guard.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

// This much more than the floor must be free before acknowledgements go on.
constexpr double kFloorHysteresis = 1.1;

}  // namespace

void DiskGuard::Check() {
  std::error_code unknown;
  const std::filesystem::space_info space = std::filesystem::space(options_.path, unknown);
  if (unknown) return;
  const double floor = std::min(static_cast<double>(options_.free_bytes_min),
                                options_.free_ratio_min * static_cast<double>(space.capacity));
  const auto free = static_cast<double>(space.available);
  free_bytes_->Set(free);
  const bool low = free < (low_ ? floor * kFloorHysteresis : floor);
  if (low == low_) return;
  low_ = low;
  degraded_->Set(low ? 1 : 0);
  if (!low) {
    log_->Hold(absl::OkStatus());
    LogInfo("{} has {} bytes free: acknowledgements go on", options_.path, space.available);
    return;
  }
  const absl::Status why = absl::ResourceExhaustedError(
      absl::StrCat("storage.path ", options_.path, ": ", space.available, " bytes are free, fewer than ",
                   static_cast<int64_t>(floor), " (storage.free_bytes_min, storage.free_ratio_min)"));
  LogError("{}; nothing more is acknowledged until there is room, alerts go on", std::string(why.message()));
  give_back_();
  log_->Hold(why);
}

}  // namespace bellwether::server
