// ListAlerts, GetAlert, AcknowledgeAlert, SilenceAlert, MarkFalseAlarm.
#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/act/proposals.h"
#include "server/model/alert_words.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/query/sibling_view.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What waits for the alert, and the advice, as of now.
void AddActions(AlertTransition last, const std::vector<Action>& actions, const RunSnapshotPtr& run, v1::Alert* shown) {
  if (run != nullptr && run->record.ended) {
    HideEndedProposals(last.run_name, actions, &last.advice);  // What was on trial stays so.
  } else {
    last.advice = AdviceNow(actions, last);
  }
  shown->mutable_last()->set_advice(last.advice);
  shown->mutable_last()->set_do_first(DoText(last, /*link=*/""));
  for (const Action& action : actions) {
    const bool is_its = action.alert_key == last.key || action.alert_key.empty();
    if (is_its && action.state == ActionState::kProposed && run != nullptr)
      *shown->add_proposed() = ToProto(action, run->record.description.uuid);
  }
}

}  // namespace

absl::Status QueryEngine::CheckRanges(const v1::ListAlertsRequest& request) const {
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.alerts_max));
  return Range("severity_min", request.severity_min(), 0, static_cast<int64_t>(Severity::kCritical));
}

absl::StatusOr<v1::ListAlertsResponse> QueryEngine::ListAlerts(const v1::ListAlertsRequest& request,
                                                               const CallContext& context) const {
  BW_RETURN_IF_ERROR(CheckRanges(request));
  const size_t limit = request.limit() == 0 ? 100 : request.limit();
  RunId run = 0;
  if (!request.run().empty()) {
    BW_ASSIGN_OR_RETURN(const RunSnapshotPtr found, FindRun(request.run()));
    run = found->record.id;
  }
  v1::ListAlertsResponse response;
  std::map<RunId, std::vector<Action>> actions;
  for (const AlertView& alert : stores_.alerts->List(run, request.firing_only())) {
    if (static_cast<int>(alert.last.severity) < request.severity_min()) continue;
    const RunSnapshotPtr named = stores_.runs->Get(alert.last.run);  // It may have been renamed since.
    if (!context.Sees(named == nullptr ? alert.last.run_name : named->record.description.name)) continue;
    // Another server makes a list of everybody's own.
    if (context.grant != nullptr && context.grant->passed_on() && named == nullptr) continue;
    if (static_cast<size_t>(response.alerts_size()) == limit) break;
    *response.add_alerts() = ToProto(alert, *stores_.runs);
    v1::Alert* const shown = response.mutable_alerts(response.alerts_size() - 1);
    HideSiblings(stores_, context.grant.get(), alert.last.run, shown);
    BW_RETURN_IF_ERROR(ShowActions(alert, context, &actions, shown));
  }
  return response;
}

absl::Status QueryEngine::ShowActions(const AlertView& alert, const CallContext& context,
                                      std::map<RunId, std::vector<Action>>* known, v1::Alert* shown) const {
  const bool is_open = alert.last.state == AlertState::kFiring && !alert.muted;
  if (!is_open && !SpeaksOfProposals(alert.last.advice)) return absl::OkStatus();
  const auto [of_run, is_new] = known->try_emplace(alert.last.run);
  if (is_new) {
    BW_RETURN_IF_ERROR(Check(context));
    if (auto read = stores_.actions->List(alert.last.run); read.ok()) of_run->second = *std::move(read);
  }
  AddActions(alert.last, of_run->second, stores_.runs->Get(alert.last.run), shown);
  return absl::OkStatus();
}

absl::StatusOr<v1::GetAlertResponse> QueryEngine::GetAlert(const v1::GetAlertRequest& request,
                                                           const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_ASSIGN_OR_RETURN(const AlertView alert, stores_.alerts->Get(run->record.id, request.key()));
  v1::GetAlertResponse response;
  *response.mutable_alert() = ToProto(alert, *stores_.runs);

  // Transitions are read in pages; only this alert's newest stay.
  auto* const history = response.mutable_alert()->mutable_history();
  uint64_t after = 0;
  while (after < alert.last.id) {
    BW_RETURN_IF_ERROR(Check(context));
    // Of all runs: a read for one goes through those of all others, whatever the deadline.
    BW_ASSIGN_OR_RETURN(const std::vector<AlertTransition> page, stores_.alerts->Read(after, 256, /*run=*/0));
    if (page.empty()) break;
    after = page.back().id;
    for (const AlertTransition& transition : page) {
      if (transition.run != run->record.id || transition.key != request.key()) continue;
      if (history->size() == static_cast<int>(options_.history_max)) history->DeleteSubrange(0, 1);
      *history->Add() = ToProto(transition, *stores_.runs);
    }
  }

  for (const FalseAlarm& said : stores_.alerts->FalseAlarmsOf(alert)) {
    *response.mutable_alert()->add_false_alarm_history() = ToProto(said);
  }
  HideSiblings(stores_, context.grant.get(), run->record.id, response.mutable_alert());

  BW_ASSIGN_OR_RETURN(const std::vector<Action> actions, stores_.actions->List(run->record.id));
  AddActions(alert.last, actions, run, response.mutable_alert());
  for (const Action& action : actions) {
    if (action.alert_key == request.key()) *response.add_actions() = ToProto(action, run->record.description.uuid);
  }

  const Layout& layout = run->record.description.layout;
  const int64_t first_step = alert.last.first_step;
  const int64_t begin = std::max<int64_t>(0, first_step - options_.alert_window_steps);
  const int64_t end = std::max(first_step, alert.last.step) + options_.alert_window_steps / 2;
  std::set<std::tuple<SignalId, int32_t, int32_t>> seen;
  BW_RETURN_IF_ERROR(
      context.Reserve(ReadBytes(*run, *FindSignal(SignalId::kDriftRatio), end - begin, options_.points_default)));
  for (const Evidence& evidence : alert.last.evidence) {
    if (seen.size() == options_.alert_series_max) break;
    const SignalInfo* const signal = FindSignal(std::string_view(evidence.signal));
    if (signal == nullptr) continue;
    const MatrixShape shape = ShapeOf(*signal, layout);
    SeriesKey key{signal->id, evidence.where.layer, evidence.where.head};
    if (signal->granularity == Granularity::kRun) key.layer = key.head = 0;
    // Evidence on a whole layer or run has no single series.
    if (key.layer < 0 || key.layer >= shape.layers || key.head < 0 || key.head >= shape.heads) continue;
    if (!seen.insert({key.signal, key.layer, key.head}).second) continue;
    BW_RETURN_IF_ERROR(Check(context));
    BW_ASSIGN_OR_RETURN(*response.add_window(),
                        ReadSeries(*run, key, begin, end, options_.points_default, SeriesStore::kNewestAttempt));
  }
  return response;
}

