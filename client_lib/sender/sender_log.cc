#include "client_lib/sender/sender_log.h"

#include <fcntl.h>
#include <unistd.h>

namespace bellwether::client {

SenderLog::SenderLog(const std::string& path, std::string prefix) : fd_(STDERR_FILENO), prefix_(std::move(prefix)) {
  if (path.empty()) return;
  const int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0) {
    fd_ = fd;
    LetGoOfStderr();
  }
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
  const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (null < 0) return;
  dup2(null, STDERR_FILENO);
  close(null);
}

}  // namespace bellwether::client
