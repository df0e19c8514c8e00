#include "server/cluster/postgres_rows.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kRowsPerStatement = 32;
constexpr int64_t kRowsPage = 256;

}  // namespace

absl::Status PutPostgresRows(const Fence& fence, const std::vector<SharedRow>& rows, SharedPgLink* link) {
  const auto p = int64_t{fence.partition};
  std::vector<PgStatement> flight = FencedFlight(fence);
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
  return link->Transact(flight).status();
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
