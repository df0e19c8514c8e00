#include "server/engine/live_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/act/proposals.h"
#include "server/detect/rule_families.h"
#include "server/engine/siblings.h"
#include "server/util/byte_io.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// 1 had no rules, 2 no actions, 3 not what ranks the merge had heard, 4 no stripped frames.
constexpr uint32_t kStateVersion = 5;
constexpr uint64_t kCommitSteps = 256;
constexpr size_t kCommitEvents = 256;
constexpr int64_t kCommitNanosMin = 2'000'000'000;
constexpr int64_t kCommitNanosMax = 30'000'000'000;
// A rank is silent after so many of its usual intervals.
constexpr double kSilentIntervals = 10;
// Senders that lost their server are back by then, if they are at all.
constexpr int64_t kComeBackNanos = 600'000'000'000;

bool HasHeadSignals(const StepSample& sample) {
  return std::any_of(sample.signals().begin(), sample.signals().end(),
                     [](SignalId id) { return FindSignal(id)->granularity != Granularity::kRun; });
}

// What a client's total rose by since it told `before`; a sum of very many stays the largest number.
void AddRise(uint64_t before, uint64_t now, uint64_t* sum) {
  if (now > before) *sum += std::min(now - before, std::numeric_limits<uint64_t>::max() - *sum);
}

}  // namespace

LiveRun::LiveRun(const LiveRunParts& parts, const RunRecord& record)
    : parts_(parts),
      record_(record),
      merge_(record.description.layout, record.description.reporters),
      rules_(parts.rules->built_in()),
      judge_(rules_->options, record.description, parts.bank),
      engine_(std::make_unique<ActionEngine>(record.description, DefaultPolicy())),
      sink_([this](const StepSample& sample) { OnStep(sample); }),
      grams_(GramAssembler::Options()),
      committed_ns_(parts.clock->MonotonicNanos()),
      here_ns_(parts.clock->MonotonicNanos()),
      late_(parts.counters->counter("bellwether_ingest_frames_total", {{"result", "late"}})),
      repeated_(parts.counters->counter("bellwether_ingest_frames_total", {{"result", "repeated"}})),
      closed_by_deadline_(parts.counters->counter("bellwether_steps_closed_by_deadline_total")),
      ended_silent_(parts.counters->counter("bellwether_runs_ended_silent_total")),
      events_refused_(parts.counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "events_per_run"}})),
      disagreements_left_out_(parts.counters->counter("bellwether_disagreements_left_out_total")),
      alert_seconds_(parts.counters->histogram("bellwether_alert_seconds")) {
  if (!record_.coverage.missed.empty() || record_.signals.empty()) return;
  record_.coverage =  // Of a server of before.
      RunCoverage::Of(record_.signals, record_.description.layout.layers, record_.description.attempt, record_.step);
}

absl::Status LiveRun::Load() {
  BW_RETURN_IF_ERROR(LoadStored());
  // What readers were shown before must not go because somebody asked something.
  if (const auto newest = NewestLoss(record_, parts_)) last_sample_ = *newest;
  return absl::OkStatus();
}

absl::Status LiveRun::LoadStored() {
  BW_ASSIGN_OR_RETURN(const std::vector<RankRecord> ranks, parts_.database->ListRanks(record_.id));
  for (const RankRecord& rank : ranks) ranks_[rank.rank] = rank;
  last_lsn_ = saved_lsn_ = record_.applied_lsn;
  BW_ASSIGN_OR_RETURN(events_stored_, parts_.database->CountEvents(record_.id));
  const auto state = parts_.database->GetState(record_.id);
  if (!state.ok()) {
    if (!absl::IsNotFound(state.status())) return state.status();
    parts_.series->Open(record_.id, record_.description.layout);
    return absl::OkStatus();
  }
  std::string series_state;
  if (!RestoreState(*state, &series_state)) {
    return absl::DataLossError("run " + record_.description.name + ": its saved state cannot be read");
  }
  changed_ = !record_.ended;  // What an ended run looks like was shown from its record.
  if (record_.ended) {        // Closed when it was saved.
    parts_.series->Open(record_.id, record_.description.layout);
    return absl::OkStatus();
  }
  return parts_.series->Restore(record_.id, record_.description.layout, series_state);
}

