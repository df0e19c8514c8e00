#include "server/engine/shard.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/engine/reloadable_rules.h"
#include "server/ingest/log_records.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Rules and policies that a tick logs, in bytes: a part of the log's queue.
constexpr size_t kRulesBytesPerTick = 4 << 20;
// Between two ticks: a server that is merely busy is back sooner.
constexpr int64_t kAwayNanosMin = 10'000'000'000;
// An import that was cut off is started again by then.  After that its open step is
// closed, because the log is needed from there.
constexpr int64_t kImportPauseNanos = 900'000'000'000;

}  // namespace

Shard::Shard(const Options& options, const LiveRunParts& parts, int index)
    : options_(options),
      parts_(parts),
      depth_(parts.counters->gauge("bellwether_shard_queue_frames", {{"shard", absl::StrCat(index)}})),
      save_failures_(parts.counters->counter("bellwether_run_save_failures_total")),
      unknown_(parts.counters->counter("bellwether_ingest_frames_total", {{"result", "unknown_run"}})),
      lanes_(parts.wal->lanes()) {}

Shard::~Shard() { Stop(); }

void Shard::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Shard::Stop() {
  if (!thread_.joinable()) return;
  CommitAll();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

bool Shard::HasRoom(size_t bytes) const {
  if (replay_mode_ == ReplayMode::kReadBack) return true;  // The message stays in the log.
  if (replay_mode_ == ReplayMode::kLive) return HasRoomForRecovered(bytes);
  return kept_back_.size() < options_.queue_messages_max &&
         kept_back_bytes_ + static_cast<int64_t>(bytes) <= options_.queue_bytes_max;
}

bool Shard::HasRoomForRecovered(size_t bytes) const {
  return queue_.size() < options_.queue_messages_max &&
         queue_bytes_ + static_cast<int64_t>(bytes) <= options_.queue_bytes_max;
}

absl::StatusOr<Lsn> Shard::Append(WalRecord&& record, IngestMessage&& message, size_t bytes,
                                  absl::FunctionRef<void()> once_logged) {
  LoggedMessage logged{0, record.run, record.rank, record.epoch, record.time_unix_ms, {}};
  BW_ASSIGN_OR_RETURN(logged.lsn, parts_.wal->Append(std::move(record)));
  once_logged();
  const Lsn lsn = logged.lsn;
  if (replay_mode_ == ReplayMode::kReadBack) return lsn;
  logged.message = std::move(message);
  const bool live = replay_mode_ == ReplayMode::kLive;
  (live ? queue_ : kept_back_)
      .push_back({std::move(logged), bytes, recovering_ ? 0 : parts_.clock->MonotonicNanos(), nullptr});
  (live ? queue_bytes_ : kept_back_bytes_) += static_cast<int64_t>(bytes);
  return lsn;
}

void Shard::PushRecovered(LoggedMessage message, size_t bytes) {
  queue_.push_back({std::move(message), bytes, 0, nullptr});
  queue_bytes_ += static_cast<int64_t>(bytes);
}

void Shard::SetReplayMode(ReplayMode mode) {
  replay_mode_ = mode;
  if (mode != ReplayMode::kLive) return;
  std::move(kept_back_.begin(), kept_back_.end(), std::back_inserter(queue_));
  kept_back_.clear();
  queue_bytes_ += std::exchange(kept_back_bytes_, 0);
}

void Shard::CallWhenRoom(Task task) { when_room_.push_back(std::move(task)); }

void Shard::Enqueue(Task task) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back({{}, 0, 0, std::move(task)});
}

void Shard::Adopt(std::unique_ptr<LiveRun> run) {
  auto* raw = run.release();
  queue_.push_back({{}, 0, 0, [this, raw] { runs_[raw->record().id].reset(raw); }});
}

void Shard::Barrier(const Task& task) {
  absl::Notification done;
  Enqueue([&] {
    task();
    done.Notify();
  });
  done.WaitForNotification();
}

