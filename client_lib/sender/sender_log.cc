#include "client_lib/sender/sender_log.h"

#include <fcntl.h>
#include <unistd.h>

#include "client_lib/src/regular_file.h"

namespace bellwether::client {
namespace {

constexpr char kNowhere[] = "/dev/null";

}  // namespace

SenderLog::SenderLog(const std::string& path, std::string prefix) : fd_(STDERR_FILENO), prefix_(std::move(prefix)) {
  if (path.empty()) return;
  std::string why;
  // The one device that people name: no log.
  const int fd = path == kNowhere ? open(kNowhere, O_WRONLY | O_CLOEXEC)
                                  : OpenRegularFile(path, O_WRONLY | O_APPEND | O_CREAT, 0600, &why);
  if (fd < 0) {
    Once("log", "log_path " + path + ": " + why + "; the log goes to stderr");
    return;
  }
  fd_ = fd;
  LetGoOfStderr();
}

SenderLog::~SenderLog() {
  if (fd_ > STDERR_FILENO) close(fd_);
}

void SenderLog::Once(const std::string& cause, const std::string& text) {
  if (fd_ < 0 || !seen_.insert(cause).second) return;
  const std::string line = prefix_ + text + "\n";
  // A full or closed pipe is no reason to do anything.
  if (write(fd_, line.data(), line.size()) < 0) return;
}

void SenderLog::LetGoOfStderr() {
  if (fd_ == STDERR_FILENO) fd_ = -1;
  const int null = open(kNowhere, O_WRONLY | O_CLOEXEC);
  if (null < 0) return;
  dup2(null, STDERR_FILENO);
  close(null);
}

}  // namespace bellwether::client