void LiveRun::Apply(const LoggedMessage& logged, int64_t arrived_ns) {
  const bool saved = logged.lsn <= saved_lsn_;
  last_lsn_ = std::max(last_lsn_, logged.lsn);
  arrived_ns_ = arrived_ns;
  dirty_ = changed_ = true;
  merge_.SetReplay(saved);
  now_ = {logged.time_unix_ms * 1'000'000, record_.step};
  if (logged.epoch > 0) {
    RankRecord& rank = ranks_[logged.rank];
    rank.rank = logged.rank;
    rank.epoch = std::max(rank.epoch, logged.epoch);
    rank.durable_seq = std::max(rank.durable_seq, logged.message.seq);
    if (!saved) record_.last_report_unix_ns = logged.time_unix_ms * 1'000'000;
    if (arrived_ns > 0) heard_ns_[logged.rank] = here_ns_ = arrived_ns;
  }
  if (!saved && record_.ended) engine_->SetEnded(true, now_, &changed_actions_);
  const auto& body = logged.message.body;
  if (const auto* frame = std::get_if<RankFrame>(&body)) {
    ApplyFrame(logged.rank, *frame, logged.lsn);
  } else if (const auto* gram = std::get_if<ShippedGram>(&body)) {
    ApplyGram(*gram, logged.lsn);
  } else if (const auto* spectra = std::get_if<SpectraMessage>(&body)) {
    ApplySpectra(*spectra);
  } else if (saved) {
    return;  // Everything but what belongs to an open step is in the saved state at once.
  } else if (const auto* hello = std::get_if<HelloMessage>(&body)) {
    ApplyHello(*hello);
  } else if (const auto* event = std::get_if<RunEvent>(&body)) {
    KeepEvent(*event);
    record_.kind_changed = record_.kind_changed || ChangesKind(event->kind);
    judge_.OnEvent(*event, &transitions_);
    engine_->OnEvent(*event, now_, &changed_actions_);
  } else if (const auto* bye = std::get_if<ByeMessage>(&body)) {
    ApplyBye(logged.rank, *bye);
  } else if (const auto* closed = std::get_if<StepClosedMessage>(&body)) {
    closed_by_deadline_->Add();
    merge_.CloseThrough(closed->attempt, closed->step, sink_);
    LetGo(false);
  } else if (const auto* silence = std::get_if<SilenceMessage>(&body)) {
    judge_.OnSilence(silence->silent_ranks, silence->seconds, &transitions_);
  } else if (const auto* silent = std::get_if<RunSilentMessage>(&body)) {
    EndSilent(*silent);
  } else if (const auto* rules = std::get_if<RulesMessage>(&body)) {
    ApplyRules(*rules);
  } else if (const auto* result = std::get_if<ActionResultMessage>(&body)) {
    ApplyActionResult(logged.rank, *result);
  } else if (const auto* request = std::get_if<ActionRequestMessage>(&body)) {
    ApplyActionRequest(*request);
  } else if (const auto* policy = std::get_if<PolicyMessage>(&body)) {
    ApplyPolicy(*policy);
  } else if (const auto* sent = std::get_if<ActionSentMessage>(&body)) {
    engine_->OnSent(sent->id, now_, &changed_actions_);
  }
  NotifyEngine();
  if (record_.ended) engine_->SetEnded(true, now_, &changed_actions_);
  PostActions();
  Post(&transitions_);
  changed_actions_.clear();
}

// The last that is kept says that others were not.
void LiveRun::KeepEvent(const RunEvent& event) {
  const uint64_t kept = events_stored_ + new_events_.size();
  if (kept + 1 >= parts_.events_max) events_refused_->Add();
  if (kept >= parts_.events_max) return;
  new_events_.push_back(event);
  shown_events_ = nullptr;
  if (kept + 1 < parts_.events_max) return;
  RunEvent& note = new_events_.back();
  note.kind = EventKind::kAnnotation;
  note.value = 0;
  note.text = absl::StrCat(parts_.events_max, " events of a run are kept (limits.events_per_run_max): from here on ",
                           "they are judged, and not kept");
}

