// disk_parts.h: what the files of a server's data folder are spent on.
//
// Reads the database's files themselves, so that rows which are superseded and
// not yet compacted away count for what they are: bytes on disk.  The server
// may be running; a file that it deletes meanwhile is left out.
//
// Pure but for the files; any thread.

#ifndef BELLWETHER_TESTS_BENCH_DISK_PARTS_H_
#define BELLWETHER_TESTS_BENCH_DISK_PARTS_H_

#include <cstdint>
#include <filesystem>
#include <string>

namespace bellwether {

struct DiskParts {
  int64_t chunks = 0;     // Of series.
  int64_t summaries = 0;  // Of chunks and of derived signals.
  int64_t windows = 0;    // What is not in chunks yet.
  int64_t states = 0;     // Detectors and windows, saved.
  int64_t other = 0;      // Runs, ranks, events, alerts.
  int64_t log = 0;        // The write-ahead log's segments, as allocated.

  int64_t database() const { return chunks + summaries + windows + states + other; }
};

// `data` holds db/ and, if there is one, wal/.
DiskParts MeasureDisk(const std::filesystem::path& data);

// A JSON object: bytes a value for each part, and of the database.
std::string ToJson(const DiskParts& parts, double values);

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_DISK_PARTS_H_
