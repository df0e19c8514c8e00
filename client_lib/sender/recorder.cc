#include "client_lib/sender/recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "client_lib/src/regular_file.h"

namespace bellwether::client {
namespace {

constexpr size_t kReadBytes = 1 << 16;
constexpr uint32_t kMessageBytesMax = 2 << 20;  // Our own messages with room.

bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

Recorder::Recorder(std::string path, uint32_t rank) : path_(std::move(path)), rank_(rank) {}

Recorder::~Recorder() {
  if (fd_ >= 0) close(fd_);
}

bool Recorder::Fail(const std::string& what) {
  if (error_.empty()) error_ = what + " " + path_ + ": " + std::strerror(errno);
  return false;
}

bool Recorder::OpenNew(const std::string& path) {
  std::string why;
  fd_ = OpenRegularFile(path, O_WRONLY | O_CREAT | O_TRUNC, 0644, &why);
  if (fd_ < 0) {
    error_ = "cannot record to " + path + ": " + why;
    return false;
  }
  writer_ = std::make_unique<RecordingWriter>([this](std::string_view bytes) { return WriteAll(fd_, bytes); });
  return true;
}

bool Recorder::KeepEarlierFile() {
  struct stat info {};
  if (stat(path_.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) return true;
  for (int i = 1;; ++i) {
    const std::string kept = path_ + "." + std::to_string(i);
    if (stat(kept.c_str(), &info) == 0) continue;
    return rename(path_.c_str(), kept.c_str()) == 0 || Fail("cannot put aside");
  }
}

bool Recorder::Open(const v1::ClientMessage& hello, bool resume) {
  if (resume && Resume()) return true;
  if (!error_.empty()) return false;
  if (!KeepEarlierFile() || !OpenNew(path_)) return false;
  v1::RecordedMessage first;
  first.set_rank(rank_);
  *first.mutable_message() = hello;
  return WriteMessage(first) && Flush(false);
}

// False without an error if there is nothing to go on from.
bool Recorder::Resume() {
  std::string why;
  const int old = OpenRegularFile(path_, O_RDONLY, 0, &why);
  if (old < 0) return false;
  const bool resumed = TakeOver(old);
  close(old);
  return resumed;
}

bool Recorder::TakeOver(int old) {
  RecordingReader reader(kMessageBytesMax);
  v1::RecordedMessage message;
  bool any = false;
  const std::string part = path_ + ".part";
  std::vector<char> bytes(kReadBytes);
  ssize_t got;
  for (bool more = true; more;) {
    switch (reader.Next(&message)) {
      case RecordingReader::Result::kMessage:
        if (!any && !OpenNew(part)) return false;
        any = true;
        if (!WriteMessage(message)) return false;
        written_ordinal_ = std::max(written_ordinal_, message.message().seq());
        break;
      case RecordingReader::Result::kNeedMore:
        got = read(old, bytes.data(), bytes.size());
        if (got < 0 && errno == EINTR) break;
        more = got > 0;
        if (more) reader.Feed({bytes.data(), static_cast<size_t>(got)});
        break;
      default:
        more = false;
    }
  }
  if (!any) return false;
  if (!Flush(true)) return false;
  return rename(part.c_str(), path_.c_str()) == 0 || Fail("cannot replace");
}

bool Recorder::WriteMessage(const v1::RecordedMessage& message) {
  return writer_->Write(message) || Fail("cannot write");
}

bool Recorder::Write(uint64_t ordinal, std::string_view body) {
  if (!error_.empty()) return false;
  v1::RecordedMessage message;
  message.set_rank(rank_);
  if (!message.mutable_message()->ParseFromArray(body.data(), static_cast<int>(body.size()))) return false;
  message.mutable_message()->set_seq(ordinal);
  if (!WriteMessage(message)) return false;
  written_ordinal_ = std::max(written_ordinal_, ordinal);
  pending_bytes_ += body.size();
  return true;
}

bool Recorder::Flush(bool sync) {
  if (!error_.empty()) return false;
  if (!writer_->Flush()) return Fail("cannot write");
  if (sync && fdatasync(fd_) != 0 && errno != EINVAL) return Fail("cannot sync");  // EINVAL: some file systems.
  readable_ordinal_ = written_ordinal_;
  pending_bytes_ = 0;
  return true;
}

bool Recorder::Finish() {
  if (!error_.empty()) return false;
  if (!writer_->Finish()) return Fail("cannot write");
  if (fdatasync(fd_) != 0 && errno != EINVAL) return Fail("cannot sync");
  readable_ordinal_ = written_ordinal_;
  return true;
}

}  // namespace bellwether::client
