#include "server/store/alert_store.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kKeysNamedMax = 20;  // Where one is asked for that is not there.

}  // namespace

AlertStore::AlertStore(Database* database, Counters* counters)
    : database_(database),
      waiting_now_(counters == nullptr ? nullptr : counters->gauge("bellwether_alerts_waiting")),
      never_stored_(counters == nullptr ? nullptr : counters->counter("bellwether_alerts_never_stored_total")) {}

absl::Status AlertStore::Load() {
  BW_RETURN_IF_ERROR(database_->FetchTransitions().status());  // They are listed below.
  absl::MutexLock lock(&mutex_);
  uint64_t after = 0;
  std::set<RunId> runs;
  for (;;) {
    BW_ASSIGN_OR_RETURN(const std::vector<AlertTransition> page, database_->ListTransitions(after, 1000, 0));
    if (page.empty()) break;
    after = page.back().id;
    for (const AlertTransition& transition : page) {
      BW_ASSIGN_OR_RETURN(Database::AlertNote note, database_->GetAlertNote(transition.run, transition.key));
      Show(transition);
      alerts_[{transition.run, transition.key}].note = std::move(note);
      runs.insert(transition.run);
    }
  }
  for (const RunId run : runs) GatherFalseAlarms(run);
  return absl::OkStatus();
}

void AlertStore::Show(const AlertTransition& transition) {
  AlertView& view = alerts_[{transition.run, transition.key}];
  view.last = transition;
  if (view.first_unix_ns == 0) view.first_unix_ns = transition.time_unix_ns;
  if (transition.state == AlertState::kFiring) view.illness = IllnessOf(transition);
}

absl::StatusOr<bool> AlertStore::Post(AlertTransition transition) {
  absl::Status unstored;
  {
    absl::MutexLock lock(&mutex_);
    const uint32_t store = database_->StoreOf(transition.run);
    const bool held = std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& waits) {
      return database_->StoreOf(waits.transition.run) == store;
    });
    if (held) {
      // A replay is not asked for there either: it is stored, or it waits.
      const auto known = alerts_.find({transition.run, transition.key});
      const bool is_stored =
          known != alerts_.end() && known->second.last.id != 0 && known->second.last.k >= transition.k;
      const bool waits = std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& one) {
        return one.transition.run == transition.run && one.transition.key == transition.key &&
               one.transition.k == transition.k;
      });
      if (is_stored || waits) return false;
      unstored = absl::UnavailableError("others wait to be stored before it");
    }
  }
  const bool kept = !unstored.ok() && Keep(transition);
  // No reader waits for a store that is silent.  Where there is no other he sees the
  // alert as soon as its id is the last.
  const bool apart = database_->is_shared();
  absl::StatusOr<bool> is_new = true;
  if (unstored.ok() && apart) is_new = database_->PutTransition(&transition);
  {
    absl::MutexLock lock(&mutex_);
    if (unstored.ok() && !apart) is_new = database_->PutTransition(&transition);
    unstored.Update(is_new.status());
    if (is_new.ok() && !*is_new) return false;
    if (absl::IsAborted(unstored)) return unstored;
    if (!unstored.ok()) {
      transition.id = 0;
      KeepWaiting({transition, kept});
    }
    // The run's next owner may have gone on with it while it was on its way.
    if (alerts_[{transition.run, transition.key}].last.k <= transition.k) Show(transition);
  }
  if (unstored.ok()) (void)NotifyForeign();  // What came before it.
  Tell(transition);
  BW_RETURN_IF_ERROR(unstored);
  return true;
}

