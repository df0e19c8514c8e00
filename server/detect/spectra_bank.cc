#include "server/detect/spectra_bank.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bellwether/kernels/gpu_spectra.h"
#include "bellwether/kernels/gram_spectrum.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

class CpuSpectra final : public SpectraBank {
 public:
  void Eigenvalues(int64_t n, int64_t count, double* matrices, double* values) override {
    // Finite matrices always do.
    if (!kernels::cpu::SymmetricEigenvalues(n, count, matrices, values)) LogError("eigenvalues did not converge");
  }
  const char* backend() const override { return "cpu"; }
};

class GpuBankOfSpectra final : public SpectraBank {
 public:
  explicit GpuBankOfSpectra(std::function<void(const std::string&)> on_failure) : on_failure_(std::move(on_failure)) {}
  ~GpuBankOfSpectra() override {
    if (spectra_ != nullptr) close_(spectra_);
    if (handle_ != nullptr) dlclose(handle_);
  }

  // Why not, or "".
  std::string Open(const BankOptions& options) {
    handle_ = dlopen(options.library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) return dlerror();
    decltype(&bw_bank_abi) abi = nullptr;
    decltype(&bw_spectra_open) open = nullptr;
    if (!Find("bw_bank_abi", &abi) || !Find("bw_spectra_error", &error_) || !Find("bw_spectra_open", &open) ||
        !Find("bw_spectra_close", &close_) || !Find("bw_spectra_eigenvalues", &eigenvalues_)) {
      return absl::StrCat(options.library, " has no spectra: ", dlerror());
    }
    if (abi() != kernels::kBankAbi) return absl::StrCat(options.library, " is of another build");
    return open(&spectra_, options.cusolver.c_str()) == 0 ? "" : error_();
  }

  void Eigenvalues(int64_t n, int64_t count, double* matrices, double* values) override {
    if (!failed_ && eigenvalues_(spectra_, n, count, matrices, values) == 0) return;
    if (!failed_) {
      failed_ = true;
      on_failure_(error_());
    }
    CpuSpectraBank()->Eigenvalues(n, count, matrices, values);
  }
  const char* backend() const override { return failed_ ? "cpu" : "cuda"; }

 private:
  template <class Function>
  bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle_, name));
    return *function != nullptr;
  }

  const std::function<void(const std::string&)> on_failure_;
  void* handle_ = nullptr;
  decltype(&bw_spectra_error) error_ = nullptr;
  decltype(&bw_spectra_close) close_ = nullptr;
  decltype(&bw_spectra_eigenvalues) eigenvalues_ = nullptr;
  bw_spectra* spectra_ = nullptr;
  bool failed_ = false;
};

}  // namespace

SpectraBank* CpuSpectraBank() {
  static CpuSpectra bank;
  return &bank;
}

std::unique_ptr<SpectraBank> OpenGpuSpectra(const BankOptions& options,
                                            std::function<void(const std::string&)> on_failure) {
  if (options.gpu == "off") return nullptr;
  auto bank = std::make_unique<GpuBankOfSpectra>(std::move(on_failure));
  const std::string why_not = bank->Open(options);
  if (why_not.empty()) {
    LogInfo("spectra run on the GPU");
    return bank;
  }
  std::error_code unknown;  // As for the detectors: a library that is not installed is no news.
  if (std::filesystem::exists(options.library, unknown)) {
    LogInfo("spectra run on the CPU: {}", why_not);
  } else {
    LogDebug("spectra run on the CPU: {}", why_not);
  }
  return nullptr;
}

}  // namespace bellwether::server
