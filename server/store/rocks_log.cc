#include "server/store/rocks_log.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "bellwether/crc32c.h"
#include "server/store/file_system.h"

namespace bellwether::server {
namespace {

constexpr size_t kBlockBytes = 32 << 10;
constexpr size_t kHeaderBytes = 7;
constexpr uint8_t kFull = 1, kFirst = 2, kMiddle = 3, kLast = 4;

uint32_t Mask(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

// The fragment at `offset`, all of it in its block; 0 bytes = none is there.
struct Fragment {
  size_t bytes = 0;
  uint8_t type = 0;
};
Fragment ParseFragment(std::string_view log, size_t offset) {
  const size_t block_end = std::min(log.size(), (offset / kBlockBytes + 1) * kBlockBytes);
  if (offset + kHeaderBytes > block_end) return {};
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(log[offset + i]); };
  const size_t bytes = kHeaderBytes + (byte(4) | static_cast<size_t>(byte(5)) << 8);
  const uint8_t type = byte(6);
  if (type < kFull || type > kLast || offset + bytes > block_end) return {};
  uint32_t told = 0;
  std::memcpy(&told, log.data() + offset, sizeof(told));
  if (told != Mask(Crc32c(log.substr(offset + 6, bytes - 6)))) return {};
  return {bytes, type};
}

}  // namespace

int64_t FindRocksLogDamage(std::string_view log, bool last) {
  size_t offset = 0;
  size_t record = 0;       // Where the record that is being read begins.
  bool in_record = false;  // Its end has not come.
  for (; offset < log.size();) {
    const size_t left = kBlockBytes - offset % kBlockBytes;
    if (left < kHeaderBytes) {  // Filled up.
      offset += left;
      continue;
    }
    const Fragment fragment = ParseFragment(log, offset);
    const bool begins = fragment.type == kFull || fragment.type == kFirst;
    if (fragment.bytes == 0 || begins == in_record) break;
    if (begins) record = offset;
    in_record = fragment.type == kFirst || fragment.type == kMiddle;
    offset += fragment.bytes;
  }
  if (!in_record) record = std::min(offset, log.size());
  if (offset >= log.size() && !in_record) return -1;
  if (!last) return static_cast<int64_t>(record);
  // One that begins behind it was begun when this one was durable.
  for (size_t at = offset; at < log.size(); ++at) {
    const uint8_t type = ParseFragment(log, at).type;
    if (type == kFull || type == kFirst) return static_cast<int64_t>(record);
  }
  return -1;
}

std::vector<std::string> FindRocksLogsDamage(const std::string& directory) {
  const auto names = FileSystem::Real()->List(directory);
  if (!names.ok()) return {std::string(names.status().message())};
  std::vector<std::pair<uint64_t, std::string>> logs;
  for (const std::string& name : *names) {
    uint64_t number = 0;
    if (name.ends_with(".log") && absl::SimpleAtoi(name.substr(0, name.size() - 4), &number)) {
      logs.emplace_back(number, name);
    }
  }
  std::sort(logs.begin(), logs.end());
  // Empty ones behind it: a start that was cut off had made them, before anything was written.
  size_t last = logs.empty() ? 0 : logs.size() - 1;
  for (std::error_code error; last > 0; --last) {
    if (std::filesystem::file_size(absl::StrCat(directory, "/", logs[last].second), error) != 0 || error) break;
  }
  std::vector<std::string> damage;
  for (size_t i = 0; i < logs.size(); ++i) {
    const std::string path = absl::StrCat(directory, "/", logs[i].second);
    std::string log;
    absl::Status read;
    if (const auto file = FileSystem::Real()->Open(path); !file.ok()) {
      read = file.status();
    } else if (const auto bytes = (*file)->Size(); !bytes.ok()) {
      read = bytes.status();
    } else {
      log.resize(static_cast<size_t>(*bytes));
      const auto got = (*file)->ReadAt(0, log.size(), log.data());
      read = got.status();
      if (got.ok()) log.resize(*got);
    }
    if (!read.ok()) {
      damage.push_back(absl::StrCat("database file ", logs[i].second, ": ", read.message()));
      continue;
    }
    const int64_t at = FindRocksLogDamage(log, i == last);
    if (at < 0) continue;
    damage.push_back(absl::StrCat("database file ", logs[i].second, ", offset ", at, " of ", log.size(),
                                  ": a record is damaged, which and those behind it were durable: alerts, notes and "
                                  "actions since the last flush"));
  }
  return damage;
}

}  // namespace bellwether::server