void LiveRun::ApplyHello(const HelloMessage& hello) {
  const uint64_t attempt = record_.description.attempt;
  if (hello.run.attempt < attempt) return;  // A straggler of an older attempt.
  LetGo(true);                              // What waited to leave has left before it came back.
  // A new run was made with its first Hello: that is no change.
  record_.kind_changed = record_.kind_changed || KindOf(hello.run) != KindOf(record_.description);
  const int64_t known_launch = hello.run.attempt == attempt ? record_.description.launch_unix_ms : 0;
  record_.description = hello.run;
  // A rank that does not know it takes it from nobody.
  if (hello.run.launch_unix_ms == 0) record_.description.launch_unix_ms = known_launch;
  record_.import_of = hello.import_of;
  record_.import_notifies = hello.import_notifies;
  GoOn();
  merge_.Join(hello.rank, hello.run.attempt, hello.run.reporters);
  judge_.OnHello(hello.run, &transitions_);
  handed_.erase(hello.rank);
  due_seen_ = UINT64_MAX;  // A new stream was handed nothing.
  engine_->OnHello(hello.run,
                   {.rank = hello.rank,
                    .attempt = hello.run.attempt,
                    .kinds_mask = hello.kinds_mask,
                    .ranks_agree = hello.ranks_agree},
                   now_, &changed_actions_);
}

void LiveRun::ApplyFrame(uint32_t rank, const RankFrame& frame, Lsn lsn) {
  const RankMerge::Outcome outcome = merge_.Add(rank, frame, lsn, sink_);
  if (lsn <= saved_lsn_) return;  // Of an open step: counted when it was saved.
  Losses& told = told_[rank];
  AddRise(told.dropped, frame.dropped_total, &record_.frames_dropped);
  AddRise(told.stripped, frame.stripped_total, &record_.frames_stripped);
  // Of a new client process, which counts afresh, also if it is less.
  told = {frame.dropped_total, frame.stripped_total};
  switch (outcome) {
    case RankMerge::Outcome::kTaken:
      GoOn();
      ++record_.frames;
      break;
    case RankMerge::Outcome::kLate:
      late_->Add();
      break;
    case RankMerge::Outcome::kRepeated:
      repeated_->Add();
      break;
  }
}

void LiveRun::GoOn() {
  engine_->SetEnded(false, now_, &changed_actions_);
  record_.ended = false;
  record_.end_reason.clear();
}

void LiveRun::TakeLeave(uint32_t rank, const ByeMessage& bye) {
  merge_.SetGone(rank, sink_);
  heard_ns_.erase(rank);
  if (merge_.gone().size() < record_.description.reporters) return;
  record_.ended = true;
  record_.end_reason = bye.reason == ByeMessage::Reason::kFinished   ? "finished"
                       : bye.reason == ByeMessage::Reason::kDied     ? "died"
                       : bye.reason == ByeMessage::Reason::kDetached ? "detached"
                                                                     : "ended";
}

void LiveRun::EndSilent(const RunSilentMessage& silent) {
  if (record_.last_report_unix_ns / 1'000'000 != silent.last_report_unix_ms) return;  // Somebody came just then.
  LetGo(true);
  merge_.CloseThrough(std::numeric_limits<uint32_t>::max(), std::numeric_limits<int64_t>::max(), sink_);
  heard_ns_.clear();
  silent_ranks_ = 0;
  if (record_.ended) return;  // By a goodbye that waited.
  ended_silent_->Add();
  record_.ended = true;
  record_.end_reason = kEndedSilent;
}

void LiveRun::ApplyRules(const RulesMessage& rules) {
  if (*rules.text == rules_->text) return;
  const auto found = parts_.rules->Find(*rules.text);
  if (!found.ok()) {
    LogError("run {} goes on by the rules that it had: {}", record_.description.name,
             std::string(found.status().message()));
    return;
  }
  rules_ = *found;
  judge_.SetOptions(rules_->options, &transitions_);
  engine_->OnRules(now_);
}

bool LiveRun::RulesDiffer(const RuleSetPtr& current) {
  if (record_.ended || current == rules_ || current == coming_rules_) return false;
  if (current->text != rules_->text) return true;
  rules_ = current;  // The same words, read anew.
  return false;
}

void LiveRun::OpenSeries() {
  if (!std::exchange(series_closed_, false)) return;
  parts_.series->Open(record_.id, record_.description.layout);
}

