#include "server/store/action_store.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Which action of its run it is.
int64_t NumberOf(const std::string& id) {
  const size_t dash = id.rfind('-');
  return dash == std::string::npos ? 0 : std::strtoll(id.c_str() + dash + 1, nullptr, 10);
}

}  // namespace

absl::StatusOr<size_t> ActionStore::Post(RunId run, const Action& action) {
  BW_ASSIGN_OR_RETURN(const size_t fresh, database_->PutAction(run, action));
  if (fresh == 0) return fresh;
  absl::MutexLock lock(&subscribers_mutex_);
  for (const auto& [id, subscriber] : subscribers_) subscriber(run, action, fresh);
  return fresh;
}

absl::Status ActionStore::Note(RunId run, Lsn lsn, const AuditEntry& entry) {
  return database_->PutAudit(run, lsn, entry).status();
}

absl::StatusOr<std::vector<Action>> ActionStore::List(RunId run) const {
  BW_ASSIGN_OR_RETURN(std::vector<Action> actions, database_->ListActions(run));
  std::sort(actions.begin(), actions.end(),
            [](const Action& a, const Action& b) { return NumberOf(a.id) < NumberOf(b.id); });
  return actions;
}

absl::StatusOr<Action> ActionStore::Get(RunId run, const std::string& id) const {
  BW_ASSIGN_OR_RETURN(const std::vector<Action> actions, database_->ListActions(run));
  for (const Action& action : actions) {
    if (action.id == id) return action;
  }
  return absl::NotFoundError(absl::StrCat("action \"", id, "\": this run has no such action"));
}

absl::StatusOr<std::vector<AuditEntry>> ActionStore::Audit(RunId run) const { return database_->ListAudit(run); }

int64_t ActionStore::Subscribe(Subscriber subscriber) {
  absl::MutexLock lock(&subscribers_mutex_);
  subscribers_[next_subscriber_] = std::move(subscriber);
  return next_subscriber_++;
}

void ActionStore::Unsubscribe(int64_t id) {
  absl::MutexLock lock(&subscribers_mutex_);
  subscribers_.erase(id);
}

}  // namespace bellwether::server
