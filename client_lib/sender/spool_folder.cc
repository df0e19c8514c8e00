#include "client_lib/sender/spool_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <ctime>

#include "bellwether/crc32c.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::client {
namespace {

constexpr uint32_t kStateVersion = 1;
constexpr off_t kHelloBytesMax = 1 << 20;

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(directory);
  return names;
}

std::string Why(const std::string& what, const std::string& path) {
  return what + " " + path + ": " + std::strerror(errno);
}

// UUID-RANK-NUMBER, of any run and rank.
bool IsFolderName(const std::string& name) {
  constexpr size_t kUuidDigits = 32;
  const size_t second = name.find('-', kUuidDigits + 1);
  return name.find_first_not_of("0123456789abcdef") == kUuidDigits && name[kUuidDigits] == '-' &&
         second != std::string::npos && name.find_first_not_of("0123456789", kUuidDigits + 1) == second &&
         second + 1 < name.size() && name.find_first_not_of("0123456789", second + 1) == std::string::npos;
}

std::string PathOf(const SenderConfig& config, uint64_t number) {
  return std::string(config.spool_dir) + "/" + SpoolFolder::Prefix(config) + std::to_string(number);
}

}  // namespace

struct SpoolFolder::Saved {
  uint32_t crc, version;
  uint64_t freed_ordinal, sent_ordinal, appended_ordinal;
  int64_t seq_base;
  uint64_t seq_base_known;
  uint64_t frames_admitted, frames_durable;
};

std::string SpoolFolder::Prefix(const SenderConfig& config) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : config.run_uuid) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text + "-" + std::to_string(config.rank) + "-";
}

std::vector<uint64_t> SpoolFolder::Older(const SenderConfig& config, uint64_t below) {
  const std::string prefix = Prefix(config);
  std::vector<uint64_t> numbers;
  for (const std::string& name : NamesIn(config.spool_dir)) {
    if (name.rfind(prefix, 0) != 0) continue;
    uint64_t number = 0;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end && number > 0 && number < below) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

bool SpoolFolder::IsOld(const std::string& path) {
  const time_t before = time(nullptr) - std::chrono::duration_cast<std::chrono::seconds>(kKeptFor).count();
  struct stat info {};
  for (const char* name : {"", "/state", "/hello"}) {
    if (stat((path + name).c_str(), &info) == 0 && info.st_mtime >= before) return false;
  }
  return true;
}

int SpoolFolder::RemoveForsaken(const SenderConfig& config) {
  const std::string own = Prefix(config);
  int with_frames = 0;
  for (const std::string& name : NamesIn(config.spool_dir)) {
    const std::string path = std::string(config.spool_dir) + "/" + name;
    struct stat info {};
    if (!IsFolderName(name) || name.rfind(own, 0) == 0 || lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
        info.st_uid != geteuid() || !IsOld(path)) {
      continue;
    }
    SpoolFolder folder(path, 0);
    std::string error;
    if (folder.Lock(&error) != Result::kOk) continue;
    const std::vector<std::string> files = NamesIn(path);
    with_frames += std::any_of(files.begin(), files.end(), [](const std::string& file) {
      return file.find(".spool") != std::string::npos || file.find(".window") != std::string::npos;
    });
    folder.Remove();
  }
  return with_frames;
}

uint64_t SpoolFolder::BytesOf(const SenderConfig& config, uint64_t number) {
  const std::string path = PathOf(config, number);
  uint64_t bytes = 0;
  for (const std::string& name : NamesIn(path)) {
    struct stat info {};
    if (lstat((path + "/" + name).c_str(), &info) == 0) bytes += static_cast<uint64_t>(info.st_size);
  }
  return bytes;
}

SpoolFolder::Result SpoolFolder::Make(const SenderConfig& config, std::unique_ptr<SpoolFolder>* folder,
                                      std::string* error) {
  if (mkdir(config.spool_dir, 0700) != 0 && errno != EEXIST) {
    *error = Why("cannot make", config.spool_dir);
    return Result::kError;
  }
  constexpr int kTries = 100;  // Two clients of one rank may look for a number at once.
  for (int i = 0; i < kTries; ++i) {
    const std::vector<uint64_t> known = Older(config, UINT64_MAX);
    const uint64_t number = known.empty() ? 1 : known.back() + 1;
    const std::string path = PathOf(config, number);
    if (mkdir(path.c_str(), 0700) != 0) {
      if (errno == EEXIST) continue;
      *error = Why("cannot make", path);
      return Result::kError;
    }
    std::unique_ptr<SpoolFolder> made(new SpoolFolder(path, number));
    const Result result = made->Lock(error);
    if (result == Result::kOk) *folder = std::move(made);
    return result;
  }
  *error = "cannot make a folder in " + std::string(config.spool_dir) + ": others are always quicker";
  return Result::kError;
}

SpoolFolder::Result SpoolFolder::Take(const SenderConfig& config, uint64_t number, std::unique_ptr<SpoolFolder>* folder,
                                      std::string* error) {
  error->clear();
  const std::string path = PathOf(config, number);
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    if (errno != ENOENT) *error = Why("cannot use", path);
    return Result::kError;
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid()) {
    *error = path + " is not a folder of this user";
    return Result::kError;
  }
  std::unique_ptr<SpoolFolder> taken(new SpoolFolder(path, number));
  const Result result = taken->Lock(error);
  if (result == Result::kOk) *folder = std::move(taken);
  return result;
}