absl::Status AlertStore::StoreWaiting() {
  std::map<uint32_t, absl::Status> held;  // By store.
  for (;;) {
    AlertTransition transition;
    const auto next = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& waits) {
        return !held.contains(database_->StoreOf(waits.transition.run));
      });
    };
    {
      absl::MutexLock lock(&mutex_);
      const auto found = next();
      if (found == waiting_.end()) return held.empty() ? absl::OkStatus() : held.begin()->second;
      transition = found->transition;
    }
    // Nobody waits for this lock while a store is silent.
    const absl::StatusOr<bool> is_new = database_->PutTransition(&transition);
    const bool damaged = absl::IsDataLoss(is_new.status());  // What is behind it need not wait for that.
    if (damaged) LogError("an alert could not be stored: {}", std::string(is_new.status().message()));
    if (!is_new.ok() && !damaged && !absl::IsAborted(is_new.status())) {
      const bool kept = Keep(transition);
      absl::MutexLock lock(&mutex_);
      next()->kept = kept;
      held[database_->StoreOf(transition.run)] = is_new.status();
      continue;
    }
    {
      absl::MutexLock lock(&mutex_);
      waiting_.erase(next());  // It is the first still: what comes goes to the end.
      full_said_ = false;
      ShowWaiting();
      if (damaged && never_stored_ != nullptr) never_stored_->Add();
      if (!is_new.ok()) continue;  // Else its run's new owner concludes it, too.
      AlertTransition& last = alerts_[{transition.run, transition.key}].last;
      if (last.k == transition.k) last.id = transition.id;
      if (!*is_new) continue;
    }
    transition.told_before = true;
    Tell(transition);
  }
}

bool AlertStore::Keep(const AlertTransition& transition) {
  return database_->StoreOf(transition.run) != 0 && database_->KeepTransition(transition).ok();
}

bool AlertStore::Waits(RunId run) const {
  absl::MutexLock lock(&mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [run](const Waiting& waits) { return waits.transition.run == run && !waits.kept; });
}

void AlertStore::KeepWaiting(Waiting waiting) {
  if (waiting_.size() >= kWaitingMax) {
    if (never_stored_ != nullptr) never_stored_->Add();
    if (!full_said_) LogError("{} alerts wait to be stored: further ones are told, and not stored", kWaitingMax);
    full_said_ = true;
    return;
  }
  waiting_.push_back(std::move(waiting));
  ShowWaiting();
}

void AlertStore::ShowWaiting() {
  if (waiting_now_ != nullptr) waiting_now_->Set(static_cast<double>(waiting_.size()));
}

absl::Status AlertStore::NotifyForeign() {
  BW_ASSIGN_OR_RETURN(std::vector<AlertTransition> fetched, database_->FetchTransitions());
  for (AlertTransition& transition : fetched) {
    transition.foreign = true;
    {
      absl::MutexLock lock(&mutex_);
      // One that was long on its way is no news of an alert that went on meanwhile.
      if (alerts_[{transition.run, transition.key}].last.k <= transition.k) Show(transition);
    }
    Tell(transition);
  }
  return absl::OkStatus();
}

void AlertStore::Tell(const AlertTransition& transition) {
  absl::MutexLock lock(&subscribers_mutex_);
  for (const auto& [id, subscriber] : subscribers_) subscriber(transition);
}

std::vector<AlertTransition> AlertStore::Unstored() const {
  absl::MutexLock lock(&mutex_);
  std::vector<AlertTransition> unstored;
  for (const Waiting& waits : waiting_) unstored.push_back(waits.transition);
  return unstored;
}

absl::StatusOr<std::vector<AlertTransition>> AlertStore::Read(uint64_t after, size_t limit, RunId run) const {
  return database_->ListTransitions(after, limit, run);
}

uint64_t AlertStore::last_id() const { return database_->last_transition_id(); }

std::vector<AlertView> AlertStore::List(RunId run, bool firing_only) const {
  std::vector<AlertView> views;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [key, view] : alerts_) {
      if (run != 0 && key.first != run) continue;
      if (firing_only && view.last.state != AlertState::kFiring) continue;
      views.push_back(Judged(view));
    }
  }
  std::sort(views.begin(), views.end(), [](const AlertView& a, const AlertView& b) {
    const bool a_fires = a.last.state == AlertState::kFiring;
    const bool b_fires = b.last.state == AlertState::kFiring;
    return a_fires != b_fires ? a_fires : a.last.id > b.last.id;
  });
  return views;
}

