#include "server/cluster/connection.h"

#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/cluster/libpq.h"
#include "server/util/clock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr Oid kBytea = 17;

// What each session of ours is: a paused server's transaction ends by itself, and
// whoever waits for a lock does not wait for ever.  An acknowledgement means a
// commit that the synchronous standbys have, whatever the role's default is.
constexpr const char* kSession[] = {
    "SET idle_in_transaction_session_timeout = '2s'",
    "SET lock_timeout = '2s'",
    "SET synchronous_commit = on",
    // What is looked at behind a lock was committed before it was had.
    "SET default_transaction_isolation = 'read committed'",
};

// libpq's texts end with a newline and may have several lines.
std::string OneLine(const char* text) {
  std::string line(text == nullptr ? "" : text);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return std::string(absl::StripAsciiWhitespace(line));
}

}  // namespace

PgResult::PgResult(const Libpq* pq, pg_result* result) : pq_(pq), result_(result) {}
PgResult::PgResult(PgResult&& other) noexcept : pq_(other.pq_), result_(std::exchange(other.result_, nullptr)) {}
PgResult::~PgResult() {
  if (result_ != nullptr) pq_->PQclear(result_);
}

int PgResult::rows() const { return pq_->PQntuples(result_); }
int64_t PgResult::affected() const { return std::strtoll(pq_->PQcmdTuples(result_), nullptr, 10); }
bool PgResult::IsNull(int row, int column) const { return pq_->PQgetisnull(result_, row, column) != 0; }
std::string_view PgResult::Text(int row, int column) const {
  return {pq_->PQgetvalue(result_, row, column), static_cast<size_t>(pq_->PQgetlength(result_, row, column))};
}
int64_t PgResult::Number(int row, int column) const {
  const std::string_view bytes = Text(row, column);  // Big-endian.
  uint64_t value = !bytes.empty() && (bytes[0] & 0x80) != 0 ? ~uint64_t{0} : 0;
  for (const char byte : bytes) value = value << 8 | static_cast<uint8_t>(byte);
  return static_cast<int64_t>(value);
}

absl::StatusOr<std::unique_ptr<PgConnection>> PgConnection::Connect(const std::string& dsn, int64_t timeout_ms) {
  BW_ASSIGN_OR_RETURN(const Libpq* const pq, LoadLibpq());
  const int64_t deadline_ns = MonotonicNow() + timeout_ms * 1'000'000;
  PGconn* const raw = pq->PQconnectStart(dsn.c_str());
  if (raw == nullptr) return absl::ResourceExhaustedError("PostgreSQL: no memory for a connection");
  std::unique_ptr<PgConnection> connection(new PgConnection(pq, raw));
  pq->PQsetNoticeReceiver(raw, &PgConnection::OnNotice, connection.get());
  for (PostgresPollingStatusType state = PGRES_POLLING_WRITING; state != PGRES_POLLING_OK;) {
    if (state == PGRES_POLLING_FAILED || pq->PQstatus(raw) == CONNECTION_BAD) {
      return connection->Broken(OneLine(pq->PQerrorMessage(raw)));
    }
    if (!connection->Wait(state == PGRES_POLLING_WRITING, deadline_ns)) {
      return connection->Broken(absl::StrCat("no connection within ", timeout_ms, " ms"));
    }
    state = pq->PQconnectPoll(raw);
  }
  if (pq->PQsetnonblocking(raw, 1) != 0 || pq->PQenterPipelineMode(raw) != 1) {
    return connection->Broken("libpq does not enter its pipeline mode");
  }
  std::vector<PgStatement> session;
  for (const char* const sql : kSession) session.push_back({sql, {}});
  BW_RETURN_IF_ERROR(connection->Run(session, timeout_ms).status());
  return connection;
}

PgConnection::~PgConnection() { pq_->PQfinish(connection_); }

void PgConnection::OnNotice(void* self, const pg_result* notice) {
  auto* const connection = static_cast<PgConnection*>(self);
  const char* const severity = connection->pq_->PQresultErrorField(notice, PG_DIAG_SEVERITY_NONLOCALIZED);
  if (severity == nullptr || !absl::EqualsIgnoreCase(severity, "WARNING")) return;
  connection->warned_ = true;
  connection->warning_ = OneLine(connection->pq_->PQresultErrorMessage(notice));
}

