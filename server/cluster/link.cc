#include "server/cluster/link.h"

#include <utility>

#include "server/util/status_macros.h"

namespace bellwether::server {

absl::Status PgLink::Connect() {
  if (connected()) return absl::OkStatus();
  connection_.reset();
  BW_ASSIGN_OR_RETURN(std::unique_ptr<PgConnection> made, PgConnection::Connect(dsn_, answer_ms_));
  if (greet_) BW_RETURN_IF_ERROR(greet_(made.get()));
  connection_ = std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PgResult>> PgLink::Run(const std::vector<PgStatement>& statements) {
  BW_RETURN_IF_ERROR(Connect());
  return connection_->Run(statements, answer_ms_);
}

absl::StatusOr<std::vector<PgResult>> PgLink::Transact(const std::vector<PgStatement>& statements) {
  BW_RETURN_IF_ERROR(Connect());
  return connection_->Transact(statements, answer_ms_);
}

SharedPgLink::SharedPgLink(const std::string& dsn, int64_t answer_ms, size_t links) {
  for (size_t place = 0; place < links; ++place) {
    links_.push_back(std::make_unique<PgLink>(dsn, answer_ms));
    free_.insert(place);
  }
}

absl::StatusOr<std::vector<PgResult>> SharedPgLink::Fly(const Flight& flight) {
  size_t place = 0;
  {
    absl::MutexLock lock(&mutex_);
    const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !free_.empty(); };
    mutex_.Await(absl::Condition(&any));
    place = *free_.begin();
    free_.erase(free_.begin());
  }
  PgLink& link = *links_[place];
  const bool used = link.connected();
  auto results = flight(&link);
  if (used && !link.connected()) results = flight(&link);
  absl::MutexLock lock(&mutex_);
  free_.insert(place);
  return results;
}

absl::StatusOr<std::vector<PgResult>> SharedPgLink::Run(const std::vector<PgStatement>& statements) {
  return Fly([&](PgLink* link) { return link->Run(statements); });
}

absl::StatusOr<std::vector<PgResult>> SharedPgLink::Transact(const std::vector<PgStatement>& statements) {
  return Fly([&](PgLink* link) { return link->Transact(statements); });
}

absl::StatusOr<std::vector<PgResult>> SharedPgLink::Transact(const Maker& make) {
  return Fly([&](PgLink* link) { return link->Transact(make()); });
}

absl::StatusOr<PgResult> SharedPgLink::Ask(PgStatement statement) {
  BW_ASSIGN_OR_RETURN(std::vector<PgResult> results, Run({std::move(statement)}));
  return std::move(results.front());
}

}  // namespace bellwether::server
