#include "tests/bench/disk_parts.h"

#include <rocksdb/options.h>
#include <rocksdb/sst_file_reader.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

namespace bellwether {
namespace {

// The part that rows with this prefix belong to (server/store/database.h).
int64_t* PartOf(char prefix, DiskParts* parts) {
  switch (prefix) {
    case 's':
      return &parts->chunks;
    case 'm':
      return &parts->summaries;
    case 'w':
    case 'p':
      return &parts->windows;
    case 'j':
    case 'J':
      return &parts->states;
    default:
      return &parts->other;
  }
}

// Spreads the file's size, with its index and filters, over the parts of its rows.
void AddTable(const std::filesystem::path& path, DiskParts* parts) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  rocksdb::SstFileReader reader{rocksdb::Options()};
  if (error || !reader.Open(path).ok()) return;
  std::map<char, uint64_t> rows;
  uint64_t all = 0;
  const std::unique_ptr<rocksdb::Iterator> it(reader.NewIterator(rocksdb::ReadOptions()));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const uint64_t bytes = it->key().size() + it->value().size();
    rows[it->key()[0]] += bytes;
    all += bytes;
  }
  if (all == 0) parts->windows += static_cast<int64_t>(size);  // Only deletions: nothing else is deleted.
  for (const auto& [prefix, bytes] : rows) {
    *PartOf(prefix, parts) +=
        static_cast<int64_t>(static_cast<double>(size) * static_cast<double>(bytes) / static_cast<double>(all));
  }
}

}  // namespace

DiskParts MeasureDisk(const std::filesystem::path& data) {
  DiskParts parts;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(data / "db", error)) {
    if (file.path().extension() == ".sst") AddTable(file.path(), &parts);
  }
  for (const auto& file : std::filesystem::directory_iterator(data / "wal", error)) {
    std::error_code vanished;
    const auto size = file.file_size(vanished);
    if (!vanished) parts.log += static_cast<int64_t>(size);
  }
  return parts;
}

std::string ToJson(const DiskParts& parts, double values) {
  const auto each = [values](int64_t bytes) { return static_cast<double>(bytes) / std::max(values, 1.0); };
  char text[256];
  std::snprintf(text, sizeof(text),
                "{\"bytes_per_value\": %.3f, \"chunks\": %.3f, \"summaries\": %.3f, \"windows\": %.3f, "
                "\"states\": %.3f, \"other\": %.3f, \"log\": %.3f}",
                each(parts.database()), each(parts.chunks), each(parts.summaries), each(parts.windows),
                each(parts.states), each(parts.other), each(parts.log));
  return text;
}

}  // namespace bellwether
