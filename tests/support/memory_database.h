// memory_database.h: a Database that holds alerts, actions and bands in memory and
// nothing else.
//
// For tests of what reads the alert log; runs, ranks and states are refused.
// Thread-safe.

#ifndef BELLWETHER_TESTS_SUPPORT_MEMORY_DATABASE_H_
#define BELLWETHER_TESTS_SUPPORT_MEMORY_DATABASE_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/store/database.h"

namespace bellwether::server {

class MemoryDatabase : public Database {
 public:
  absl::StatusOr<std::vector<RunRecord>> ListRuns(RunId, RunId) const override { return std::vector<RunRecord>{}; }
  absl::StatusOr<RunRecord> GetRun(RunId) const override { return Unsupported(); }
  absl::Status DeleteRun(const RunRecord&) override { return Unsupported(); }
  absl::StatusOr<std::vector<RankRecord>> ListRanks(RunId) const override { return Unsupported(); }
  absl::StatusOr<std::string> GetState(RunId) const override { return Unsupported(); }
  absl::StatusOr<RunRows> GetRows(RunId) const override { return RunRows(); }
  absl::StatusOr<std::vector<RunEvent>> ListEvents(RunId run, uint64_t skip, size_t count) const override {
    absl::MutexLock lock(&mutex_);
    std::vector<RunEvent> page;
    const auto found = events_.find(run);
    for (size_t i = skip; found != events_.end() && i < found->second.size() && page.size() < count; ++i) {
      page.push_back(found->second[i]);
    }
    return page;
  }
  absl::StatusOr<uint64_t> CountEvents(RunId run) const override {
    absl::MutexLock lock(&mutex_);
    const auto found = events_.find(run);
    return found == events_.end() ? 0 : found->second.size();
  }
  std::unique_ptr<RunBatch> NewBatch() override { return nullptr; }
  absl::Status Commit(std::unique_ptr<RunBatch>) override { return Unsupported(); }

  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    absl::MutexLock lock(&mutex_);
    if (full_) return absl::ResourceExhaustedError("disk full");
    if (!seen_.insert({transition->run, transition->key, transition->k}).second) return false;
    transition->id = transitions_.size() + 1;
    transitions_.push_back(*transition);
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit, RunId run) const override {
    absl::MutexLock lock(&mutex_);
    std::vector<AlertTransition> found;
    for (const AlertTransition& transition : transitions_) {
      if (transition.id > after && (run == 0 || transition.run == run) && found.size() < limit)
        found.push_back(transition);
    }
    return found;
  }
  uint64_t last_transition_id() const override {
    absl::MutexLock lock(&mutex_);
    return transitions_.size();
  }
  absl::Status PutAlertNote(RunId run, const std::string& key, const AlertNote& note) override {
    absl::MutexLock lock(&mutex_);
    notes_[{run, key}] = note;
    return absl::OkStatus();
  }
  absl::StatusOr<AlertNote> GetAlertNote(RunId run, const std::string& key) const override {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find({run, key});
    return found == notes_.end() ? AlertNote{} : found->second;
  }
  absl::StatusOr<size_t> PutAction(RunId run, const Action& action) override {
    absl::MutexLock lock(&mutex_);
    Action& stored = actions_[{run, action.id}];
    const size_t known = stored.history.size();
    if (known >= action.history.size()) return 0;
    stored = action;
    return action.history.size() - known;
  }
  absl::StatusOr<std::vector<Action>> ListActions(RunId run) const override {
    absl::MutexLock lock(&mutex_);
    std::vector<Action> found;
    for (const auto& [key, action] : actions_) {
      if (key.first == run) found.push_back(action);
    }
    return found;
  }
  absl::StatusOr<bool> PutAudit(RunId run, Lsn lsn, const AuditEntry& entry) override {
    absl::MutexLock lock(&mutex_);
    return audit_.try_emplace({run, lsn}, entry).second;
  }
  absl::StatusOr<std::vector<AuditEntry>> ListAudit(RunId run) const override {
    absl::MutexLock lock(&mutex_);
    std::vector<AuditEntry> found;
    for (const auto& [key, entry] : audit_) {
      if (key.first == run) found.push_back(entry);
    }
    return found;
  }
  absl::Status PutTold(RunId run, uint32_t receiver, uint64_t id) override {
    absl::MutexLock lock(&mutex_);
    told_[{run, receiver}] = id;
    return absl::OkStatus();
  }
  absl::StatusOr<uint64_t> GetTold(RunId run, uint32_t receiver) const override {
    absl::MutexLock lock(&mutex_);
    const auto found = told_.find({run, receiver});
    return found == told_.end() ? 0 : found->second;
  }
  absl::Status PutBands(RunId run, std::string_view row) override {
    absl::MutexLock lock(&mutex_);
    bands_[run] = row;
    return absl::OkStatus();
  }
  absl::Status DeleteBands(RunId run) override {
    absl::MutexLock lock(&mutex_);
    bands_.erase(run);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<BandsRow>> ListBands() const override {
    absl::MutexLock lock(&mutex_);
    std::vector<BandsRow> rows;
    for (const auto& [run, row] : bands_) rows.push_back({run, row});
    return rows;
  }
  absl::Status Flush() override { return absl::OkStatus(); }
  absl::Status CopyTo(const std::string&) override { return Unsupported(); }
  int64_t bytes() const override { return 0; }

  // Transitions cannot be stored.
  void SetFull(bool full) {
    absl::MutexLock lock(&mutex_);
    full_ = full;
  }
  void AddEvent(RunId run, const RunEvent& event) {
    absl::MutexLock lock(&mutex_);
    events_[run].push_back(event);
  }

 private:
  static absl::Status Unsupported() { return absl::UnimplementedError("not in a MemoryDatabase"); }

  mutable absl::Mutex mutex_;
  bool full_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<AlertTransition> transitions_ ABSL_GUARDED_BY(mutex_);
  std::set<std::tuple<RunId, std::string, uint32_t>> seen_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<RunId, std::string>, AlertNote> notes_ ABSL_GUARDED_BY(mutex_);
  std::map<RunId, std::vector<RunEvent>> events_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<RunId, std::string>, Action> actions_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<RunId, Lsn>, AuditEntry> audit_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<RunId, uint32_t>, uint64_t> told_ ABSL_GUARDED_BY(mutex_);
  std::map<RunId, std::string> bands_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_MEMORY_DATABASE_H_