bool PgConnection::Wait(bool to_write, int64_t deadline_ns) const {
  pollfd waits{pq_->PQsocket(connection_), static_cast<int16_t>(to_write ? POLLIN | POLLOUT : POLLIN), 0};
  for (;;) {
    // Once at least: after a pause of this process the answer may lie there.
    const int64_t left_ms = std::clamp<int64_t>((deadline_ns - MonotonicNow()) / 1'000'000, 0, 60'000);
    const int ready = poll(&waits, 1, static_cast<int>(left_ms));
    if (ready > 0) return true;
    if (left_ms == 0 || (ready < 0 && errno != EINTR)) return false;
  }
}

absl::Status PgConnection::Broken(const std::string& why) {
  broken_ = true;
  return absl::UnavailableError(absl::StrCat("PostgreSQL: ", why));
}

absl::Status PgConnection::FromResult(const pg_result* result) {
  const char* const state = pq_->PQresultErrorField(result, PG_DIAG_SQLSTATE);
  const std::string code = state == nullptr ? "" : state;
  const std::string text = absl::StrCat("PostgreSQL: ", OneLine(pq_->PQresultErrorMessage(result)));
  if (code == "22012") return absl::AbortedError(text);  // Division by zero: our check.
  const std::string group = code.substr(0, 2);
  if (code.empty() || group == "08" || group == "57" || group == "53") {
    broken_ = true;  // The connection, an operator's word, no room.
    return absl::UnavailableError(text);
  }
  if (group == "40" || code == "55P03" || code == "25P03" || code == "25006") return absl::UnavailableError(text);
  if (code == "42501" || code == "42P01" || code == "42703") return absl::FailedPreconditionError(text);
  return absl::InternalError(text);
}

absl::StatusOr<std::vector<PgResult>> PgConnection::Fly(const std::vector<PgStatement>& statements,
                                                        int64_t deadline_ns) {
  if (broken_) return absl::UnavailableError("PostgreSQL: the connection is broken");
  for (const PgStatement& statement : statements) {
    std::vector<Oid> types;
    std::vector<const char*> values;
    std::vector<int> lengths, formats;
    for (const PgValue& value : statement.values) {
      types.push_back(value.is_bytes ? kBytea : 0);
      values.push_back(value.text.c_str());
      lengths.push_back(static_cast<int>(value.text.size()));
      formats.push_back(value.is_bytes ? 1 : 0);
    }
    if (pq_->PQsendQueryParams(connection_, statement.sql.c_str(), static_cast<int>(values.size()), types.data(),
                               values.data(), lengths.data(), formats.data(), /*resultFormat=*/1) != 1) {
      return Broken(OneLine(pq_->PQerrorMessage(connection_)));
    }
  }
  if (pq_->PQpipelineSync(connection_) != 1) return Broken(OneLine(pq_->PQerrorMessage(connection_)));
  for (int left = pq_->PQflush(connection_); left != 0; left = pq_->PQflush(connection_)) {
    if (left < 0 || !Wait(true, deadline_ns) || pq_->PQconsumeInput(connection_) != 1) {
      return Broken(left < 0 ? OneLine(pq_->PQerrorMessage(connection_)) : "it takes nothing in time");
    }
  }
  std::vector<PgResult> results;
  absl::Status status;
  // Per statement its result, then an empty one; at the end that of the sync.
  for (;;) {
    while (pq_->PQisBusy(connection_) != 0) {
      if (!Wait(false, deadline_ns)) return Broken("no answer in time");
      if (pq_->PQconsumeInput(connection_) != 1) return Broken(OneLine(pq_->PQerrorMessage(connection_)));
    }
    PGresult* const raw = pq_->PQgetResult(connection_);
    if (raw == nullptr) {
      if (pq_->PQstatus(connection_) == CONNECTION_BAD) return Broken(OneLine(pq_->PQerrorMessage(connection_)));
      continue;
    }
    PgResult result(pq_, raw);
    const ExecStatusType state = pq_->PQresultStatus(raw);
    if (state == PGRES_PIPELINE_SYNC) break;
    if (state == PGRES_PIPELINE_ABORTED) continue;
    if (state == PGRES_TUPLES_OK || state == PGRES_COMMAND_OK) {
      results.push_back(std::move(result));
    } else if (status.ok()) {
      status = FromResult(raw);
      if (broken_) return status;
    }
  }
  if (!status.ok()) return status;
  return results;
}

absl::StatusOr<std::vector<PgResult>> PgConnection::Run(const std::vector<PgStatement>& statements,
                                                        int64_t timeout_ms) {
  return Fly(statements, MonotonicNow() + timeout_ms * 1'000'000);
}

absl::StatusOr<std::vector<PgResult>> PgConnection::Transact(const std::vector<PgStatement>& statements,
                                                             int64_t timeout_ms) {
  const int64_t deadline_ns = MonotonicNow() + timeout_ms * 1'000'000;
  std::vector<PgStatement> all;
  all.reserve(statements.size() + 2);
  all.push_back({"BEGIN", {}});
  all.insert(all.end(), statements.begin(), statements.end());
  all.push_back({"COMMIT", {}});
  warned_ = false;
  auto results = Fly(all, deadline_ns);
  if (!results.ok()) {
    if (!broken_ && pq_->PQtransactionStatus(connection_) != PQTRANS_IDLE) {
      const absl::Status undone = Fly({{"ROLLBACK", {}}}, deadline_ns).status();
      if (!undone.ok()) broken_ = true;
    }
    return results.status();
  }
  if (warned_) return Broken(absl::StrCat("a commit came with a warning, which is no acknowledgement: ", warning_));
  std::vector<PgResult> inner;
  for (size_t i = 1; i + 1 < results->size(); ++i) inner.push_back(std::move((*results)[i]));
  return inner;
}

}  // namespace bellwether::server