Lsn Shard::Drop(RunId first, RunId end, bool save) {
  Lsn needed = std::numeric_limits<Lsn>::max();
  const uint32_t lane = parts_.wal->LaneOf(first);
  absl::Notification done;
  const Task drop = [&] {
    // A run that was saved early may be saved once more.
    std::vector<RunId> under_way;
    for (auto it = runs_.lower_bound(first); it != runs_.end() && it->first < end; ++it) {
      if (it->second->saver().saving()) under_way.push_back(it->first);
    }
    if (!under_way.empty()) {
      SaveThen(lane, under_way, /*end=*/0, drop);
      return;
    }
    for (auto it = runs_.lower_bound(first); it != runs_.end() && it->first < end;) {
      if (const Lsn lsn = it->second->needed_lsn(); lsn != 0) needed = std::min(needed, lsn);
      unsaved_.erase(it->first);
      it = runs_.erase(it);
    }
    dropping_.erase({first, end});
    dropped_.insert({first, end});
    done.Notify();
  };
  Enqueue([&] {
    dropping_.insert({first, end});
    std::vector<RunId> runs;
    for (auto it = runs_.lower_bound(first); it != runs_.end() && it->first < end; ++it) runs.push_back(it->first);
    // Without `save`, too, saves that are under way end before the runs are dropped.
    SaveThen(lane, runs, save ? std::numeric_limits<Lsn>::max() : 0, drop);
  });
  done.WaitForNotification();
  return needed;
}

void Shard::Expect(RunId first, RunId end) {
  Enqueue([this, first, end] { dropped_.erase({first, end}); });
}

void Shard::SubmitUnanswered(RunId first, RunId end) {
  Enqueue([this, first, end] {
    for (auto it = runs_.lower_bound(first); it != runs_.end() && it->first < end; ++it)
      it->second->state().SubmitUnanswered();
  });
}

bool Shard::Holds(const RunRanges& ranges, RunId run) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [run](const auto& range) { return range.first <= run && run < range.second; });
}

void Shard::EndRecovery() {
  Barrier([this] {
    recovering_ = false;
    for (auto& [id, run] : runs_) {
      run->state().SubmitUnanswered();
      Deliver(run.get());  // To ranks whose streams were opened meanwhile.
    }
  });
}

std::vector<Lsn> Shard::CommitAll() {
  std::vector<Lsn> needed;
  for (uint32_t lane = 0; lane < parts_.wal->lanes(); ++lane) {
    needed.push_back(CommitBefore(lane, std::numeric_limits<Lsn>::max()));
  }
  return needed;
}

Lsn Shard::CommitBefore(uint32_t lane, Lsn end) {
  Lsn needed = 0;
  absl::Notification done;
  Enqueue([&] {
    std::vector<RunId> runs;
    for (const auto& [id, run] : runs_) {
      if (parts_.wal->LaneOf(id) == lane) runs.push_back(id);
    }
    SaveThen(lane, runs, end, [&] {
      needed = NeededLsn(lane);
      if (end != std::numeric_limits<Lsn>::max()) LogWhichRunNeeds(lane, end);
      done.Notify();
    });
  });
  done.WaitForNotification();
  return needed;
}

Lsn Shard::NeededLsn(uint32_t lane) {
  {
    // With an empty queue and an empty batch no message below the log's end waits for
    // this shard.
    absl::MutexLock lock(&mutex_);
    if (queue_.empty() && batch_.empty() && replay_mode_ == ReplayMode::kLive) {
      processed_lsn_ = std::max(processed_lsn_, parts_.wal->last_lsn());
    }
  }
  Lsn needed = processed_lsn_ + 1;
  for (const auto& [id, run] : runs_) {
    if (parts_.wal->LaneOf(id) != lane) continue;
    if (const Lsn lsn = run->needed_lsn(); lsn != 0) needed = std::min(needed, lsn);
  }
  return needed;
}

void Shard::LogWhichRunNeeds(uint32_t lane, Lsn end) {
  std::erase_if(needing_, [&](RunId id) {
    const auto run = runs_.find(id);
    return run == runs_.end() || run->second->needed_lsn() == 0 || run->second->needed_lsn() >= end;
  });
  for (const auto& [id, run] : runs_) {
    const Lsn lsn = run->needed_lsn();
    if (parts_.wal->LaneOf(id) != lane || lsn == 0 || lsn >= end || !needing_.insert(id).second) continue;
    LogWarning(
        "the log is too long, and is needed from record {} on by run {}: a step of it is open, or it cannot be saved",
        lsn, run->record().description.name);
  }
}

void Shard::WithRun(RunId id, const std::function<void(const LiveRun*)>& task) {
  Barrier([&] { task(FindOrLoad(id)); });
}

void Shard::PublishApplied(RunId id) {
  Barrier([&] {
    if (const auto found = runs_.find(id); found != runs_.end()) found->second->Publish();
  });
}

void Shard::PublishAgain(RunId id) {
  Barrier([&] {
    if (LiveRun* const run = FindOrLoad(id); run != nullptr) run->PublishAgain();
  });
}

