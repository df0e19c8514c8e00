#include "server/access/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kFieldBytesMax = 1024;

std::string Clipped(const std::string& text) { return text.substr(0, kFieldBytesMax); }

// What came from outside can end neither a line nor a field of the log.
std::string Plain(const std::string& text) {
  std::string plain = Clipped(text);
  for (char& c : plain) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\') c = '?';
    if (c == '"') c = '\'';
  }
  return plain;
}

}  // namespace

AuditLog::AuditLog(const Options& options, Counters* counters, Clock* clock)
    : options_(options),
      clock_(clock),
      failures_(counters->counter("bellwether_audit_failures_total")),
      suppressed_(counters->counter("bellwether_audit_suppressed_total")) {}

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(const Options& options, Counters* counters, Clock* clock) {
  std::unique_ptr<AuditLog> log(new AuditLog(options, counters, clock));
  absl::MutexLock lock(&log->mutex_);
  BW_RETURN_IF_ERROR(log->OpenFile());
  return log;
}

AuditLog::~AuditLog() {
  absl::MutexLock lock(&mutex_);
  if (fd_ >= 0) close(fd_);
}

absl::Status AuditLog::OpenFile() {
  if (fd_ >= 0) close(fd_);
  fd_ = open(options_.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) return absl::InternalError(absl::StrCat("audit log ", options_.path, ": ", std::strerror(errno)));
  struct stat info {};
  bytes_ = fstat(fd_, &info) == 0 ? info.st_size : 0;
  return absl::OkStatus();
}

void AuditLog::Reopen() {
  absl::MutexLock lock(&mutex_);
  if (const absl::Status opened = OpenFile(); !opened.ok()) LogError("{}", std::string(opened.message()));
}

void AuditLog::Rotate() {
  const auto name = [this](int i) { return i == 0 ? options_.path : absl::StrCat(options_.path, ".", i); };
  for (int i = options_.files_max - 1; i > 0; --i) (void)std::rename(name(i - 1).c_str(), name(i).c_str());
  if (const absl::Status opened = OpenFile(); !opened.ok()) LogError("{}", std::string(opened.message()));
}

void AuditLog::ReportRefusal(const AuditLine& line) {
  const int64_t now_ns = clock_->MonotonicNanos();
  if (told_ns_ != INT64_MIN && now_ns - told_ns_ < 1'000'000'000) {
    ++not_told_;
    return;
  }
  told_ns_ = now_ns;
  const std::string run = line.run.empty() ? "" : absl::StrCat(" for run '", Plain(line.run), "'");
  const std::string who = line.who.empty() ? "" : absl::StrCat(" by '", Plain(line.who), "'");
  LogWarning("refused {} from {}{}{}: {} ({} more since the last such line)", Plain(line.call), Plain(line.from), run,
             who, Plain(std::string(line.result.message())), not_told_);
  not_told_ = 0;
}

bool AuditLog::MayKeepRefusal(const AuditLine& line) {
  const int64_t second = clock_->MonotonicNanos() / 1'000'000'000;
  if (second != second_) {
    second_ = second;
    of_nobody_ = of_somebody_ = 0;
  }
  const bool somebody = !line.who.empty();
  int& kept = somebody ? of_somebody_ : of_nobody_;
  if (kept >= options_.refusals_per_second * (somebody ? 10 : 1)) {
    ++not_kept_;
    suppressed_->Add();
    return false;
  }
  ++kept;
  return true;
}

void AuditLog::Write(const AuditLine& line) {
  nlohmann::ordered_json json;
  json["time"] =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromUnixMillis(clock_->UnixMillis()), absl::UTCTimeZone());
  json["who"] = line.who;
  json["from"] = line.from;
  json["call"] = line.call;
  if (!line.run.empty()) json["run"] = Clipped(line.run);
  json["result"] = absl::StatusCodeToString(line.result.code());
  if (!line.result.ok()) json["refused"] = Clipped(std::string(line.result.message()));
  if (!line.detail.empty()) json["detail"] = Clipped(line.detail);
  absl::MutexLock lock(&mutex_);
  if (absl::IsUnauthenticated(line.result) || absl::IsPermissionDenied(line.result)) ReportRefusal(line);
  if (!line.result.ok() && !MayKeepRefusal(line)) return;
  if (not_kept_ > 0) json["refusals_not_kept"] = not_kept_;
  not_kept_ = 0;
  const std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (bytes_ > 0 && bytes_ + static_cast<int64_t>(text.size()) > options_.bytes_max) Rotate();
  const ssize_t put = fd_ < 0 ? -1 : write(fd_, text.data(), text.size());
  const bool whole = put == static_cast<ssize_t>(text.size());
  if (put > 0) bytes_ += put;
  if (whole && (!line.result.ok() || fdatasync(fd_) == 0)) return;
  failures_->Add();
  LogError("audit log {}: {}", options_.path, std::strerror(errno));
}

}  // namespace bellwether::server
