#include "server/cluster/frame_tables.h"

#include <zstd.h>

#include "absl/strings/str_cat.h"
#include "server/store/wal_format.h"
#include "server/util/clock.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kSalt = 0;  // Of packed records: nobody looks for one among other bytes.
constexpr int64_t kBodyBytesMax = 64 << 20;
constexpr int64_t kDayNanos = int64_t{86'400} * 1'000'000'000;
constexpr int64_t kEmptyOldNanos = int64_t{600} * 1'000'000'000;
constexpr int64_t kBodiesPage = 32;
constexpr char kNow[] = "SELECT CAST(floor(extract(epoch FROM now())) AS bigint)";

// Whether a partition's last row of the table is not below what its owner's state needs.
std::string NeededIn(const std::string& table) {
  return absl::StrCat("EXISTS (SELECT 1 FROM bellwether.lease l WHERE (SELECT f.last_lsn FROM ", table,
                      " f WHERE f.p = l.p ORDER BY f.first_lsn DESC LIMIT 1) >= l.keep)");
}

}  // namespace

std::string PackRecords(const std::vector<WalRecord>& records) {
  std::string plain;
  for (const WalRecord& record : records) AppendRecord(ViewOf(record), kSalt, &plain);
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 1));
  return packed;
}

absl::Status UnpackRecords(std::string_view packed, const std::function<absl::Status(const WalRecord&)>& visit) {
  const unsigned long long size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size > kBodyBytesMax) return absl::DataLossError("shared log: a body is damaged");
  std::string plain(size, '\0');
  if (ZSTD_decompress(plain.data(), plain.size(), packed.data(), packed.size()) != size) {
    return absl::DataLossError("shared log: a body is damaged");
  }
  for (std::string_view left = plain; !left.empty();) {
    RecordView view;
    if (!ParseRecord(left, kSalt, &view)) return absl::DataLossError("shared log: a record is damaged");
    WalRecord record;
    FillRecord(view, &record);
    record.payload = std::string(view.payload);
    BW_RETURN_IF_ERROR(visit(record));
    left.remove_prefix(static_cast<size_t>(RecordBytes(view.payload.size())));
  }
  return absl::OkStatus();
}