void Shard::Loop() {
  int64_t next_tick_ns = 0;
  bool stops = false;
  for (;;) {
    std::vector<Task> when_room;
    {
      absl::MutexLock lock(&mutex_);
      // The end of a save comes by the queue.
      const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !queue_.empty() || (stopping_ && saves_ == 0);
      };
      const bool no_task_ready =
          std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.ready(); });
      if (no_task_ready) AwaitFor(&mutex_, absl::Condition(&wake), absl::Milliseconds(options_.publish_ms));
      const bool idle = std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.tasks.empty(); });
      if (queue_.empty() && idle && saves_ == 0 && stopping_) return;
      stops = stopping_;
      // A few at a time: the queue has room while they are applied.
      while (!queue_.empty() && batch_.size() < 64) {
        queue_bytes_ -= static_cast<int64_t>(queue_.front().bytes);
        batch_.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
      if (queue_.size() <= options_.queue_messages_max / 2 && queue_bytes_ <= options_.queue_bytes_max / 2) {
        when_room.swap(when_room_);
      }
      depth_->Set(static_cast<double>(queue_.size()));
    }
    for (const Task& task : when_room) task();
    while (!batch_.empty()) {
      Item item = std::move(batch_.front());
      batch_.pop_front();
      ApplyItem(&item);
    }
    for (Lane& lane : lanes_) {
      if (!lane.ready()) continue;
      const Task task = std::move(lane.tasks.front());
      lane.tasks.pop_front();
      task();
    }
    const int64_t now_ns = parts_.clock->MonotonicNanos();
    if (now_ns >= next_tick_ns && !stops) {  // At the end CommitAll() has saved what can be saved.
      next_tick_ns = now_ns + options_.publish_ms * 1'000'000;
      Tick(now_ns);
    }
  }
}

void Shard::ApplyItem(Item* item) {
  if (item->task != nullptr) {
    item->task();
    return;
  }
  processed_lsn_ = std::max(processed_lsn_, item->message.lsn);
  const auto known = runs_.find(item->message.run);
  if (known != runs_.end() && known->second->saver().closing()) {
    absl::MutexLock lock(&mutex_);
    queue_bytes_ += static_cast<int64_t>(item->bytes);  // The message still waits.
    held_[item->message.run].push_back(std::move(*item));
    return;
  }
  LiveRun* const run = FindOrLoad(item->message.run);
  if (run == nullptr) {
    unknown_->Add();
    return;
  }
  run->Apply(item->message, item->arrived_ns);
  Deliver(run);
}

void Shard::Deliver(LiveRun* run) {
  if (recovering_ || parts_.hand_over == nullptr) return;
  PendingDeliveries& deliveries = run->deliveries();
  const std::vector<PendingDelivery> pending = deliveries.Find(run->state());
  if (pending.empty()) return;
  // Never ahead of the log: a crash must not take back what a trainer was told to do.
  if (!parts_.wal->LogOf(run->record().id)->Sync(run->state().last_lsn()).ok()) {
    deliveries.FindAgain();
    return;
  }
  for (const PendingDelivery& delivery : pending) {
    const Action& action = delivery.action;
    // A rank without a stream gets its actions with its next Hello.
    if (!parts_.hand_over(run->record().id, delivery.rank, action)) continue;
    deliveries.RecordHandedOver(delivery.rank, action.id);
    if (action.state == ActionState::kApproved) {
      AppendOwn(*run, WalKind::kActionSent, action.id, {0, ActionSentMessage{action.id}});
    }
  }
}

LiveRun* Shard::FindOrLoad(RunId id) {
  if (const auto found = runs_.find(id); found != runs_.end()) {
    LiveRun* const run = found->second.get();
    if (!run->closed()) return run;
    runs_.erase(found);  // Its series are closed: it is loaded again.
  }
  if (Holds(dropped_, id)) return nullptr;  // Its rows may still be here for a moment.
  const auto record = parts_.database->GetRun(id);
  if (!record.ok() || record->deleted) return nullptr;
  auto run = LiveRun::Load(parts_, *record);
  if (!run.ok()) {
    LogError("{}", std::string(run.status().message()));
    return nullptr;
  }
  return (runs_[id] = *std::move(run)).get();
}