void LiveRun::OnStep(const StepSample& sample) {
  OpenSeries();
  if (const absl::Status status = parts_.series->Append(record_.id, sample); !status.ok()) {
    LogError("run {}: step {} could not be stored: {}", record_.description.name, sample.step,
             std::string(status.message()));
  }
  judge_.Observe(sample, &transitions_);
  record_.coverage.off = FamiliesOff(rules_->options);
  record_.coverage.Observe(sample);
  if (sample.disagreements_left_out > 0) {
    disagreements_left_out_->Add(static_cast<double>(sample.disagreements_left_out));
  }
  AddTotals(sample);
  stepped_ = true;
  for (const SignalId id : sample.signals()) {
    const auto at = std::lower_bound(record_.signals.begin(), record_.signals.end(), id);
    if (at == record_.signals.end() || *at != id) record_.signals.insert(at, id);
  }
  record_.step = now_.step = sample.step;
  record_.stage = judge_.stage();
  NotifyEngine();
  engine_->OnStep(sample, now_, &changed_actions_);
  ++record_.steps_recorded;
  ++steps_since_commit_;
  CountGram("incomplete", static_cast<double>(grams_.Close(sample.attempt, sample.step)));
  last_sample_ = sample;
  if (HasHeadSignals(sample)) {
    last_heads_ = sample;
    heads_changed_ = true;
  }
}

void LiveRun::AddTotals(const StepSample& sample) {
  for (const SignalId id : sample.signals()) {
    const SignalInfo& signal = *FindSignal(id);
    const bool total = std::any_of(signal.metrics, signal.metrics + signal.metric_count,
                                   [](const MetricInfo& metric) { return metric.aggregate == Aggregate::kTotal; });
    if (!total) continue;
    const MatrixShape shape = ShapeOf(signal, sample.layout());
    const auto values = sample.matrix(id);
    std::vector<double>& totals = totals_[id];
    totals.resize(static_cast<size_t>(shape.layers));
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) totals[i / static_cast<size_t>(shape.heads)] += values[i];
    }
  }
}

void LiveRun::Post(std::vector<AlertTransition>* transitions) {
  if (transitions->empty()) return;
  // People must not be told of what a crash could still take back.  A failed
  // log does not silence alerts: they go on from memory.
  if (const absl::Status status = parts_.wal->LogOf(record_.id)->Sync(last_lsn_); !status.ok()) {
    LogWarning("alerts of run {} go out before they are durable: {}", record_.description.name,
               std::string(status.message()));
  }
  record_.stage = judge_.stage();
  for (AlertTransition& transition : *transitions) {
    transition.run = record_.id;
    transition.run_name = record_.description.name;
    transition.time_unix_ns = parts_.clock->UnixNanos();
    // Nobody can approve what is not stored.
    if (!actions_wait_) AddProposals(changed_actions_, *engine_->policy(), &transition);
    // What is of two kinds has no siblings.
    if (parts_.baselines != nullptr && !record_.kind_changed)
      AddSiblings(*parts_.baselines, record_.description, &transition);
    const auto posted = parts_.alerts->Post(std::move(transition));
    if (!posted.ok()) LogError("an alert is told unstored: {}", std::string(posted.status().message()));
    if (arrived_ns_ > 0) {
      alert_seconds_->Observe(static_cast<double>(parts_.clock->MonotonicNanos() - arrived_ns_) * 1e-9);
    }
  }
  transitions->clear();
  transitions_told_ = 0;
}

void LiveRun::Publish() {
  if (!changed_) return;
  changed_ = false;
  // Of a run that had ended before it was taken up nothing new was seen: what is shown of it stays.
  const RunSnapshotPtr shown = stepped_ || !record_.ended ? nullptr : parts_.table->Get(record_.id);
  if (shown != nullptr) {
    auto snapshot = std::make_shared<RunSnapshot>(*shown);
    snapshot->record = record_;
    snapshot->alerts_firing = static_cast<uint32_t>(parts_.alerts->List(record_.id, true).size());
    snapshot->ranks_reporting = 0;
    snapshot->version = version_ = std::max(version_, shown->version) + 1;
    ShowEvents(snapshot.get());
    parts_.table->Publish(std::move(snapshot));
    return;
  }
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record = record_;
  snapshot->eta = judge_.eta();
  snapshot->alerts_firing = judge_.alerts_firing();
  snapshot->ranks_reporting = record_.ended ? 0 : merge_.reporting() - std::min(merge_.reporting(), silent_ranks_);
  snapshot->version = ++version_;
  if (heads_changed_) {
    shown_heads_ = std::make_shared<StepSample>(last_heads_);
    heads_changed_ = false;
  }
  snapshot->heads = shown_heads_;
  if (!last_sample_.signals().empty()) snapshot->newest = std::make_shared<StepSample>(last_sample_);
  const Layout& layout = record_.description.layout;
  snapshot->head_stage.reserve(static_cast<size_t>(layout.layers * layout.heads));
  for (int32_t layer = 0; layer < layout.layers; ++layer) {
    for (int32_t head = 0; head < layout.heads; ++head) {
      snapshot->head_stage.push_back(static_cast<uint8_t>(judge_.stage_of(layer, head)));
    }
  }
  snapshot->totals = totals_;
  ShowEvents(snapshot.get());
  parts_.table->Publish(std::move(snapshot));
}