absl::StatusOr<v1::Alert> QueryEngine::PutNote(const std::string& run, const std::string& key,
                                               const CallContext& context,
                                               const std::function<absl::Status(AlertView*)>& change) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr found, FindRun(run));
  const RunId id = found->record.id;
  {
    absl::MutexLock lock(&notes_mutex_);
    BW_ASSIGN_OR_RETURN(AlertView alert, stores_.alerts->Get(id, key));
    const size_t said = alert.note.false_alarms.size();
    BW_RETURN_IF_ERROR(change(&alert));
    BW_RETURN_IF_ERROR(alert.note.false_alarms.size() == said ? stores_.control->NoteAlert(id, key, alert.note)
                                                              : stores_.control->SayFalseAlarm(id, key, alert.note));
  }
  BW_ASSIGN_OR_RETURN(const AlertView alert, stores_.alerts->Get(id, key));
  v1::Alert noted = ToProto(alert, *stores_.runs);
  HideSiblings(stores_, context.grant.get(), id, &noted);
  // The note is kept, whatever else can be read.
  if (const auto actions = stores_.actions->List(id); actions.ok()) AddActions(alert.last, *actions, found, &noted);
  return noted;
}

absl::StatusOr<v1::Alert> QueryEngine::AcknowledgeAlert(const v1::AcknowledgeAlertRequest& request,
                                                        const CallContext& context) const {
  BW_RETURN_IF_ERROR(Text("by", request.by(), options_.name_bytes_max));
  BW_RETURN_IF_ERROR(Text("comment", request.comment(), options_.text_bytes_max));
  return PutNote(request.run(), request.key(), context, [&request](AlertView* alert) {
    alert->note.acknowledged = true;
    alert->note.by = request.by();
    alert->note.comment = request.comment();
    return absl::OkStatus();
  });
}

absl::StatusOr<v1::Alert> QueryEngine::SilenceAlert(const v1::SilenceAlertRequest& request,
                                                    const CallContext& context) const {
  BW_RETURN_IF_ERROR(Range("seconds", request.seconds(), 1, options_.silence_seconds_max));
  BW_RETURN_IF_ERROR(Text("by", request.by(), options_.name_bytes_max));
  BW_RETURN_IF_ERROR(Text("comment", request.comment(), options_.text_bytes_max));
  return PutNote(request.run(), request.key(), context, [this, &request](AlertView* alert) {
    Database::AlertNote& note = alert->note;
    note.silenced_until_unix_ns = stores_.clock->UnixNanos() + int64_t{request.seconds()} * 1'000'000'000;
    // Who acknowledged it stays; who silences it is in the audit, and his words are kept.
    if (!note.acknowledged) note.by = request.by();
    if (!note.acknowledged || !request.comment().empty()) note.comment = request.comment();
    return absl::OkStatus();
  });
}

absl::StatusOr<v1::Alert> QueryEngine::MarkFalseAlarm(const v1::MarkFalseAlarmRequest& request,
                                                      const CallContext& context) const {
  BW_RETURN_IF_ERROR(Text("by", request.by(), options_.name_bytes_max));
  BW_RETURN_IF_ERROR(Text("reason", request.reason(), options_.text_bytes_max));
  if (request.reason().empty() && !request.undo()) {
    return absl::InvalidArgumentError("reason \"\": who calls an alert a false alarm says why");
  }
  return PutNote(request.run(), request.key(), context, [this, &request](AlertView* alert) -> absl::Status {
    if (request.undo() && !alert->false_alarm.has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("alert \"", request.key(), "\": its illness is not marked as a false alarm"));
    }
    // There are no more undoings than marks.
    if (!request.undo() && alert->note.false_alarms.size() >= options_.false_alarms_max) {
      stores_.counters->counter("bellwether_query_limit_refused_total", {{"limit", "false_alarms"}})->Add();
      return absl::ResourceExhaustedError(
          absl::StrCat("false_alarms of alert \"", request.key(), "\": at most ", options_.false_alarms_max));
    }
    FalseAlarm& said = alert->note.false_alarms.emplace_back();
    said.by = request.by();
    said.reason = request.reason();
    // The last one counts, whatever the clock does.
    said.time_unix_ns = std::max(stores_.clock->UnixNanos(), stores_.alerts->LastSaidUnixNanos(alert->last.run) + 1);
    said.severity = alert->last.severity;
    said.step = alert->last.step;
    said.undone = request.undo();
    // All that was marked is taken back, also where this alert is at fewer places.
    said.illness = request.undo() ? alert->false_alarm->illness : alert->illness;
    return absl::OkStatus();
  });
}

}  // namespace bellwether::server
