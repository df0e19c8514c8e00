#include "server/engine/run_state.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/rule_families.h"
#include "server/util/byte_io.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// 1 had no rules, 2 no actions, 3 not what ranks the merge had heard, 4 no stripped frames.
// 5 no names of rows.
constexpr uint32_t kStateVersion = 6;

// Of signals that are not known: told of a run, and named in one event.
constexpr size_t kUnknownToldMax = 256;
constexpr size_t kUnknownSaidMax = 4;

bool HasHeadSignals(const StepSample& sample) {
  return std::any_of(sample.signals().begin(), sample.signals().end(),
                     [](SignalId id) { return OfHeads(FindSignal(id)->granularity); });
}

// Adds what a client's total rose by since `before`; a sum of very many stays the largest number.
void AddRise(uint64_t before, uint64_t now, uint64_t* sum) {
  if (now > before) *sum += std::min(now - before, std::numeric_limits<uint64_t>::max() - *sum);
}

}  // namespace

std::shared_ptr<const StepSample> ReadNewestLoss(const RunRecord& record, const SeriesStore& series) {
  int64_t step = -1;
  const auto loss = series.ReadMatrix(record.id, record.description.layout, SignalId::kLoss, -1, &step);
  if (!loss.ok() || loss->empty() || step < 0) return nullptr;
  auto newest = std::make_shared<StepSample>();
  newest->Reset(record.description.layout);
  newest->step = step;
  newest->Add(SignalId::kLoss)[0] = loss->front();
  return newest;
}

RunState::RunState(const LiveRunParts* parts, const RunRecord& record)
    : parts_(*parts),
      sink_([this](const StepSample& sample) { OnStep(sample); }),
      late_(parts->counters->counter("bellwether_ingest_frames_total", {{"result", "late"}})),
      repeated_(parts->counters->counter("bellwether_ingest_frames_total", {{"result", "repeated"}})),
      closed_by_deadline_(parts->counters->counter("bellwether_steps_closed_by_deadline_total")),
      ended_silent_(parts->counters->counter("bellwether_runs_ended_silent_total")),
      events_refused_(parts->counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "events_per_run"}})),
      disagreements_left_out_(parts->counters->counter("bellwether_disagreements_left_out_total")),
      names_refused_(parts->counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "named_rows"}})),
      values_without_row_(parts->counters->counter("bellwether_ingest_values_without_row_total")),
      values_unknown_(parts->counters->counter("bellwether_ingest_values_unknown_total")),
      rule_rows_left_out_(parts->counters->counter("bellwether_rule_rows_left_out_total")),
      record_(record),
      merge_(record.description.layout, record.description.reporters),
      rules_(parts->rules->built_in()),
      judge_(rules_->options, record.description, parts->bank),
      engine_(std::make_unique<ActionEngine>(record.description, DefaultPolicy())),
      grams_(GramAssembler::Options()) {
  if (!record_.coverage.missed.empty() || record_.signals.empty()) return;
  // The record is of a version that kept no coverage.
  record_.coverage =
      RunCoverage::Of(record_.signals, record_.description.layout.layers, record_.description.attempt, record_.step);
}

absl::StatusOr<bool> RunState::Load() {
  BW_ASSIGN_OR_RETURN(const bool restored, LoadStored());
  // A run that is loaded because of a request shows what it showed before.
  if (const auto newest = ReadNewestLoss(record_, *parts_.series)) newest_ = *newest;
  return restored;
}

