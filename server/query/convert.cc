#include "server/query/convert.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

std::string Bytes(const RunUuid& uuid) { return std::string(reinterpret_cast<const char*>(uuid.data()), uuid.size()); }

v1::Evidence ToProto(const Evidence& evidence) {
  v1::Evidence proto;
  proto.set_signal(evidence.signal);
  proto.set_layer(evidence.where.layer);
  proto.set_head(evidence.where.head);
  proto.set_value(evidence.value);
  proto.set_threshold(evidence.threshold);
  proto.set_baseline(evidence.baseline);
  proto.set_first_step(evidence.first_step);
  proto.set_detector(evidence.detector);
  proto.set_text(evidence.text);
  if (evidence.siblings.runs > 0) *proto.mutable_siblings() = ToProto(evidence.siblings);
  return proto;
}

}  // namespace

v1::SiblingBand ToProto(const SiblingBand& band) {
  v1::SiblingBand proto;
  proto.set_runs(band.runs);
  proto.set_step_begin(band.step_begin);
  proto.set_step_end(band.step_end);
  proto.set_min(band.min);
  proto.set_p01(band.p01);
  proto.set_p50(band.p50);
  proto.set_p99(band.p99);
  proto.set_max(band.max);
  return proto;
}

v1::Run ToProto(const RunSnapshot& run) {
  const RunRecord& record = run.record;
  v1::Run proto;
  *proto.mutable_description() = ToProto(record.description);
  proto.set_step(record.step);
  proto.set_stage(static_cast<uint32_t>(record.stage));
  proto.set_ended(record.ended);
  proto.set_end_reason(record.end_reason);
  proto.set_started_unix_ns(record.started_unix_ns);
  proto.set_last_report_unix_ns(record.last_report_unix_ns);
  proto.set_ranks_reporting(run.ranks_reporting);
  proto.set_frames(record.frames);
  proto.set_frames_dropped(record.frames_dropped);
  proto.set_frames_stripped(record.frames_stripped);
  proto.set_alerts_firing(run.alerts_firing);
  *proto.mutable_eta() = ToProto(run.eta);
  proto.set_loss(run.newest ? double{run.newest->scalar(SignalId::kLoss)} : std::numeric_limits<double>::quiet_NaN());
  proto.set_steps_recorded(record.steps_recorded);
  proto.set_imported(!record.import_of.empty());
  proto.set_import_notifies(record.import_notifies);
  const JudgedBy judged = JudgedByOf(record);
  v1::Judged* const told = proto.mutable_judged();
  told->set_whole(judged.whole());
  told->set_text(judged.Text(record.ended));
  for (size_t i = 0; i < kRuleFamilies; ++i) {
    v1::Judged::Family* const family = told->add_families();
    family->set_name(FamilyName(static_cast<RuleFamily>(i)));
    family->set_layers(static_cast<uint32_t>(judged.judged[i]));
    family->set_of(static_cast<uint32_t>(judged.of(static_cast<RuleFamily>(i))));
  }
  for (const SignalId id : record.signals) {
    const SignalInfo* const signal = FindSignal(id);
    // Rows of own signals have better names.
    if (signal != nullptr && signal->granularity != Granularity::kOwn) proto.add_signals(signal->name);
  }
  if (run.rows != nullptr) AddOwnSignals(*run.rows, &proto);
  return proto;
}

void AddOwnSignals(const RunRows& rows, v1::Run* run) {
  for (const OwnSignal& own : rows.own_signals) {
    run->add_signals(own.name);
    v1::OwnSignal* const proto = run->add_own_signals();
    proto->set_name(own.name);
    proto->set_granularity(static_cast<v1::Granularity>(own.granularity));
    proto->set_merge(static_cast<v1::Merge>(own.merge));
    proto->set_unit(own.unit);
    proto->set_help(own.help);
    if (own.low) proto->set_low(*own.low);
    if (own.high) proto->set_high(*own.high);
    proto->set_layers(static_cast<uint32_t>(own.layers));
    proto->set_heads(static_cast<uint32_t>(own.heads));
    const PastSide side = PastOf(own.name);
    if (side != PastSide::kNone) proto->set_past(side == PastSide::kFalls ? v1::OWN_PAST_FALLS : v1::OWN_PAST_RISES);
  }
}

RunEvent FromProto(const v1::Event& event) {
  return {.attempt = event.attempt(),
          .step = event.step(),
          .kind = static_cast<EventKind>(event.kind()),
          .value = event.value(),
          .text = event.text(),
          .time_unix_ns = event.time_unix_ns()};
}

v1::Eta ToProto(const Eta& eta) {
  v1::Eta proto;
  if (!eta.known) return proto;
  proto.set_known(true);
  proto.set_steps(eta.steps);
  proto.set_lower_steps(eta.lower_steps);
  proto.set_upper_steps(eta.upper_steps);
  proto.set_step_seconds(eta.step_seconds);
  return proto;
}

