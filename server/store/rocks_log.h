// rocks_log.h: whether RocksDB's own log has lost something in its middle.
//
// RocksDB reads its log, with a warning, up to the first record that cannot be
// read, as after a power cut.  No option separates that from damage in front of
// records that were synced.  Each of our records is synced before the next one
// is begun.  So a record behind an unreadable one proves that the latter was
// durable, and people may have seen it.  Damage to the very last record cannot
// be told apart from a power cut.
//
// Of the format only what RocksDB documents: blocks of 32 KiB, in them
// fragments of {masked CRC-32C, length, type}.
// https://github.com/facebook/rocksdb/wiki/Write-Ahead-Log-File-Format

#ifndef BELLWETHER_SERVER_STORE_ROCKS_LOG_H_
#define BELLWETHER_SERVER_STORE_ROCKS_LOG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bellwether::server {

// Where the first damaged record begins; -1 = none.  `last`: records may have been on
// their way to this file when everything stopped.
int64_t FindRocksLogDamage(std::string_view log, bool last);

// Of all logs in a database's directory that no process has open, a line each.
std::vector<std::string> FindRocksLogsDamage(const std::string& directory);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_ROCKS_LOG_H_
