#include "server/detect/gpu_bank.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bellwether/kernels/gpu_bank.h"

namespace bellwether::server {

struct GpuBank::Library {
  void* handle = nullptr;
  decltype(&bw_bank_error) error = nullptr;
  decltype(&bw_bank_open) open = nullptr;
  decltype(&bw_bank_close) close = nullptr;
  decltype(&bw_bank_evaluate) evaluate = nullptr;
  decltype(&bw_bank_forget) forget = nullptr;

  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (handle != nullptr) dlclose(handle);
  }

  absl::Status Load(const std::string& path) {
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return absl::UnavailableError(dlerror());
    decltype(&bw_bank_abi) abi = nullptr;
    if (!Find("bw_bank_abi", &abi) || !Find("bw_bank_error", &error) || !Find("bw_bank_open", &open) ||
        !Find("bw_bank_close", &close) || !Find("bw_bank_evaluate", &evaluate) || !Find("bw_bank_forget", &forget)) {
      return absl::FailedPreconditionError(absl::StrCat(path, " is no detector bank: ", dlerror()));
    }
    if (abi() != kernels::kBankAbi) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is of another build: its interface is ", abi(), ", but must be ", kernels::kBankAbi));
    }
    return absl::OkStatus();
  }

 private:
  template <class Function>
  bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    return *function != nullptr;
  }
};

GpuBank::GpuBank(std::function<void(const std::string&)> on_failure)
    : on_failure_(std::move(on_failure)), library_(std::make_unique<Library>()) {}

GpuBank::~GpuBank() {
  if (bank_ != nullptr) library_->close(bank_);
}

absl::StatusOr<std::unique_ptr<GpuBank>> GpuBank::Open(const std::string& library,
                                                       std::function<void(const std::string&)> on_failure) {
  std::unique_ptr<GpuBank> bank(new GpuBank(std::move(on_failure)));
  if (absl::Status loaded = bank->library_->Load(library); !loaded.ok()) return loaded;
  char device[256] = "";
  if (bank->library_->open(&bank->bank_, device) != 0) return absl::UnavailableError(bank->library_->error());
  bank->device_ = device;
  return bank;
}

bool GpuBank::RunPass(const std::vector<Waiting*>& batch, const std::vector<uint64_t>& forgotten) {
  if (failed_) return false;
  std::vector<kernels::BankRun*> runs;
  for (const Waiting* waiting : batch) runs.push_back(waiting->run);
  bool ok = true;
  for (const uint64_t key : forgotten) ok = ok && library_->forget(bank_, key) == 0;
  ok = ok && library_->evaluate(bank_, runs.data(), static_cast<int32_t>(runs.size())) == 0;
  if (ok) {
    ++passes_;
    return true;
  }
  failed_ = true;
  on_failure_(library_->error());
  return false;
}

void GpuBank::Evaluate(kernels::BankRun* run) {
  Waiting mine{.run = run};
  std::vector<Waiting*> batch;
  std::vector<uint64_t> forgotten;
  if (!failed_) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(&mine);
    const auto my_turn = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return mine.done || !in_pass_; };
    mutex_.Await(absl::Condition(&my_turn));
    if (mine.done) return;
    in_pass_ = true;
    // Its own run first, so that it is not left behind.
    std::swap(waiting_.front(), *std::find(waiting_.begin(), waiting_.end(), &mine));
    int64_t series = 0;
    size_t taken = 0;
    for (; taken < waiting_.size(); ++taken) {
      const kernels::BankRun& next = *waiting_[taken]->run;
      series += next.heads * next.tracks;
      if (taken > 0 && series > kSeriesPerPassMax) break;
    }
    const auto end = waiting_.begin() + static_cast<ptrdiff_t>(taken);
    batch.assign(waiting_.begin(), end);
    waiting_.erase(waiting_.begin(), end);
    forgotten.swap(forgotten_);
  }
  if (batch.empty()) {
    kernels::cpu::EvaluateDetectors(run);
    return;
  }
  if (!RunPass(batch, forgotten)) {
    for (const Waiting* waiting : batch) kernels::cpu::EvaluateDetectors(waiting->run);
  }
  absl::MutexLock lock(&mutex_);
  for (Waiting* waiting : batch) waiting->done = true;
  in_pass_ = false;
}

void GpuBank::Forget(uint64_t key) {
  if (failed_) return;
  absl::MutexLock lock(&mutex_);
  forgotten_.push_back(key);
}

}  // namespace bellwether::server