std::vector<AlertTransition> AlertStore::Newest(RunId first, RunId end, int64_t since_unix_ns) const {
  std::vector<AlertTransition> newest;
  absl::MutexLock lock(&mutex_);
  for (auto at = alerts_.lower_bound({first, std::string()}); at != alerts_.end() && at->first.first < end; ++at) {
    const AlertTransition& last = at->second.last;
    if (last.id != 0 && last.time_unix_ns >= since_unix_ns) newest.push_back(last);
  }
  return newest;
}

absl::StatusOr<AlertView> AlertStore::Get(RunId run, const std::string& key) const {
  absl::MutexLock lock(&mutex_);
  const auto found = alerts_.find({run, key});
  if (found != alerts_.end()) return Judged(found->second);
  std::vector<std::pair<uint64_t, std::string>> known;  // The newest first.
  for (auto at = alerts_.lower_bound({run, std::string()}); at != alerts_.end() && at->first.first == run; ++at) {
    known.emplace_back(UINT64_MAX - at->second.last.id, at->first.second);
  }
  std::sort(known.begin(), known.end());
  std::string text = known.empty() ? "it has none" : "it has ";
  for (size_t i = 0; i < std::min(known.size(), kKeysNamedMax); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", known[i].second);
  }
  if (known.size() > kKeysNamedMax) absl::StrAppend(&text, " and ", known.size() - kKeysNamedMax, " more");
  return absl::NotFoundError(absl::StrCat("alert \"", key, "\": this run has no such alert; ", text));
}

absl::Mutex* AlertStore::NotesMutex(RunId run) {
  absl::MutexLock lock(&mutex_);
  return &notes_mutexes_[database_->StoreOf(run)];
}

absl::Status AlertStore::Annotate(RunId run, const std::string& key, const Database::AlertNote& note) {
  absl::MutexLock order(NotesMutex(run));
  BW_RETURN_IF_ERROR(Get(run, key).status());
  BW_RETURN_IF_ERROR(database_->PutAlertNote(run, key, note));
  absl::MutexLock lock(&mutex_);
  alerts_[{run, key}].note = note;
  GatherFalseAlarms(run);
  return absl::OkStatus();
}

void AlertStore::Forget(RunId run) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(alerts_, [run](const auto& alert) { return alert.first.first == run; });
  std::erase_if(waiting_, [run](const Waiting& waits) { return waits.transition.run == run; });
  false_alarms_.erase(run);
  ShowWaiting();
}

absl::Status AlertStore::LoadNotes(RunId first, RunId end) {
  std::map<RunId, std::vector<std::string>> keys;
  {
    absl::MutexLock lock(&mutex_);
    for (auto at = alerts_.lower_bound({first, std::string()}); at != alerts_.end() && at->first.first < end; ++at) {
      keys[at->first.first].push_back(at->first.second);
    }
  }
  for (const auto& [run, of_run] : keys) {
    absl::MutexLock order(NotesMutex(run));  // A note that is written meanwhile is the newer one.
    std::vector<Database::AlertNote> notes;
    for (const std::string& key : of_run) {
      BW_ASSIGN_OR_RETURN(notes.emplace_back(), database_->GetAlertNote(run, key));
    }
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < notes.size(); ++i) alerts_[{run, of_run[i]}].note = std::move(notes[i]);
    GatherFalseAlarms(run);
  }
  return absl::OkStatus();
}