absl::StatusOr<bool> RunState::LoadStored() {
  BW_ASSIGN_OR_RETURN(const std::vector<RankRecord> ranks, parts_.database->ListRanks(record_.id));
  for (const RankRecord& rank : ranks) ranks_[rank.rank] = rank;
  last_lsn_ = saved_lsn_ = record_.applied_lsn;
  BW_ASSIGN_OR_RETURN(RunRows rows, parts_.database->GetRows(record_.id));
  rows_ = rows_saved_ = std::make_shared<const RunRows>(std::move(rows));
  judge_.SetRows(rows_);
  BW_ASSIGN_OR_RETURN(events_stored_, parts_.database->CountEvents(record_.id));
  const auto state = parts_.database->GetState(record_.id);
  if (!state.ok()) {
    if (!absl::IsNotFound(state.status())) return state.status();
    parts_.series->Open(record_.id, record_.description.layout);
    return false;
  }
  std::string series_state;
  if (!RestoreState(*state, &series_state)) {
    return absl::DataLossError("run " + record_.description.name + ": its saved state cannot be read");
  }
  if (record_.ended) {  // The save closed its series.
    parts_.series->Open(record_.id, record_.description.layout);
  } else {
    BW_RETURN_IF_ERROR(parts_.series->Restore(record_.id, record_.description.layout, series_state));
  }
  return true;
}

RunEffects RunState::Apply(const LoggedMessage& logged, bool is_live) {
  const bool saved = logged.lsn <= saved_lsn_;
  last_lsn_ = std::max(last_lsn_, logged.lsn);
  is_live_ = is_live;
  merge_.SetReplay(saved);
  now_ = {logged.time_unix_ms * 1'000'000, record_.step};
  if (logged.epoch > 0) {
    RankRecord& rank = ranks_[logged.rank];
    rank.rank = logged.rank;
    rank.epoch = std::max(rank.epoch, logged.epoch);
    rank.durable_seq = std::max(rank.durable_seq, logged.message.seq);
    if (!saved) record_.last_report_unix_ns = logged.time_unix_ms * 1'000'000;
  }
  if (!saved && record_.ended) engine_->SetEnded(true, now_, &effects_.actions);
  const auto& body = logged.message.body;
  if (const auto* frame = std::get_if<RankFrame>(&body)) {
    ApplyFrame(logged.rank, *frame, logged.lsn);
  } else if (const auto* gram = std::get_if<ShippedGram>(&body)) {
    ApplyGram(*gram, logged.lsn);
  } else if (const auto* spectra = std::get_if<SpectraMessage>(&body)) {
    ApplySpectra(*spectra);
  } else if (saved) {
    return {};  // The saved state has everything but what belongs to open steps.
  } else if (const auto* hello = std::get_if<HelloMessage>(&body)) {
    ApplyHello(*hello);
  } else if (const auto* names = std::get_if<NamesMessage>(&body)) {
    ApplyNames(logged.rank, *names);
  } else if (const auto* event = std::get_if<RunEvent>(&body)) {
    ApplyEvent(*event);
  } else if (const auto* bye = std::get_if<ByeMessage>(&body)) {
    ApplyBye(logged.rank, *bye);
  } else if (const auto* closed = std::get_if<StepClosedMessage>(&body)) {
    closed_by_deadline_->Add();
    merge_.CloseThrough(closed->attempt, closed->step, sink_);
    ReleaseByes(false);
  } else if (const auto* silence = std::get_if<SilenceMessage>(&body)) {
    judge_.OnSilence(silence->silent_ranks, silence->seconds, &effects_.transitions);
  } else if (const auto* silent = std::get_if<RunSilentMessage>(&body)) {
    EndBySilence(*silent);
  } else if (const auto* rules = std::get_if<RulesMessage>(&body)) {
    ApplyRules(*rules);
  } else if (const auto* result = std::get_if<ActionResultMessage>(&body)) {
    ApplyActionResult(logged.rank, *result);
  } else if (const auto* request = std::get_if<ActionRequestMessage>(&body)) {
    ApplyActionRequest(*request);
  } else if (const auto* policy = std::get_if<PolicyMessage>(&body)) {
    ApplyPolicy(*policy);
  } else if (const auto* sent = std::get_if<ActionSentMessage>(&body)) {
    engine_->OnSent(sent->id, now_, &effects_.actions);
  } else if (const auto* judged = std::get_if<FalseAlarmMessage>(&body)) {
    engine_->OnFalseAlarm(judged->said, now_, &effects_.actions);
  } else if (const auto* renamed = std::get_if<RenameMessage>(&body)) {
    record_.renamed = record_.description.name = renamed->name;
  }
  NotifyEngine();
  if (record_.ended) engine_->SetEnded(true, now_, &effects_.actions);
  if (!effects_.transitions.empty()) record_.stage = judge_.stage();
  transitions_notified_ = 0;
  return std::exchange(effects_, {});
}

