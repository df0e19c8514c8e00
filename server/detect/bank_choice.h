// bank_choice.h: `--gpu=auto|on|off`, made true at start.

#ifndef BELLWETHER_SERVER_DETECT_BANK_CHOICE_H_
#define BELLWETHER_SERVER_DETECT_BANK_CHOICE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/detect/gpu_bank.h"

namespace bellwether::server {

struct BankOptions {
  // auto: the GPU if there is one, else the CPU.  on: the GPU or no start at
  // all.  off: the CPU.
  std::string gpu = "auto";
  std::string library = "libbellwether_bank.so";  // As dlopen takes it.
  std::string cusolver;  // The cuSOLVER library for spectra; "" = libcusolver.so of a known version.
};

// Null: the CPU's bank is the one to use.  One line of the log names the choice
// and the reason.  INVALID_ARGUMENT: gpu is another word.  UNAVAILABLE,
// FAILED_PRECONDITION: gpu is on, and there is none.
absl::StatusOr<std::unique_ptr<GpuBank>> OpenBank(const BankOptions& options,
                                                  std::function<void(const std::string&)> on_failure);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_BANK_CHOICE_H_