void FrameTables::SetDay(int64_t unix_seconds) { day_offset_ns_ = unix_seconds * 1'000'000'000 - MonotonicNow(); }
int64_t FrameTables::Day() const { return (day_offset_ns_ + MonotonicNow()) / kDayNanos; }

absl::Status FrameTables::LearnDay(PgConnection* connection, int64_t answer_ms) {
  BW_ASSIGN_OR_RETURN(const auto now, connection->Run({{kNow, {}}}, answer_ms));
  SetDay(now.front().Number(0, 0));
  return absl::OkStatus();
}

PgStatement FrameTables::Insert(int table, const Fence& fence, Lsn first, Lsn last, const std::string& owner,
                                const std::string& body) {
  return {absl::StrCat("INSERT INTO bellwether.frames_", table,
                       " (p, first_lsn, last_lsn, epoch, owner, body) VALUES ($1, $2, $3, $4, $5, $6) "
                       "ON CONFLICT (p, first_lsn) DO NOTHING"),
          {int64_t{fence.partition}, static_cast<int64_t>(first), static_cast<int64_t>(last),
           static_cast<int64_t>(fence.epoch), owner, PgValue::Bytes(body)}};
}

absl::StatusOr<Lsn> FrameTables::LastLsn(uint32_t partition, SharedPgLink* link) {
  std::string sql = "SELECT max(lsn) FROM (SELECT keep AS lsn FROM bellwether.lease WHERE p = $1";
  for (int i = 0; i < kTables; ++i) {
    absl::StrAppend(&sql, " UNION ALL SELECT max(last_lsn) AS lsn FROM bellwether.frames_", i, " WHERE p = $1");
  }
  BW_ASSIGN_OR_RETURN(const auto last, link->Ask({sql + ") AS l", {int64_t{partition}}}));
  return static_cast<Lsn>(last.IsNull(0, 0) ? 0 : last.Number(0, 0));
}

absl::Status FrameTables::Read(uint32_t partition, SharedPgLink* link,
                               const std::function<absl::Status(const WalRecord&)>& visit) {
  BW_ASSIGN_OR_RETURN(const auto kept,
                      link->Ask({"SELECT keep FROM bellwether.lease WHERE p = $1", {int64_t{partition}}}));
  if (kept.rows() != 1) return absl::InternalError("the lease table lost a row");
  const auto keep = kept.Number(0, 0);
  std::string tables;
  for (int i = 0; i < kTables; ++i) {
    absl::StrAppend(&tables, i == 0 ? "" : " UNION ALL ", "SELECT first_lsn, last_lsn, body FROM bellwether.frames_", i,
                    " WHERE p = $1 AND first_lsn > $2");
  }
  // Whole bodies: the first may begin below `keep`.
  for (int64_t after = -1;;) {
    BW_ASSIGN_OR_RETURN(const auto page,
                        link->Ask({absl::StrCat("SELECT first_lsn, body FROM (", tables,
                                                ") AS f WHERE last_lsn >= $3 ORDER BY first_lsn LIMIT ", kBodiesPage),
                                   {int64_t{partition}, after, keep}}));
    for (int row = 0; row < page.rows(); ++row) {
      after = page.Number(row, 0);
      BW_RETURN_IF_ERROR(UnpackRecords(page.Text(row, 1), visit));
    }
    if (page.rows() < kBodiesPage) return absl::OkStatus();
  }
}

absl::Status FrameTables::EmptyOld(SharedPgLink* link) {
  absl::MutexLock lock(&emptying_);
  if (emptied_ns_ != 0 && MonotonicNow() - emptied_ns_ < kEmptyOldNanos) return absl::OkStatus();
  BW_ASSIGN_OR_RETURN(const auto now, link->Ask({kNow, {}}));
  SetDay(now.Number(0, 0));
  emptied_ns_ = MonotonicNow();
  const int64_t today = Day();
  for (const int64_t day : {today + 1, today + 2}) {
    const std::string table = absl::StrCat("bellwether.frames_", day % kTables);
    BW_ASSIGN_OR_RETURN(const auto holds, link->Ask({absl::StrCat("SELECT CASE WHEN EXISTS (SELECT 1 FROM ", table,
                                                                  ") THEN 1 ELSE 0 END, CASE WHEN ", NeededIn(table),
                                                                  " THEN 1 ELSE 0 END"),
                                                     {}}));
    if (holds.Number(0, 0) == 0) continue;
    if (holds.Number(0, 1) > 0) {
      LogWarning("{} holds frames of two days ago that are needed still: it is not emptied", table);
      continue;
    }
    const absl::Status emptied = Empty(table, today, link);
    if (absl::IsUnavailable(emptied)) {  // Somebody reads it, or there is no answer: another time.
      LogWarning("{} could not be emptied: {}", table, std::string(emptied.message()));
    } else if (!emptied.ok() && !absl::IsAborted(emptied)) {  // Aborted: likewise.
      return emptied;
    }
  }
  return absl::OkStatus();
}

absl::Status FrameTables::Empty(const std::string& table, int64_t today, SharedPgLink* link) {
  // Whoever commits locks the row of a lease first: nothing is committed meanwhile.  So it
  // must not last: whoever reads the table, a dump for one, is not waited for.  And one
  // that is carried out late, when the table is of a new day, comes to nothing.
  const PgStatement is_today = {
      "SELECT 1 / count(*) FROM (SELECT 1 AS one) AS t WHERE "
      "CAST(floor(extract(epoch FROM clock_timestamp()) / 86400) AS bigint) = $1",
      {today}};
  return link
      ->Transact({{"SET LOCAL lock_timeout = '200ms'", {}},
                  {"SELECT p FROM bellwether.lease ORDER BY p FOR UPDATE", {}},
                  {absl::StrCat("SELECT 1 / CASE WHEN ", NeededIn(table), " THEN 0 ELSE 1 END"), {}},
                  {absl::StrCat("TRUNCATE TABLE ", table), {}},
                  is_today})
      .status();
}

}  // namespace bellwether::server