void AlertStore::GatherFalseAlarms(RunId run) {
  std::vector<FalseAlarm> all;
  for (auto at = alerts_.lower_bound({run, std::string()}); at != alerts_.end() && at->first.first == run; ++at) {
    for (const FalseAlarm& said : at->second.note.false_alarms) all.emplace_back(said).key = at->first.second;
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const FalseAlarm& a, const FalseAlarm& b) { return a.time_unix_ns < b.time_unix_ns; });
  if (all.empty()) {
    false_alarms_.erase(run);
  } else {
    false_alarms_[run] = std::move(all);
  }
}

const FalseAlarm* AlertStore::LastSaid(RunId run, const Illness& illness) const {
  const auto of_run = false_alarms_.find(run);
  return of_run == false_alarms_.end() ? nullptr : server::LastSaid(of_run->second, illness);
}

AlertView AlertStore::Judged(AlertView view) const {
  const FalseAlarm* const said = LastSaid(view.last.run, view.illness);
  if (said == nullptr || said->undone) return view;
  view.false_alarm = *said;
  view.muted = Mutes(said, view.last.severity);
  return view;
}

int64_t AlertStore::LastSaidUnixNanos(RunId run) const {
  absl::MutexLock lock(&mutex_);
  const auto of_run = false_alarms_.find(run);
  return of_run == false_alarms_.end() ? 0 : of_run->second.back().time_unix_ns;
}

std::vector<FalseAlarm> AlertStore::FalseAlarmsOf(const AlertView& alert) const {
  absl::MutexLock lock(&mutex_);
  const auto of_run = false_alarms_.find(alert.last.run);
  if (of_run == false_alarms_.end()) return {};
  std::vector<FalseAlarm> found;
  std::copy_if(of_run->second.begin(), of_run->second.end(), std::back_inserter(found), [&](const FalseAlarm& said) {
    return said.key == alert.last.key || Covers(said.illness, alert.illness);
  });
  return found;
}

RunSnapshotPtr AlertStore::WithoutMuted(RunSnapshotPtr run) const {
  {
    absl::MutexLock lock(&mutex_);
    const auto of_run = false_alarms_.find(run->record.id);
    const bool any = of_run != false_alarms_.end() &&
                     std::any_of(of_run->second.begin(), of_run->second.end(), [&](const FalseAlarm& said) {
                       return !LastSaid(run->record.id, said.illness)->undone;
                     });
    if (!any) return run;
  }
  auto counted = std::make_shared<RunSnapshot>(*run);
  counted->alerts_firing = 0;
  counted->record.stage = 0;
  counted->eta = {};
  Severity severity = Severity::kNone;
  for (const AlertView& alert : List(run->record.id, /*firing_only=*/true)) {
    const AlertTransition& last = alert.last;
    if (alert.muted) continue;
    ++counted->alerts_firing;
    counted->record.stage = std::max(counted->record.stage, last.stage);
    if (!last.eta.known) continue;
    // As AlertEngine::eta().
    const auto passed = static_cast<double>(std::max<int64_t>(run->record.step - last.step, 0));
    const auto left = [passed](double steps) { return std::max(0.0, steps - passed); };
    const double steps = left(last.eta.steps);
    const bool sooner = last.severity == severity && steps < counted->eta.steps;
    if (counted->eta.known && last.severity <= severity && !sooner) continue;
    severity = last.severity;
    counted->eta = {.known = true,
                    .steps = steps,
                    .lower_steps = left(last.eta.lower_steps),
                    .upper_steps = left(last.eta.upper_steps),
                    .step_seconds = run->eta.step_seconds};
  }
  return counted;
}

int64_t AlertStore::Subscribe(Subscriber subscriber) {
  absl::MutexLock lock(&subscribers_mutex_);
  subscribers_[next_subscriber_] = std::move(subscriber);
  return next_subscriber_++;
}

void AlertStore::Unsubscribe(int64_t id) {
  absl::MutexLock lock(&subscribers_mutex_);
  subscribers_.erase(id);
}

}  // namespace bellwether::server
