#include "client_lib/sender/spool.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "bellwether/crc32c.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::client {
namespace {

constexpr std::string_view kMagic("BWspl\r\n\1", 8);  // The last byte is the version.
constexpr uint64_t kSpoolLastPart = 1;
constexpr uint64_t kSpoolPacked = 2;
constexpr uint32_t kBodyBytesMax = 2 << 20;  // Our own messages with room.
constexpr uint64_t kCheckFloorEvery = uint64_t{1} << 20;
constexpr size_t kFirstOrdinalDigits = 16;

struct RecordHeader {
  uint32_t crc, body_bytes;
  uint64_t flags, ordinal, ring_position, frames_admitted;
};
static_assert(sizeof(RecordHeader) == 40);

uint32_t Checksum(const RecordHeader& header, std::string_view body) {
  const std::string_view fields(reinterpret_cast<const char*>(&header), sizeof(header));
  return ExtendCrc32c(Crc32c(fields.substr(offsetof(RecordHeader, body_bytes))), body);
}

bool ReadAll(int fd, uint64_t offset, void* out, size_t bytes) {
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// 0 or an errno.
int WriteAll(int fd, uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    offset += static_cast<uint64_t>(put);
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return 0;
}

}  // namespace

Spool::Spool(Options options) : options_(std::move(options)) {}

Spool::~Spool() { CloseOthers(nullptr); }

std::string Spool::PathOf(const Segment& segment) const {
  char name[kFirstOrdinalDigits + 1];
  std::snprintf(name, sizeof(name), "%016" PRIx64, segment.first_ordinal);
  return options_.folder + "/" + name + options_.suffix;
}

uint64_t Spool::last_ordinal() const { return segments_.empty() ? 0 : segments_.back().last_ordinal; }

uint64_t Spool::last_frames_admitted() const {
  return segments_.empty() ? 0 : segments_.back().last_part.frames_admitted;
}

void Spool::CloseOthers(const Segment* keep) {
  for (Segment& segment : segments_) {
    if (&segment == keep || segment.fd < 0) continue;
    close(segment.fd);
    segment.fd = -1;
  }
}

bool Spool::OpenFile(Segment* segment) {
  if (segment->fd >= 0) return true;
  // One to write to, one to read from: a large spool has thousands of files.
  CloseOthers(writing_ ? &segments_.back() : nullptr);
  std::string why;
  segment->fd = OpenRegularFile(PathOf(*segment), O_RDWR | O_NOFOLLOW, 0, &why);
  return segment->fd >= 0;
}

bool Spool::Refuse(std::string why, bool for_good) {
  trouble_ = std::move(why);
  failed_ = failed_ || for_good;
  full_ = true;
  full_since_ = std::chrono::steady_clock::now();
  return false;
}

bool Spool::refuses() const {
  return failed_ || (full_ && std::chrono::steady_clock::now() - full_since_ < kRetryAfter);
}

bool Spool::Open(uint64_t ordinal_max) {
  DIR* folder = opendir(options_.folder.c_str());
  if (folder == nullptr) return Refuse("cannot read " + options_.folder + ": " + std::strerror(errno), true);
  std::vector<uint64_t> found;
  while (const dirent* entry = readdir(folder)) {
    Segment segment;
    // Only the name that PathOf() makes: another spelling would be the same file once more.
    if (std::sscanf(entry->d_name, "%16" SCNx64, &segment.first_ordinal) != 1 ||
        PathOf(segment) != options_.folder + "/" + entry->d_name) {
      continue;
    }
    found.push_back(segment.first_ordinal);
  }
  closedir(folder);
  std::sort(found.begin(), found.end());
  for (size_t i = 0; i < found.size(); ++i) {
    Segment segment;
    segment.first_ordinal = found[i];
    const bool newest = i + 1 == found.size();
    if (!TakeOver(&segment, newest ? ordinal_max : std::min(ordinal_max, found[i + 1] - 1), newest)) {
      if (segment.fd >= 0) close(segment.fd);
      (void)unlink(PathOf(segment).c_str());
      continue;
    }
    bytes_ += segment.bytes;
    segments_.push_back(segment);
    CloseOthers(nullptr);
  }
  return true;
}

bool Spool::TakeOver(Segment* segment, uint64_t ordinal_max, bool newest) {
  struct stat info {};
  char magic[kMagic.size()];
  if (!OpenFile(segment) || fstat(segment->fd, &info) != 0 || !ReadAll(segment->fd, 0, magic, sizeof(magic)) ||
      std::string_view(magic, sizeof(magic)) != kMagic) {
    return false;
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  segment->bytes = size;  // For ReadRecord().
  // What follows a segment proves that its writer went on behind it.
  if ((newest || !FindLastFrame(segment, ordinal_max, /*verify=*/false)) &&
      !FindLastFrame(segment, ordinal_max, /*verify=*/true)) {
    return false;
  }
  return segment->bytes == size || ftruncate(segment->fd, static_cast<off_t>(segment->bytes)) == 0;
}

bool Spool::FindLastFrame(Segment* segment, uint64_t ordinal_max, bool verify) {
  uint64_t offset = kMagic.size();
  uint64_t end = 0;
  uint64_t last_record = 0;
  uint64_t previous = segment->first_ordinal - 1;
  HeldMessage message;
  uint64_t record_bytes = 0;
  while (ReadRecord(segment, offset, verify ? &checked_ : nullptr, &message, &record_bytes)) {
    if (message.ordinal <= previous || message.ordinal > ordinal_max) break;
    previous = message.ordinal;
    if (message.last_part) {
      last_record = offset;
      end = offset + record_bytes;
    }
    offset += record_bytes;
  }
  if (end == 0 || !ReadRecord(segment, last_record, &checked_, &message, &record_bytes)) return false;
  segment->bytes = end;
  segment->last_ordinal = message.ordinal;
  segment->last_part = message;
  segment->last_part.body = {};
  return true;
}

bool Spool::ReadRecord(Segment* segment, uint64_t offset, std::string* body, HeldMessage* message,
                       uint64_t* record_bytes) {
  RecordHeader header;
  if (offset + sizeof(header) > segment->bytes || !OpenFile(segment) ||
      !ReadAll(segment->fd, offset, &header, sizeof(header))) {
    return false;
  }
  *record_bytes = sizeof(header) + header.body_bytes;
  if (header.body_bytes > kBodyBytesMax || header.flags > (kSpoolLastPart | kSpoolPacked) ||
      offset + *record_bytes > segment->bytes)
    return false;
  *message = {header.ordinal, (header.flags & kSpoolLastPart) != 0, header.frames_admitted, header.ring_position, {}};
  if (body == nullptr) return true;
  stored_.resize(header.body_bytes);
  if (!ReadAll(segment->fd, offset + sizeof(header), stored_.data(), stored_.size()) ||
      header.crc != Checksum(header, stored_)) {
    return false;
  }
  if ((header.flags & kSpoolPacked) == 0) {
    body->swap(stored_);
  } else if (!codec_.Unpack(stored_, kBodyBytesMax, body)) {
    return false;
  }
  message->body = *body;
  return true;
}

bool Spool::IsWholeFrame(Segment* segment, uint64_t offset) {
  if (whole_.segment == segment->first_ordinal && offset < whole_.offset) return true;
  HeldMessage message;
  uint64_t record_bytes = 0;
  do {
    if (!ReadRecord(segment, offset, &checked_, &message, &record_bytes)) return false;
    offset += record_bytes;
  } while (!message.last_part);
  whole_ = {segment->first_ordinal, offset};
  return true;
}

bool Spool::StartSegment(uint64_t first_ordinal) {
  Segment segment;
  segment.first_ordinal = first_ordinal;
  const std::string path = PathOf(segment);
  std::string why;
  segment.fd = OpenRegularFile(path, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600, &why);
  const int error = segment.fd < 0 ? errno : WriteAll(segment.fd, 0, kMagic);
  if (error != 0) {
    if (segment.fd >= 0) {
      close(segment.fd);
      (void)unlink(path.c_str());
    }
    return Refuse("cannot write " + path + ": " + std::strerror(error), error != ENOSPC && error != EDQUOT);
  }
  segment.bytes = kMagic.size();
  bytes_ += segment.bytes;
  CloseOthers(nullptr);
  segments_.push_back(segment);
  writing_ = true;
  return true;
}

bool Spool::HasRoom(uint64_t bytes) {
  const uint64_t used = bytes_ + other_bytes_;
  if (used + bytes > options_.bytes_max) {
    return Refuse("full: " + std::to_string(used >> 20) + " MiB of " + std::to_string(options_.bytes_max >> 20) +
                      " MiB (spool_bytes)",
                  false);
  }
  if (unchecked_bytes_ < kCheckFloorEvery) {
    unchecked_bytes_ += bytes;
    return true;
  }
  struct statvfs disk {};
  if (statvfs(options_.folder.c_str(), &disk) != 0) return true;  // Then the disk itself will say.
  const uint64_t unit = disk.f_frsize;
  const auto share = static_cast<uint64_t>(options_.free_ratio_min * static_cast<double>(disk.f_blocks * unit));
  const uint64_t floor = std::min(options_.free_bytes_min, share);
  if (disk.f_bavail * unit < floor + bytes) {
    return Refuse("only " + std::to_string(disk.f_bavail * unit >> 20) + " MiB are free at " + options_.folder +
                      ", the floor is " + std::to_string(floor >> 20) + " MiB",
                  false);
  }
  unchecked_bytes_ = bytes;
  return true;
}

bool Spool::Append(const std::vector<HeldMessage>& messages) {
  if (messages.empty() || refuses()) return false;
  batch_.clear();
  for (const HeldMessage& message : messages) {
    RecordHeader header{};
    const std::string_view packed = codec_.Pack(message.body);
    const std::string_view body = packed.empty() ? message.body : packed;
    header.body_bytes = static_cast<uint32_t>(body.size());
    header.flags = (message.last_part ? kSpoolLastPart : 0) | (packed.empty() ? 0 : kSpoolPacked);
    header.ordinal = message.ordinal;
    header.ring_position = message.ring_position;
    header.frames_admitted = message.frames_admitted;
    header.crc = Checksum(header, body);
    batch_.append(reinterpret_cast<const char*>(&header), sizeof(header));
    batch_.append(body);
  }
  if (!HasRoom(batch_.size() + kMagic.size())) return false;
  full_ = false;
  if (writing_ && segments_.back().bytes >= options_.segment_bytes) writing_ = false;
  if (!writing_ && !StartSegment(messages.front().ordinal)) return false;
  Segment& segment = segments_.back();
  if (const int error = WriteAll(segment.fd, segment.bytes, batch_); error != 0) {
    // What came of it lies behind the whole records, and is cut off even if
    // this does not succeed.
    (void)!ftruncate(segment.fd, static_cast<off_t>(segment.bytes));
    writing_ = false;
    if (segment.last_ordinal == 0) {
      close(segment.fd);
      (void)unlink(PathOf(segment).c_str());
      bytes_ -= segment.bytes;
      segments_.pop_back();
    }
    unchecked_bytes_ = UINT64_MAX;
    return Refuse("cannot write to " + options_.folder + ": " + std::strerror(error),
                  error != ENOSPC && error != EDQUOT);
  }
  segment.bytes += batch_.size();
  bytes_ += batch_.size();
  segment.last_ordinal = messages.back().ordinal;
  for (const HeldMessage& message : messages) {
    if (!message.last_part) continue;
    segment.last_part = message;
    segment.last_part.body = {};
  }
  return true;
}

bool Spool::Peek(Cursor* cursor, HeldMessage* message) {
  auto at = std::lower_bound(segments_.begin(), segments_.end(), cursor->segment,
                             [](const Segment& segment, uint64_t first) { return segment.first_ordinal < first; });
  for (; at != segments_.end(); ++at) {
    Segment& segment = *at;
    if (segment.first_ordinal > cursor->segment) *cursor = {segment.first_ordinal, kMagic.size()};
    if (cursor->offset >= segment.bytes) continue;
    if (peeked_bytes_ > 0 && peeked_at_.segment == cursor->segment && peeked_at_.offset == cursor->offset) {
      *message = peeked_;
      return true;
    }
    peeked_bytes_ = 0;
    uint64_t record_bytes = 0;
    if (!ReadRecord(&segment, cursor->offset, &body_, message, &record_bytes) ||
        (!message->last_part && !IsWholeFrame(&segment, cursor->offset + record_bytes))) {
      cursor->offset = segment.bytes;
      continue;
    }
    peeked_at_ = *cursor;
    peeked_bytes_ = record_bytes;
    peeked_ = *message;
    return true;
  }
  return false;
}

void Spool::Advance(Cursor* cursor) const { cursor->offset += peeked_bytes_; }

void Spool::FindFrameEnd(uint64_t ordinal, HeldMessage* last) {
  for (Segment& segment : segments_) {
    if (segment.last_ordinal <= ordinal) {
      if (segment.last_part.ordinal > 0) *last = segment.last_part;
      continue;
    }
    if (segment.first_ordinal > ordinal) return;
    if (found_.segment != segment.first_ordinal) found_ = {segment.first_ordinal, kMagic.size()};
    HeldMessage message;
    uint64_t record_bytes = 0;
    while (ReadRecord(&segment, found_.offset, &checked_, &message, &record_bytes) && message.ordinal <= ordinal) {
      if (message.last_part) *last = message;
      found_.offset += record_bytes;
    }
    return;
  }
}

void Spool::FreeUpTo(uint64_t ordinal) {
  while (!segments_.empty() && segments_.front().last_ordinal <= ordinal) {
    Segment& oldest = segments_.front();
    if (oldest.fd >= 0) close(oldest.fd);
    (void)unlink(PathOf(oldest).c_str());
    bytes_ -= oldest.bytes;
    if (segments_.size() == 1) writing_ = false;
    segments_.pop_front();
    full_ = false;
  }
  if (segments_.empty()) peeked_bytes_ = 0;
}

}  // namespace bellwether::client