void LiveRun::ShowEvents(RunSnapshot* snapshot) {
  if (shown_events_ == nullptr) shown_events_ = std::make_shared<const std::vector<RunEvent>>(new_events_);
  snapshot->events_stored = events_stored_;
  snapshot->events_new = shown_events_;
}

std::shared_ptr<const StepSample> LiveRun::NewestLoss(const RunRecord& record, const LiveRunParts& parts) {
  int64_t step = -1;
  const auto loss = parts.series->ReadMatrix(record.id, record.description.layout, SignalId::kLoss, -1, &step);
  if (!loss.ok() || loss->empty() || step < 0) return nullptr;
  auto newest = std::make_shared<StepSample>();
  newest->Reset(record.description.layout);
  newest->step = step;
  newest->Add(SignalId::kLoss)[0] = loss->front();
  return newest;
}

void LiveRun::PublishRecord(const RunRecord& record, const LiveRunParts& parts) {
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record = record;
  if (!record.ended) return parts.table->Publish(std::move(snapshot));  // It tells more itself, soon.
  snapshot->alerts_firing = static_cast<uint32_t>(parts.alerts->List(record.id, true).size());
  snapshot->newest = NewestLoss(record, parts);
  parts.table->Publish(std::move(snapshot));
}

Lsn LiveRun::needed_lsn() const {
  // Below the oldest open step lie closed ones that are in no saved state yet.
  return dirty_ ? record_.applied_lsn + 1 : merge_.oldest_open_lsn();
}

bool LiveRun::CommitDue(int64_t now_ns) const {
  // A goodbye that waits is in no saved state yet: the log keeps it.
  // So is what could not be stored of its actions and alerts.
  if (!dirty_ || !byes_.empty() || !outbox_.empty() || parts_.alerts->Waits(record_.id)) return false;
  const int64_t age = now_ns - committed_ns_;
  return record_.ended || age >= kCommitNanosMax || new_events_.size() >= kCommitEvents ||
         (steps_since_commit_ >= kCommitSteps && age >= kCommitNanosMin);
}

absl::Status LiveRun::Commit() {
  // The database must never be ahead of the log.
  BW_RETURN_IF_ERROR(parts_.wal->LogOf(record_.id)->Sync(last_lsn_));
  BW_ASSIGN_OR_RETURN(Save save, BeginSave());
  return EndSave(std::move(save), absl::OkStatus());
}

absl::StatusOr<LiveRun::Save> LiveRun::BeginSave() {
  Save save;
  save.batch = parts_.database->NewBatch();
  std::string series_state;
  OpenSeries();
  BW_RETURN_IF_ERROR(record_.ended ? parts_.series->Close(record_.id, save.batch.get())
                                   : parts_.series->Save(record_.id, save.batch.get(), &series_state));
  const Lsn open = merge_.oldest_open_lsn();
  save.last_lsn = last_lsn_;
  save.applied_lsn = open != 0 ? std::min(open - 1, last_lsn_) : last_lsn_;
  save.events = new_events_.size();
  save.steps = steps_since_commit_;
  for (const RunEvent& event : new_events_) save.batch->PutEvent(record_.id, event);
  for (const auto& [number, rank] : ranks_) save.batch->PutRank(record_.id, rank);
  // Until it is there the log is needed from where it was.
  const Lsn applied_before = std::exchange(record_.applied_lsn, save.applied_lsn);
  save.batch->PutRun(record_);
  save.batch->PutState(record_, SaveState(series_state));
  record_.applied_lsn = applied_before;
  saving_ = true;
  closing_ = record_.ended;
  return save;
}

