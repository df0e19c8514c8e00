// wal_log.h: a small log for tests, what is put into it and what it gives back.

#ifndef BELLWETHER_TESTS_SUPPORT_WAL_LOG_H_
#define BELLWETHER_TESTS_SUPPORT_WAL_LOG_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/store/file_system.h"
#include "server/store/wal.h"

namespace bellwether::server {

inline Wal::Options Small(FileSystem* fs, const std::string& directory = "/wal") {
  Wal::Options options;
  options.directory = directory;
  options.segment_bytes = 16 << 10;
  options.record_bytes_max = 2000;
  options.pending_bytes_max = 1 << 20;
  options.cover_idle_us = 1000;
  options.file_system = fs;
  return options;
}

inline WalRecord Record(const std::string& payload) {
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.payload = payload;
  return record;
}

inline std::vector<std::string> ReadAll(const Wal& wal, Lsn from = 1, Lsn until = 0) {
  std::vector<std::string> payloads;
  const absl::Status status = wal.Read(from, until, [&payloads](const WalRecord& record) {
    payloads.push_back(record.payload);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return payloads;
}

inline std::unique_ptr<Wal> MustOpen(const Wal::Options& options, Wal::DurableCallback callback = nullptr) {
  auto wal = Wal::Open(options, std::move(callback));
  EXPECT_TRUE(wal.ok()) << wal.status();
  return wal.ok() ? *std::move(wal) : nullptr;
}

inline Lsn AppendSynced(Wal* wal, const std::string& payload) {
  const auto lsn = wal->Append(Record(payload));
  EXPECT_TRUE(lsn.ok()) << lsn.status();
  EXPECT_TRUE(wal->Sync(*lsn).ok());
  return *lsn;
}

// Several groups a segment, as outside of tests.
inline Wal::Options SmallGroups(FileSystem* fs, const std::string& directory = "/wal") {
  Wal::Options options = Small(fs, directory);
  options.group_bytes_max = 4096;
  options.group_wait_us_max = 0;  // A child that was forked has no thread that ends such waits.
  return options;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_WAL_LOG_H_
