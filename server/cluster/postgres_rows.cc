#include "server/cluster/postgres_rows.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kRowsPerStatement = 32;
constexpr int64_t kRowsPage = 256;

// Big-endian: as bytes they compare as they do as numbers.
std::string Encode(const WriteNumber& number) {
  std::string bytes;
  for (const uint64_t part : {number.epoch, number.number}) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(part >> shift));
  }
  return bytes;
}

// Fails where a write with a higher number came before.
void AppendNumberCheck(const Fence& fence, const WriteNumber& number, std::vector<PgStatement>* flight) {
  const std::vector<PgValue> values = {int64_t{fence.partition}, PgValue::Bytes(kWriteNumberKey),
                                       PgValue::Bytes(Encode(number))};
  if (!number.is_known) {
    flight->push_back(
        {"INSERT INTO bellwether.run_rows (p, key, value) VALUES ($1, $2, $3) ON CONFLICT (p, key) DO UPDATE "
         "SET value = excluded.value WHERE run_rows.value < excluded.value",
         values});
  }
  flight->push_back({"SELECT 1 / count(*) FROM bellwether.run_rows WHERE p = $1 AND key = $2 AND value = $3", values});
}

std::vector<PgStatement> RowsFlight(const Fence& fence, const WriteNumber& number, const std::vector<SharedRow>& rows) {
  const auto p = int64_t{fence.partition};
  std::vector<PgStatement> flight = FencedFlight(fence);
  AppendNumberCheck(fence, number, &flight);
  // One statement takes each key once.
  std::map<std::string_view, const SharedRow*> last;
  for (const SharedRow& row : rows) last[row.key] = &row;
  PgStatement put;
  size_t in_put = 0;
  const auto finish = [&] {
    if (in_put == 0) return;
    put.sql += " ON CONFLICT (p, key) DO UPDATE SET value = excluded.value";
    flight.push_back(std::move(put));
    put = {};
    in_put = 0;
  };
  PgStatement take;
  const auto finish_take = [&] {
    if (take.values.empty()) return;
    take.sql += ")";
    flight.push_back(std::move(take));
    take = {};
  };
  for (const auto& [key, row] : last) {
    if (!row->value.has_value()) {
      if (take.values.empty()) take = {"DELETE FROM bellwether.run_rows WHERE p = $1 AND key IN (", {p}};
      absl::StrAppend(&take.sql, take.values.size() == 1 ? "$" : ", $", take.values.size() + 1);
      take.values.push_back(PgValue::Bytes(row->key));
      if (take.values.size() > kRowsPerStatement) finish_take();
      continue;
    }
    if (in_put == 0) put = {"INSERT INTO bellwether.run_rows (p, key, value) VALUES ", {p}};
    absl::StrAppend(&put.sql, in_put == 0 ? "" : ", ", "($1, $", put.values.size() + 1, ", $", put.values.size() + 2,
                    ")");
    put.values.push_back(PgValue::Bytes(row->key));
    put.values.push_back(PgValue::Bytes(*row->value));
    if (++in_put == kRowsPerStatement) finish();
  }
  finish();
  finish_take();
  return flight;
}

}  // namespace

absl::Status PutPostgresRows(const Fence& fence, const std::vector<SharedRow>& rows, WriteNumbers* numbers,
                             SharedPgLink* link) {
  for (;;) {
    WriteNumber number;
    const auto flight = [&] {
      numbers->GiveUp(fence, number);  // Of the try before, if there was one.
      number = numbers->Of(fence);
      return RowsFlight(fence, number, rows);
    };
    const absl::Status put = link->Transact(flight).status();
    if (put.ok()) numbers->Confirm(fence, number);
    if (absl::IsUnavailable(put)) numbers->GiveUp(fence, number);
    // Of a database that lost the number's row with its last seconds, which has no standby.
    if (absl::IsAborted(put) && number.is_known) numbers->GiveUp(fence, number);
    // Or overtaken by a write beside it, after one that had been given up.
    if (absl::IsAborted(put) && !(numbers->Of(fence) == number)) continue;
    return put;
  }
}

absl::Status ReadPostgresRows(uint32_t partition, std::string_view first, const std::string& end, SharedPgLink* link,
                              const std::function<absl::Status(const std::vector<SharedRow>& rows)>& visit) {
  for (std::string after(first);;) {
    BW_ASSIGN_OR_RETURN(const auto rows,
                        link->Ask({absl::StrCat("SELECT key, value FROM bellwether.run_rows WHERE p = $1 AND key > $2 "
                                                "AND key < $3 ORDER BY key LIMIT ",
                                                kRowsPage),
                                   {int64_t{partition}, PgValue::Bytes(after), PgValue::Bytes(end)}}));
    std::vector<SharedRow> page;
    for (int row = 0; row < rows.rows(); ++row) {
      page.push_back({std::string(rows.Text(row, 0)), std::string(rows.Text(row, 1))});
    }
    BW_RETURN_IF_ERROR(visit(page));
    if (static_cast<int64_t>(page.size()) < kRowsPage) return absl::OkStatus();
    after = page.back().key;
  }
}

}  // namespace bellwether::server