absl::Status LiveRun::ShareSave(const LiveRunParts& parts, RunId run, Save* save) {
  BW_RETURN_IF_ERROR(parts.wal->LogOf(run)->health());              // It may have gone silent while others were saved.
  BW_RETURN_IF_ERROR(parts.wal->LogOf(run)->Sync(save->last_lsn));  // As in Commit().
  return parts.database->ShareBatch(save->batch.get());
}

absl::Status LiveRun::EndSave(Save save, absl::Status shared) {
  saving_ = false;
  BW_RETURN_IF_ERROR(shared);
  BW_RETURN_IF_ERROR(parts_.database->Commit(std::move(save.batch)));
  series_closed_ = closing_;
  record_.applied_lsn = save.applied_lsn;
  saved_lsn_ = save.last_lsn;
  events_stored_ += save.events;
  new_events_.erase(new_events_.begin(), new_events_.begin() + static_cast<std::ptrdiff_t>(save.events));
  shown_events_ = nullptr;
  changed_ = true;  // Which events are new.
  steps_since_commit_ -= save.steps;
  committed_ns_ = parts_.clock->MonotonicNanos();
  dirty_ = last_lsn_ != save.last_lsn;
  return absl::OkStatus();
}

std::string LiveRun::SaveState(const std::string& series_state) const {
  std::string state;
  ByteWriter out(&state);
  // Where nothing was stripped servers of before read it: those of a cluster are replaced one after the other.
  const bool stripped =
      std::any_of(told_.begin(), told_.end(), [](const auto& rank) { return rank.second.stripped > 0; });
  out.Put(stripped ? kStateVersion : uint32_t{4});
  out.Put(last_lsn_);
  out.Put(merge_.closed_attempt());
  out.Put(merge_.closed_step());
  out.PutVarint(totals_.size());
  for (const auto& [id, totals] : totals_) {
    out.Put(static_cast<uint16_t>(id));
    out.PutVarint(totals.size());
    for (const double total : totals) out.Put(total);
  }
  out.PutVarint(merge_.gone().size());
  for (const uint32_t rank : merge_.gone()) out.PutVarint(rank);
  out.PutVarint(merge_.ranks().heard.size());
  for (const auto& [rank, newest] : merge_.ranks().heard) {
    out.PutVarint(rank);
    out.PutVarint(newest.first);
    out.PutSigned(newest.second);
  }
  out.PutVarint(told_.size());
  for (const auto& [rank, losses] : told_) {
    out.PutVarint(rank);
    out.PutVarint(losses.dropped);
    if (stripped) out.PutVarint(losses.stripped);
  }
  out.PutString(judge_.Save());
  out.PutString(series_state);
  out.PutString(rules_->text);
  out.PutString(engine_->policy()->text);
  out.Put(policy_is_own_);
  out.PutString(engine_->Save());
  return state;
}

absl::StatusOr<Lsn> LiveRun::SavedLsn(std::string_view state) {
  ByteReader in(state);
  const uint32_t version = in.Get<uint32_t>();
  const Lsn saved = in.Get<Lsn>();
  if (!in.ok() || version < 1 || version > kStateVersion) {
    return absl::DataLossError("its saved state cannot be read");
  }
  return saved;
}