v1::Transition ToProto(const AlertTransition& transition, const RunTable& runs) {
  v1::Transition proto;
  proto.set_id(transition.id);
  proto.set_run(transition.run_name);
  if (const RunSnapshotPtr run = runs.Get(transition.run)) {
    proto.set_run_uuid(Bytes(run->record.description.uuid));
    proto.set_imported(!run->record.import_of.empty());
    proto.set_run(run->record.description.name);  // It may have been renamed since.
  }
  proto.set_attempt(transition.attempt);
  proto.set_key(transition.key);
  proto.set_k(transition.k);
  proto.set_state(static_cast<v1::AlertState>(transition.state));
  proto.set_severity(static_cast<v1::Severity>(transition.severity));
  proto.set_rule(transition.rule);
  proto.set_stage(static_cast<uint32_t>(transition.stage));
  proto.set_step(transition.step);
  proto.set_first_step(transition.first_step);
  proto.set_layer(transition.strongest.layer);
  proto.set_head(transition.strongest.head);
  for (const Head& head : transition.heads) {
    v1::LayerHead* const to = proto.add_heads();
    to->set_layer(static_cast<uint32_t>(head.layer));
    to->set_head(static_cast<uint32_t>(head.head));
  }
  proto.set_heads_total(transition.heads_total);
  *proto.mutable_eta() = ToProto(transition.eta);
  for (const Evidence& evidence : transition.evidence) *proto.add_evidence() = ToProto(evidence);
  proto.set_cause(transition.cause);
  const std::string before = transition.run_name + ": ";
  const bool renamed = proto.run() != transition.run_name && absl::StartsWith(transition.summary, before);
  proto.set_summary(renamed ? absl::StrCat(proto.run(), ": ", transition.summary.substr(before.size()))
                            : transition.summary);
  proto.set_advice(transition.advice);
  proto.set_do_first(DoText(transition, /*link=*/""));
  proto.set_time_unix_ns(transition.time_unix_ns);
  proto.set_siblings(transition.siblings);
  return proto;
}

v1::Alert ToProto(const AlertView& alert, const RunTable& runs) {
  v1::Alert proto;
  *proto.mutable_last() = ToProto(alert.last, runs);
  proto.set_acknowledged(alert.note.acknowledged);
  proto.set_acknowledged_by(alert.note.by);
  proto.set_comment(alert.note.comment);
  proto.set_silenced_until_unix_ns(alert.note.silenced_until_unix_ns);
  if (alert.false_alarm.has_value()) *proto.mutable_false_alarm() = ToProto(*alert.false_alarm);
  proto.set_muted(alert.muted);
  proto.set_first_time_unix_ns(alert.first_unix_ns);
  return proto;
}

v1::FalseAlarm ToProto(const FalseAlarm& said) {
  v1::FalseAlarm proto;
  proto.set_key(said.key);
  proto.set_by(said.by);
  proto.set_reason(said.reason);
  proto.set_time_unix_ns(said.time_unix_ns);
  proto.set_severity(static_cast<v1::Severity>(said.severity));
  proto.set_step(said.step);
  proto.set_cause(said.illness.cause);
  proto.set_undone(said.undone);
  return proto;
}

v1::Action ToProto(const Action& action, const RunUuid& uuid) {
  v1::Action proto = ToWire(action);
  proto.mutable_scope();  // Readers are given one, empty or not.
  proto.set_run_uuid(Bytes(uuid));
  proto.set_expected_effect(action.expected_effect);
  proto.set_cost(action.cost);
  proto.set_asked_by(action.asked_by);
  proto.set_alert_key(action.alert_key);
  proto.set_state(static_cast<v1::ActionState>(action.state));
  proto.set_not_allowed(action.not_allowed);
  for (const ActionChange& change : action.history) {
    v1::ActionChange* const to = proto.add_history();
    to->set_state(static_cast<v1::ActionState>(change.state));
    to->set_time_unix_ns(change.time_unix_ns);
    to->set_by(change.by);
    to->set_reason(change.reason);
    to->set_step(change.step);
  }
  return proto;
}

v1::AuditEntry ToProto(const AuditEntry& entry) {
  v1::AuditEntry proto;
  proto.set_time_unix_ns(entry.time_unix_ns);
  proto.set_step(entry.step);
  proto.set_by(entry.by);
  proto.set_what(entry.what);
  proto.set_action_id(entry.action_id);
  proto.set_kind(static_cast<v1::ActionKind>(entry.kind));
  proto.set_refused(entry.refused);
  proto.set_detail(entry.detail);
  return proto;
}

v1::Series ToProto(SeriesPoints points, std::string_view signal, const SeriesKey& key) {
  v1::Series proto;
  proto.mutable_id()->set_signal(std::string(signal));
  proto.mutable_id()->set_layer(static_cast<uint32_t>(key.layer));
  proto.mutable_id()->set_head(static_cast<uint32_t>(key.head));
  proto.mutable_step()->Add(points.step.begin(), points.step.end());
  proto.mutable_min()->Add(points.min.begin(), points.min.end());
  proto.mutable_mean()->Add(points.mean.begin(), points.mean.end());
  proto.mutable_max()->Add(points.max.begin(), points.max.end());
  proto.set_downsampled(points.downsampled);
  proto.set_values(points.values);
  return proto;
}

v1::ServerInfo ToProto(const ServerInfo& info) {
  v1::ServerInfo proto;
  proto.set_version(info.version);
  proto.set_revision(info.revision);
  proto.set_grpc_version(info.grpc_version);
  proto.set_backend(info.backend);
  proto.set_started_unix_ns(info.started_unix_ns);
  for (const auto& [name, value] : info.options) (*proto.mutable_options())[name] = value;
  for (const auto& [name, value] : info.limits) (*proto.mutable_limits())[name] = value;
  for (const auto& [name, value] : info.counters) (*proto.mutable_counters())[name] = value;
  proto.set_storage_path(info.storage_path);
  proto.set_http_address(info.http_address);
  proto.set_grpc_address(info.grpc_address);
  return proto;
}

}  // namespace bellwether::server
