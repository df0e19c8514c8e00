// audit_log.h: each change with its caller, and each refusal, as lines of JSON.
//
//   {"time":"2026-11-22T06:30:00.123Z","who":"alice","from":"ipv4:10.0.0.7:51234",
//    "call":"ApproveAction","run":"llama","result":"OK","detail":"..."}
//
// Lines are only ever appended.  At bytes_max the file is renamed to <path>.1,
// .1 to .2 and so on, and the oldest of files_max goes.  A line about a change
// is synced before the answer.  Refused calls of callers without an identity
// have at most refusals_per_second lines, and those of known callers ten times
// as many.  So the former cannot hide the latter.  The next line has the number
// of calls without a line.  No line holds a secret.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ACCESS_AUDIT_LOG_H_
#define BELLWETHER_SERVER_ACCESS_AUDIT_LOG_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct AuditLine {
  std::string who;   // "" = no particular identity
  std::string from;  // Address, as gRPC writes it.
  std::string call;  // "ApproveAction", "Attach", "/-/reload"
  std::string run;   // As it was asked for; "" = none
  absl::Status result;
  std::string detail;  // What was asked: an id, a comment, a name that was claimed.
};

class AuditLog {
 public:
  struct Options {
    std::string path;
    int64_t bytes_max = 64 << 20;
    int files_max = 8;
    int refusals_per_second = 10;
  };

  // Both must outlive the log.  INTERNAL: the file cannot be written.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const Options& options, Counters* counters, Clock* clock);
  ~AuditLog();
  AuditLog(const AuditLog&) = delete;
  AuditLog& operator=(const AuditLog&) = delete;

  // A refusal also goes into the server's log, once a second at most.  A line
  // that cannot be written is counted and reported, and changes nothing else.
  void Write(const AuditLine& line);
  // Opens the path anew, for after a program that rotates logs has moved the
  // file.
  void Reopen();

 private:
  AuditLog(const Options& options, Counters* counters, Clock* clock);
  absl::Status OpenFile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Rotate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReportRefusal(const AuditLine& line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayKeepRefusal(const AuditLine& line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  Clock* const clock_;
  Counter* const failures_;
  Counter* const suppressed_;
  absl::Mutex mutex_;
  int fd_ ABSL_GUARDED_BY(mutex_) = -1;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t second_ ABSL_GUARDED_BY(mutex_) = 0;  // Of the refusals below.
  int of_nobody_ ABSL_GUARDED_BY(mutex_) = 0;
  int of_somebody_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t not_kept_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t told_ns_ ABSL_GUARDED_BY(mutex_) = INT64_MIN;
  int64_t not_told_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_AUDIT_LOG_H_