bool LiveRun::RestoreState(const std::string& state, std::string* series_state) {
  ByteReader in(state);
  const uint32_t version = in.Get<uint32_t>();
  if (version < 1 || version > kStateVersion) return false;
  saved_lsn_ = in.Get<Lsn>();
  const uint32_t attempt = in.Get<uint32_t>();
  const int64_t step = in.Get<int64_t>();
  for (size_t left = in.GetCount(3); left > 0; --left) {
    std::vector<double>& totals = totals_[static_cast<SignalId>(in.Get<uint16_t>())];
    totals.resize(in.GetCount(sizeof(double)));
    for (double& total : totals) total = in.Get<double>();
  }
  RankMerge::Ranks merging{.attempt = record_.description.attempt, .heard = {}, .gone = {}};
  for (size_t left = in.GetCount(1); left > 0; --left) merging.gone.insert(static_cast<uint32_t>(in.GetVarint()));
  if (version >= 4) {
    for (size_t left = in.GetCount(3); left > 0; --left) {
      RankMerge::Key& newest = merging.heard[static_cast<uint32_t>(in.GetVarint())];
      newest.first = static_cast<uint32_t>(in.GetVarint());
      newest.second = in.GetSigned();
    }
  } else {
    for (const auto& [rank, record] : ranks_) {
      if (!merging.gone.contains(rank)) merging.heard[rank] = RankMerge::kHelloOnly;
    }
  }
  for (size_t left = in.GetCount(2); left > 0; --left) {
    Losses& told = told_[static_cast<uint32_t>(in.GetVarint())];
    told.dropped = in.GetVarint();
    if (version >= 5) told.stripped = in.GetVarint();
  }
  const std::string_view judge = in.GetString();
  *series_state = std::string(in.GetString());
  const std::string_view rules = version >= 2 ? in.GetString() : std::string_view();
  const std::string_view policy = version >= 3 ? in.GetString() : std::string_view();
  policy_is_own_ = version >= 3 && in.Get<bool>();
  const std::string_view actions = version >= 3 ? in.GetString() : std::string_view();
  if (!in.done()) return false;
  if (version >= 3) RestoreActions(policy, actions);
  merge_.Restore(attempt, step, std::move(merging));
  const auto found = parts_.rules->Find(rules);
  if (found.ok()) {
    rules_ = *found;
    std::vector<AlertTransition> none;  // Nothing fires in a fresh judge.
    judge_.SetOptions(rules_->options, &none);
    return judge_.Restore(judge);
  }
  // Of a version that took what this one does not: better judged by what is
  // built in than not served.
  LogError("run {} goes on by the built-in rules: {}", record_.description.name, std::string(found.status().message()));
  if (!judge_.Restore(judge)) LogError("run {}: its judge begins afresh", record_.description.name);
  return true;
}

bool LiveRun::StepOverdue(int64_t now_ns, int64_t deadline_ns, StepClosedMessage* overdue) {
  uint32_t attempt = 0;
  int64_t step = 0;
  if (!merge_.OldestOpen(&attempt, &step)) {
    open_step_ = {0, -1};
    return false;
  }
  if (open_step_ != std::make_pair(attempt, step)) {
    open_step_ = {attempt, step};
    open_since_ns_ = now_ns;
    return false;
  }
  if (now_ns - open_since_ns_ < deadline_ns) return false;
  open_since_ns_ = now_ns;  // Said once; the record is on its way.
  *overdue = {attempt, step};
  return true;
}

bool LiveRun::SilentTooLong(int64_t now_ns, int64_t silent_ns_max, RunSilentMessage* silent) {
  if (record_.ended || now_ns - here_ns_ < std::min(silent_ns_max, kComeBackNanos)) return false;
  if (parts_.clock->UnixNanos() - record_.last_report_unix_ns < silent_ns_max) return false;
  *silent = {record_.last_report_unix_ns / 1'000'000};
  return true;
}

bool LiveRun::SilenceChanged(int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence) {
  if (record_.ended || heard_ns_.empty()) return false;
  const float interval = last_sample_.signals().empty() ? 0 : last_sample_.scalar(SignalId::kStepSeconds);
  const double usual_ns = std::isfinite(interval) ? interval * 1e9 : 0;
  const int64_t deadline_ns = std::max(silence_ns_min, static_cast<int64_t>(kSilentIntervals * usual_ns));
  std::vector<int64_t> silent_ns;
  for (const auto& [rank, heard] : heard_ns_) {
    if (now_ns - heard >= deadline_ns) silent_ns.push_back(now_ns - heard);
  }
  // A job that went on with fewer ranks misses none while as many as it has now speak or
  // have left; where some do not, those are missed that were heard of last.
  const size_t accounted = heard_ns_.size() - silent_ns.size() + merge_.gone().size();
  const size_t missed_max = record_.description.reporters - std::min<size_t>(record_.description.reporters, accounted);
  std::sort(silent_ns.begin(), silent_ns.end());
  if (silent_ns.size() > missed_max) silent_ns.resize(missed_max);
  const auto silent = static_cast<uint32_t>(silent_ns.size());
  const int64_t longest_ns = silent_ns.empty() ? 0 : silent_ns.back();
  if (silent == silent_ranks_) return false;
  silent_ranks_ = silent;
  changed_ = true;
  *silence = {silent, longest_ns / 1'000'000'000};
  return true;
}

}  // namespace bellwether::server