void RunState::ApplyEvent(const RunEvent& event) {
  // It stands for a message that was left out, of which another event tells.
  if (event.kind == EventKind::kAnnotation && event.text.empty() && event.value == 0) return;
  KeepEvent(event);
  record_.kind_changed = record_.kind_changed || ChangesKind(event.kind);
  judge_.OnEvent(event, &effects_.transitions);
  engine_->OnEvent(event, now_, &effects_.actions);
}

// The last event that is kept says that others are not.
void RunState::KeepEvent(const RunEvent& event) {
  const uint64_t kept = events_stored_ + new_events_.size();
  if (kept + 1 >= parts_.events_max) events_refused_->Add();
  if (kept >= parts_.events_max) return;
  new_events_.push_back(event);
  if (kept + 1 < parts_.events_max) return;
  RunEvent& note = new_events_.back();
  note.kind = EventKind::kAnnotation;
  note.value = 0;
  note.text = absl::StrCat(parts_.events_max, " events of a run are kept (limits.events_per_run_max): from here on ",
                           "they are judged, and not kept");
}

void RunState::ApplyHello(const HelloMessage& hello) {
  const uint64_t attempt = record_.description.attempt;
  if (hello.run.attempt < attempt) return;  // It is a straggler of an older attempt.
  ReleaseByes(true);                        // A goodbye is before the Hello that follows it.
  // The first Hello of a new run changes nothing: the run was made with it.
  record_.kind_changed = record_.kind_changed || KindOf(hello.run) != KindOf(record_.description);
  const int64_t known_launch = hello.run.attempt == attempt ? record_.description.launch_unix_ms : 0;
  const Layout layout = record_.description.layout;
  record_.description = hello.run;
  record_.description.layout = layout;
  if (!record_.renamed.empty()) record_.description.name = record_.renamed;
  Grow(hello.run.layout);
  // A rank that does not know the launch leaves it as it is.
  if (hello.run.launch_unix_ms == 0) record_.description.launch_unix_ms = known_launch;
  record_.import_of = hello.import_of;
  record_.import_notifies = hello.import_notifies;
  Reopen();
  merge_.Join(hello.rank, hello.run.attempt, hello.run.reporters);
  judge_.OnHello(hello.run, &effects_.transitions);
  effects_.joined = hello.rank;
  engine_->OnHello(hello.run,
                   {.rank = hello.rank,
                    .attempt = hello.run.attempt,
                    .kinds_mask = hello.kinds_mask,
                    .ranks_agree = hello.ranks_agree},
                   now_, &effects_.actions);
}

void RunState::Grow(const Layout& layout) {
  record_.description.layout.GrowTo(layout);
  merge_.Grow(record_.description.layout);
}

void RunState::ApplyNames(uint32_t rank, const NamesMessage& names) {
  auto rows = std::make_shared<RunRows>(*rows_);
  names_refused_->Add(static_cast<double>(row_maps_.Add(rank, names, rows.get())));
  if (rows->tensors.size() == rows_->tensors.size() && rows->modules.size() == rows_->modules.size()) return;
  Grow({.tensors = rows->tensors.size(), .modules = rows->modules.size()});
  rows_ = std::move(rows);
  judge_.SetRows(rows_);
}