void Shard::SpreadRules() {
  const RuleSetPtr current = parts_.rules->current();
  std::shared_ptr<const std::string> text;
  size_t bytes_left = kRulesBytesPerTick;
  for (auto& [id, run] : runs_) {
    if (!run->RulesDiffer(current)) continue;
    if (text == nullptr) text = std::make_shared<const std::string>(current->text);
    if (bytes_left < text->size() || !AppendOwn(*run, WalKind::kRules, *text, {0, RulesMessage{text}})) return;
    bytes_left -= text->size();
    run->RecordRulesComing(current);
  }
}

void Shard::SpreadPolicy() {
  if (parts_.policy == nullptr) return;
  const PolicyPtr current = parts_.policy->current();
  size_t bytes_left = kRulesBytesPerTick;
  for (auto& [id, run] : runs_) {
    if (!run->PolicyDiffers(current)) continue;
    const PolicyMessage message = ServerPolicy(current);
    if (bytes_left < current->text.size() || !AppendOwn(*run, WalKind::kPolicy, EncodePolicy(message), {0, message})) {
      return;
    }
    bytes_left -= current->text.size();
    run->RecordPolicyComing(current);
  }
}

void Shard::NoteAway() {
  const int64_t now_ns = MonotonicNow();
  const int64_t away_ns = ticked_ns_ == 0 ? 0 : now_ns - ticked_ns_;
  ticked_ns_ = now_ns;
  if (away_ns < kAwayNanosMin) return;
  LogWarning("this server did not run for {} s: no rank counts as silent for that", away_ns / 1'000'000'000);
  for (auto& [id, run] : runs_) run->deadlines().RecordAway(away_ns);
}

void Shard::Tick(int64_t now_ns) {
  NoteAway();
  if (!recovering_) {
    SpreadRules();
    SpreadPolicy();
  }
  for (auto& [id, run] : runs_) {
    if (!recovering_) {
      CheckDeadlines(run.get(), now_ns);
      run->reporter().StoreWaiting(now_ns);
    }
    run->Publish();
    // One save after each batch of messages.  Runs that began together are due together,
    // and a message waits for one save, not for all.
    if (!Holds(dropping_, id) && run->SaveDue(now_ns) && saves_waiting_.insert(id).second) {
      lanes_[parts_.wal->LaneOf(id)].tasks.emplace_back([this, id = id] {
        saves_waiting_.erase(id);
        if (const auto found = runs_.find(id); found != runs_.end()) {
          SaveIfDue(found->second.get(), parts_.clock->MonotonicNanos());
        }
      });
    }
  }
  // The database has everything of a closed run; its snapshot stays for readers.
  std::erase_if(runs_, [](const auto& run) { return run.second->closed(); });
}

void Shard::CheckDeadlines(LiveRun* run, int64_t now_ns) {
  const RunId id = run->record().id;
  const RunState& state = run->state();
  RunDeadlines& deadlines = run->deadlines();
  const auto paused = [&] { return now_ns - deadlines.present_ns() >= kImportPauseNanos; };
  if (state.importing() && paused() && IsAttached(id)) deadlines.RecordPresent(now_ns);
  if (!state.importing() || paused()) {
    StepClosedMessage overdue;
    if (deadlines.StepOverdue(state, now_ns, options_.step_deadline_ms * 1'000'000, &overdue)) {
      AppendOwn(*run, WalKind::kStepClosed, EncodeStepClosed(overdue), {0, overdue});
    }
  }
  SilenceMessage silence;
  if (!state.importing() && run->SilenceChanged(now_ns, options_.silence_ms_min * 1'000'000, &silence)) {
    AppendOwn(*run, WalKind::kSilence, EncodeSilence(silence), {0, silence});
  }
  RunSilentMessage silent;
  if (deadlines.SilentTooLong(state, now_ns, parts_.clock->UnixNanos(), options_.run_silent_ms_max * 1'000'000,
                              &silent)) {
    deadlines.RecordPresent(now_ns);  // Once a deadline: the record is on its way.
    if (!IsAttached(id)) AppendOwn(*run, WalKind::kRunSilent, EncodeRunSilent(silent), {0, silent});
  }
}

bool Shard::AppendOwn(const LiveRun& run, WalKind kind, std::string payload, IngestMessage message) {
  return AppendOwn(run.record().id, run.record().description.attempt, kind, std::move(payload), std::move(message));
}

bool Shard::AppendSpectra(RunId run, const SpectraMessage& answers) {
  const uint32_t attempt = answers.answers.empty() ? 0 : answers.answers.back().attempt;
  return AppendOwn(run, attempt, WalKind::kSpectra, EncodeSpectra(answers), {0, answers});
}

bool Shard::AppendOwn(RunId run, uint32_t attempt, WalKind kind, std::string payload, IngestMessage message) {
  absl::MutexLock lock(&mutex_);
  WalRecord record;
  record.kind = kind;
  record.run = run;
  record.attempt = attempt;
  record.time_unix_ms = parts_.clock->UnixMillis();
  record.payload = std::move(payload);
  // If the log is full or failed, the next tick tries again.
  return Append(std::move(record), std::move(message)).ok();
}

// ---- saves ----

// While the log cannot go on nothing may be saved: the log has reported that itself.
void Shard::SaveIfDue(LiveRun* run, int64_t now_ns, const SaveGroupPtr& group) {
  const RunId id = run->record().id;
  if (run->saver().saving() || !run->SaveDue(now_ns) || !parts_.wal->LogOf(id)->health().ok()) return;
  if (parts_.savers == nullptr) {
    RecordSaved(*run, run->Save());
    return;
  }
  absl::StatusOr<RunSave> begun = run->saver().Begin();
  if (!begun.ok()) {
    RecordSaved(*run, begun.status());
    return;
  }
  const uint32_t lane = parts_.wal->LaneOf(id);
  ++saves_;
  ++lanes_[lane].saves;
  if (group != nullptr) ++group->left;
  const auto save = std::make_shared<RunSave>(*std::move(begun));  // Shared: a task must be copied.
  const bool posted = (*parts_.savers)[lane]->Post([this, id, save, group] {
    const absl::Status shared = RunSaver::Share(parts_, id, save.get());
    Enqueue([this, id, save, shared, group] { EndSave(id, std::move(*save), shared, group); });
  });
  if (!posted) EndSave(id, std::move(*save), absl::ResourceExhaustedError("too many saves are under way"), group);
}

void Shard::EndSave(RunId id, RunSave save, const absl::Status& shared, const SaveGroupPtr& group) {
  --saves_;
  --lanes_[parts_.wal->LaneOf(id)].saves;
  LiveRun* const run = runs_.at(id).get();  // The run stays while it is saved.
  RecordSaved(*run, run->EndSave(std::move(save), shared));
  // Messages that were held while the end of the run was saved.
  std::vector<Item> held;
  if (const auto found = held_.find(id); found != held_.end()) {
    held = std::move(found->second);
    held_.erase(found);
  }
  for (Item& item : held) {
    {
      absl::MutexLock lock(&mutex_);
      queue_bytes_ -= static_cast<int64_t>(item.bytes);
    }
    ApplyItem(&item);
  }
  std::vector<Task> after;
  if (const auto found = after_save_.find(id); found != after_save_.end()) {
    after = std::move(found->second);
    after_save_.erase(found);
  }
  for (const Task& task : after) task();
  if (group != nullptr) Arrive(group);
}

void Shard::RecordSaved(const LiveRun& run, const absl::Status& status) {
  const RunId id = run.record().id;
  const std::string& name = run.record().description.name;
  if (!status.ok()) {
    save_failures_->Add();
    // Logged when failures begin and when they end; each tick tries again.
    if (unsaved_.insert(id).second) {
      LogError("run {} could not be saved, it is tried again and again: {}", name, std::string(status.message()));
    }
  } else if (unsaved_.erase(id) > 0) {
    LogInfo("run {} is saved again", name);
  }
}

void Shard::SaveThen(uint32_t lane, const std::vector<RunId>& runs, Lsn end, Task then) {
  const auto group = std::make_shared<SaveGroup>();
  group->left = 1;
  group->then = std::move(then);
  std::deque<Task>& tasks = lanes_[lane].tasks;
  for (const RunId id : runs) tasks.emplace_back([this, id, end, group] { SaveOf(id, end, group); });
  tasks.emplace_back([this, group] { Arrive(group); });
}

void Shard::SaveOf(RunId id, Lsn end, const SaveGroupPtr& group) {
  const auto found = runs_.find(id);
  if (found == runs_.end()) return;
  LiveRun* const run = found->second.get();
  if (run->saver().saving()) {  // That save does not hold the newest messages.
    ++group->left;
    after_save_[id].emplace_back([this, id, end, group] {
      SaveOf(id, end, group);
      Arrive(group);
    });
    return;
  }
  if (run->needed_lsn() < end) SaveIfDue(run, INT64_MAX, group);
  run->Publish();
}

void Shard::Arrive(const SaveGroupPtr& group) {
  if (--group->left == 0) group->then();
}

}  // namespace bellwether::server
