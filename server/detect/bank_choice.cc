#include "server/detect/bank_choice.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/log.h"

namespace bellwether::server {

absl::StatusOr<std::unique_ptr<GpuBank>> OpenBank(const BankOptions& options,
                                                  std::function<void(const std::string&)> on_failure) {
  if (options.gpu != "auto" && options.gpu != "on" && options.gpu != "off") {
    return absl::InvalidArgumentError(absl::StrCat("gpu is ", options.gpu, ", but must be auto, on or off"));
  }
  if (options.gpu == "off") return nullptr;
  auto bank = GpuBank::Open(options.library, std::move(on_failure));
  if (bank.ok()) {
    LogInfo("detectors run on {}", (*bank)->device());
    return bank;
  }
  if (options.gpu == "on") {
    return absl::Status(bank.status().code(), absl::StrCat("gpu is on, but: ", bank.status().message()));
  }
  // On a machine for CPUs the library is not installed: that is no news.
  std::error_code unknown;
  if (std::filesystem::exists(options.library, unknown)) {
    LogInfo("detectors run on the CPU: {}", std::string(bank.status().message()));
  } else {
    LogDebug("detectors run on the CPU: {}", std::string(bank.status().message()));
  }
  return nullptr;
}

}  // namespace bellwether::server