SpoolFolder::Result SpoolFolder::Lock(std::string* error) {
  const std::string path = path_ + "/lock";
  std::string why;
  lock_fd_ = OpenRegularFile(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &why);
  if (lock_fd_ < 0) {
    *error = "cannot write " + path + ": " + why;
    return Result::kError;
  }
  if (flock(lock_fd_, LOCK_EX | LOCK_NB) == 0) return Result::kOk;
  if (errno == EWOULDBLOCK) return Result::kBusy;
  *error = Why("cannot lock", path);
  return Result::kError;
}

SpoolFolder::~SpoolFolder() {
  if (state_fd_ >= 0) close(state_fd_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

bool SpoolFolder::SaveHello(const v1::ClientMessage& hello) {
  std::string why;
  const int fd = OpenRegularFile(path_ + "/hello", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600, &why);
  if (fd < 0) return false;
  const std::string bytes = hello.SerializeAsString();
  const bool ok = pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  close(fd);
  return ok;
}

std::optional<v1::ClientMessage> SpoolFolder::LoadHello() const {
  std::string why;
  const int fd = OpenRegularFile(path_ + "/hello", O_RDONLY | O_NOFOLLOW, 0, &why);
  if (fd < 0) return std::nullopt;
  struct stat info {};
  std::string bytes;
  if (fstat(fd, &info) == 0 && info.st_size > 0 && info.st_size <= kHelloBytesMax) {
    bytes.resize(static_cast<size_t>(info.st_size));
    if (pread(fd, bytes.data(), bytes.size(), 0) != info.st_size) bytes.clear();
  }
  close(fd);
  v1::ClientMessage hello;
  if (!hello.ParseFromString(bytes) || !hello.has_hello()) return std::nullopt;
  return hello;
}

bool SpoolFolder::SaveState(const SenderState& state) {
  Saved saved{};
  saved.version = kStateVersion;
  saved.freed_ordinal = state.freed_ordinal;
  saved.sent_ordinal = state.sent_ordinal;
  saved.appended_ordinal = state.appended_ordinal;
  saved.seq_base = state.seq_base;
  saved.seq_base_known = state.seq_base_known;
  saved.frames_admitted = state.frames_admitted;
  saved.frames_durable = state.frames_durable;
  std::string bytes(reinterpret_cast<const char*>(&saved), sizeof(saved));
  const uint32_t crc = Crc32c(std::string_view(bytes).substr(offsetof(Saved, version)));
  std::memcpy(bytes.data(), &crc, sizeof(crc));
  if (bytes == saved_) return true;
  std::string why;
  if (state_fd_ < 0) state_fd_ = OpenRegularFile(path_ + "/state", O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &why);
  if (state_fd_ < 0 || pwrite(state_fd_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return false;
  saved_ = std::move(bytes);
  return true;
}

bool SpoolFolder::LoadState(SenderState* state) const {
  *state = {};
  std::string why;
  const int fd = OpenRegularFile(path_ + "/state", O_RDONLY | O_NOFOLLOW, 0, &why);
  if (fd < 0) return false;
  Saved saved{};
  const bool whole = pread(fd, &saved, sizeof(saved), 0) == static_cast<ssize_t>(sizeof(saved));
  close(fd);
  const std::string_view bytes(reinterpret_cast<const char*>(&saved), sizeof(saved));
  if (!whole || saved.crc != Crc32c(bytes.substr(offsetof(Saved, version))) || saved.version != kStateVersion)
    return false;
  state->freed_ordinal = saved.freed_ordinal;
  state->sent_ordinal = saved.sent_ordinal;
  state->appended_ordinal = saved.appended_ordinal;
  state->seq_base = saved.seq_base;
  state->seq_base_known = saved.seq_base_known != 0 ? 1 : 0;
  state->frames_admitted = saved.frames_admitted;
  state->frames_durable = saved.frames_durable;
  return true;
}

void SpoolFolder::DropState() {
  if (saved_.empty()) return;
  (void)unlink((path_ + "/state").c_str());
  if (state_fd_ >= 0) close(state_fd_);
  state_fd_ = -1;
  saved_.clear();
}

void SpoolFolder::Remove() {
  for (const std::string& name : NamesIn(path_)) (void)unlink((path_ + "/" + name).c_str());
  (void)rmdir(path_.c_str());
}

}  // namespace bellwether::client