void RunState::ApplyFrame(uint32_t rank, const RankFrame& frame, Lsn lsn) {
  RankMerge::Outcome outcome;
  std::vector<OwnRefusal> refused;
  if (!frame.own.empty()) {
    std::optional<RunRows> grown;
    uint64_t left_out = 0;
    const RankFrame known = own_rows_.Translate(row_maps_.Translate(rank, frame, record_.description.layout, &left_out),
                                                *rows_, &grown, &refused);
    if (grown.has_value()) {
      Grow({.own = grown->own.size()});
      rows_ = std::make_shared<const RunRows>(*std::move(grown));
      judge_.SetRows(rows_);
    }
    outcome = merge_.Add(rank, known, lsn, sink_);
    if (outcome == RankMerge::Outcome::kTaken && lsn > saved_lsn_) {
      values_without_row_->Add(static_cast<double>(left_out));
    }
  } else if (RowMaps::IsPlain(frame)) {
    outcome = merge_.Add(rank, frame, lsn, sink_);
  } else {
    uint64_t left_out = 0;
    const RankFrame known = row_maps_.Translate(rank, frame, record_.description.layout, &left_out);
    outcome = merge_.Add(rank, known, lsn, sink_);
    if (outcome == RankMerge::Outcome::kTaken && lsn > saved_lsn_) {
      values_without_row_->Add(static_cast<double>(left_out));
    }
  }
  if (lsn <= saved_lsn_) return;  // The frame is of an open step, and was counted before the save.
  if (!frame.unknown_signals.empty()) NoteUnknown(frame);
  if (!refused.empty()) NoteRefused(frame, refused);
  Losses& counted = counted_[rank];
  AddRise(counted.dropped, frame.dropped_total, &record_.frames_dropped);
  AddRise(counted.stripped, frame.stripped_total, &record_.frames_stripped);
  // A new client process counts afresh, so the total may be lower.
  counted = {frame.dropped_total, frame.stripped_total};
  switch (outcome) {
    case RankMerge::Outcome::kTaken:
      Reopen();
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

void RunState::NoteUnknown(const RankFrame& frame) {
  values_unknown_->Add(static_cast<double>(frame.unknown_values));
  std::vector<int32_t> fresh;
  for (const int32_t signal : frame.unknown_signals) {
    if (unknown_told_.size() < kUnknownToldMax && unknown_told_.insert(signal).second) fresh.push_back(signal);
  }
  if (fresh.empty()) return;
  const size_t said = std::min(fresh.size(), kUnknownSaidMax);
  std::string text =
      absl::StrCat("this server does not know signals that a newer client sends (",
                   absl::StrJoin(fresh.begin(), fresh.begin() + static_cast<ptrdiff_t>(said), ", "),
                   said < fresh.size() ? absl::StrCat(" and ", fresh.size() - said, " more") : "",
                   " of signals.proto): their values are left out, and all others are kept. A newer server keeps them");
  LogWarning("run {}: {}", record_.description.name, text);
  KeepEvent({frame.attempt, frame.step, EventKind::kAnnotation, 0, std::move(text), frame.time_unix_ns});
}

void RunState::NoteRefused(const RankFrame& frame, const std::vector<OwnRefusal>& refused) {
  for (const OwnRefusal& each : refused) {
    parts_.counters->counter("bellwether_ingest_own_values_refused_total", {{"cause", NameOf(each.cause)}})
        ->Add(static_cast<double>(each.values));
    if (refused_told_.size() >= kUnknownToldMax) continue;
    if (!refused_told_.insert(absl::StrCat(NameOf(each.cause), " ", each.name)).second) continue;
    std::string text = absl::StrCat("own signal ", each.name, ": ", each.why, ". Such values are left out");
    LogWarning("run {}: {}", record_.description.name, text);
    KeepEvent({frame.attempt, frame.step, EventKind::kAnnotation, 0, std::move(text), frame.time_unix_ns});
  }
}

void RunState::Reopen() {
  engine_->SetEnded(false, now_, &effects_.actions);
  record_.ended = false;
  record_.end_reason.clear();
}

void RunState::LeaveRank(uint32_t rank, const ByeMessage& bye) {
  merge_.SetGone(rank, sink_);
  effects_.left.push_back(rank);
  if (merge_.gone().size() < record_.description.reporters) return;
  record_.ended = true;
  record_.end_reason = bye.reason == ByeMessage::Reason::kFinished   ? "finished"
                       : bye.reason == ByeMessage::Reason::kDied     ? "died"
                       : bye.reason == ByeMessage::Reason::kDetached ? "detached"
                                                                     : "ended";
}

void RunState::EndBySilence(const RunSilentMessage& silent) {
  // A message came just before this one.
  if (record_.last_report_unix_ns / 1'000'000 != silent.last_report_unix_ms) return;
  ReleaseByes(true);
  merge_.CloseThrough(std::numeric_limits<uint32_t>::max(), std::numeric_limits<int64_t>::max(), sink_);
  effects_.ended_by_silence = true;
  if (record_.ended) return;  // A goodbye that waited ended it.
  ended_silent_->Add();
  record_.ended = true;
  record_.end_reason = kEndedSilent;
}

void RunState::ApplyRules(const RulesMessage& rules) {
  if (*rules.text == rules_->text) return;
  const auto found = parts_.rules->Find(*rules.text);
  if (!found.ok()) {
    LogError("run {} goes on by the rules that it had: {}", record_.description.name,
             std::string(found.status().message()));
    return;
  }
  rules_ = *found;
  judge_.SetOptions(rules_->options, &effects_.transitions);
  engine_->OnRules(now_);
}

bool RunState::RulesDiffer(const RuleSetPtr& current) {
  if (record_.ended || current == rules_) return false;
  if (current->text != rules_->text) return true;
  rules_ = current;  // The same text was read again.
  return false;
}

void RunState::OpenSeries() {
  if (!std::exchange(series_closed_, false)) return;
  parts_.series->Open(record_.id, record_.description.layout);
}

void RunState::OnStep(const StepSample& sample) {
  OpenSeries();
  if (const absl::Status status = parts_.series->Append(record_.id, sample); !status.ok()) {
    LogError("run {}: step {} could not be stored: {}", record_.description.name, sample.step,
             std::string(status.message()));
  }
  judge_.Observe(sample, &effects_.transitions);
  const uint64_t left_out = judge_.rule_rows_left_out();
  if (left_out > rule_rows_counted_) rule_rows_left_out_->Add(static_cast<double>(left_out - rule_rows_counted_));
  rule_rows_counted_ = left_out;
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
  engine_->OnStep(sample, now_, &effects_.actions);
  ++record_.steps_recorded;
  ++unsaved_steps_;
  for (const SignalId id : sample.signals()) unsaved_values_ += sample.matrix(id).size();
  CountGram("incomplete", static_cast<double>(grams_.Close(sample.attempt, sample.step)));
  newest_ = sample;
  if (row_values_.Take(sample)) ++row_values_version_;
  if (HasHeadSignals(sample)) {
    heads_ = sample;
    ++heads_version_;
  }
}

void RunState::AddTotals(const StepSample& sample) {
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

absl::Status RunState::Write(RunSave* save) {
  RunBatch* const batch = save->batch.get();
  std::string series_state;
  OpenSeries();
  BW_RETURN_IF_ERROR(record_.ended ? parts_.series->Close(record_.id, batch)
                                   : parts_.series->Save(record_.id, batch, &series_state));
  const Lsn open = merge_.oldest_open_lsn();
  save->last_lsn = last_lsn_;
  save->applied_lsn = open != 0 ? std::min(open - 1, last_lsn_) : last_lsn_;
  save->events = new_events_.size();
  save->steps = unsaved_steps_;
  save->values = unsaved_values_;
  for (const RunEvent& event : new_events_) batch->PutEvent(record_.id, event);
  for (const auto& [number, rank] : ranks_) batch->PutRank(record_.id, rank);
  // Until the save is committed the log is needed from where it was.
  const Lsn applied_before = std::exchange(record_.applied_lsn, save->applied_lsn);
  if (rows_ != rows_saved_) {
    save->rows = rows_;
    batch->PutRows(record_.id, *rows_);
  }
  batch->PutRun(record_);
  batch->PutState(record_, SaveState(series_state));
  record_.applied_lsn = applied_before;
  return absl::OkStatus();
}

void RunState::RecordSaved(const RunSave& save, bool closed) {
  series_closed_ = closed;
  record_.applied_lsn = save.applied_lsn;
  saved_lsn_ = save.last_lsn;
  if (save.rows != nullptr) rows_saved_ = save.rows;
  events_stored_ += save.events;
  new_events_.erase(new_events_.begin(), new_events_.begin() + static_cast<std::ptrdiff_t>(save.events));
  unsaved_steps_ -= save.steps;
  unsaved_values_ -= save.values;
}

std::string RunState::SaveState(const std::string& series_state) const {
  std::string state;
  ByteWriter out(&state);
  // Versions 4 and 5 can be read by older servers, which a cluster replaces one after the other.
  const bool stripped =
      std::any_of(counted_.begin(), counted_.end(), [](const auto& rank) { return rank.second.stripped > 0; });
  const bool named = !row_maps_.empty();
  out.Put(named ? kStateVersion : stripped ? uint32_t{5} : uint32_t{4});
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
  out.PutVarint(counted_.size());
  for (const auto& [rank, losses] : counted_) {
    out.PutVarint(rank);
    out.PutVarint(losses.dropped);
    if (stripped || named) out.PutVarint(losses.stripped);
  }
  out.PutString(judge_.Save());
  out.PutString(series_state);
  out.PutString(rules_->text);
  out.PutString(engine_->policy()->text);
  out.Put(policy_is_own_);
  out.PutString(engine_->Save());
  if (named) row_maps_.Save(&out);
  return state;
}

absl::StatusOr<Lsn> RunState::SavedLsn(std::string_view state) {
  ByteReader in(state);
  const uint32_t version = in.Get<uint32_t>();
  const Lsn saved = in.Get<Lsn>();
  if (!in.ok() || version < 1 || version > kStateVersion) {
    return absl::DataLossError("its saved state cannot be read");
  }
  return saved;
}

bool RunState::RestoreState(const std::string& state, std::string* series_state) {
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
    Losses& counted = counted_[static_cast<uint32_t>(in.GetVarint())];
    counted.dropped = in.GetVarint();
    if (version >= 5) counted.stripped = in.GetVarint();
  }
  const std::string_view judge = in.GetString();
  *series_state = std::string(in.GetString());
  const std::string_view rules = version >= 2 ? in.GetString() : std::string_view();
  const std::string_view policy = version >= 3 ? in.GetString() : std::string_view();
  policy_is_own_ = version >= 3 && in.Get<bool>();
  const std::string_view actions = version >= 3 ? in.GetString() : std::string_view();
  if (version >= 6 && !row_maps_.Restore(&in)) return false;
  if (!in.done()) return false;
  if (version >= 3) RestoreActions(policy, actions);
  merge_.Restore(attempt, step, std::move(merging));
  const auto found = parts_.rules->Find(rules);
  if (found.ok()) {
    rules_ = *found;
    std::vector<AlertTransition> none;  // No alert fires in a new judge.
    judge_.SetOptions(rules_->options, &none);
    return judge_.Restore(judge);
  }
  // Another version accepted rules that this one refuses.  The run is judged by the
  // built-in rules, so that it can be served.
  LogError("run {} goes on by the built-in rules: {}", record_.description.name, std::string(found.status().message()));
  if (!judge_.Restore(judge)) LogError("run {}: its judge begins afresh", record_.description.name);
  return true;
}

}  // namespace bellwether::server
