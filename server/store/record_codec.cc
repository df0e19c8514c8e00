#include "server/store/record_codec.h"

#include <zstd.h>

#include "absl/strings/str_cat.h"
#include "server/util/byte_io.h"

namespace bellwether::server {
namespace {

// Of a record's bytes.  An older version is read as far as it goes; what it did
// not have yet stays as it is made.
template <typename Record>
constexpr uint8_t kRecordVersion = 1;
template <>
constexpr uint8_t kRecordVersion<AlertTransition> = 2;  // 1 had no siblings.
template <>
constexpr uint8_t kRecordVersion<RunRecord> =
    10;  // 1 did not say whether its kind changed, 2 what it is imported from,
         // 3 how many frames were stripped, 4 when it was launched,
         // 5 whether people are told of an import, 6 what it is judged by,
         // 7 how many rows there are that are no heads, 8 how many
         // cells own signals have, 9 that it was renamed or deleted.
template <>
constexpr uint8_t kRecordVersion<BaselinePercentiles> = 2;  // 1 had no own signals.
template <>
constexpr uint8_t kRecordVersion<Action> = 2;  // 1 had no not_allowed.
template <>
constexpr uint8_t kRecordVersion<Database::AlertNote> = 2;  // 1 had no false alarms.
constexpr uint8_t kJudgeStateVersion = 1;
constexpr uint8_t kRunRowsVersion = 2;  // 1 had no own signals.
constexpr uint64_t kStateBytesMax = uint64_t{1} << 30;

// One list of fields per record serves both directions: an Archive either puts
// each field or gets it.
class Putter {
 public:
  Putter(std::string* out, uint8_t version) : out_(out), version_(version) {}
  uint8_t version() const { return version_; }
  template <typename T>
  void Field(T& value) {
    out_.Put(value);
  }
  void Field(std::string& value) { out_.PutString(value); }
  template <typename T, typename Each>
  void List(std::vector<T>& values, size_t, Each each) {
    out_.PutVarint(values.size());
    for (T& value : values) each(*this, value);
  }
  void Map(std::map<std::string, std::string>& values) {
    out_.PutVarint(values.size());
    for (const auto& [key, value] : values) {
      out_.PutString(key);
      out_.PutString(value);
    }
  }

 private:
  ByteWriter out_;
  const uint8_t version_;
};

class Getter {
 public:
  Getter(ByteReader* in, uint8_t version) : in_(in), version_(version) {}
  uint8_t version() const { return version_; }
  template <typename T>
  void Field(T& value) {
    value = in_->Get<T>();
  }
  void Field(std::string& value) { value = in_->GetString(); }
  template <typename T, typename Each>
  void List(std::vector<T>& values, size_t bytes_each, Each each) {
    values.resize(in_->GetCount(bytes_each));
    for (T& value : values) each(*this, value);
  }
  void Map(std::map<std::string, std::string>& values) {
    values.clear();
    for (size_t n = in_->GetCount(2); n > 0; --n) {
      std::string key(in_->GetString());
      values[std::move(key)] = in_->GetString();
    }
  }

 private:
  ByteReader* const in_;
  const uint8_t version_;
};

template <typename Archive>
void Describe(Archive& ar, RunDescription& d) {
  ar.Field(d.name);
  for (uint8_t& byte : d.uuid) ar.Field(byte);
  ar.Field(d.attempt);
  ar.Field(d.world);
  ar.Field(d.reporters);
  ar.Field(d.layout.layers);
  ar.Field(d.layout.heads);
  ar.Field(d.layout.kv_heads);
  ar.Field(d.layout.head_dim);
  ar.Field(d.layout.seq_len);
  ar.Field(d.attention.kernel);
  ar.Field(d.attention.score_dtype);
  ar.Field(d.attention.centred);
  ar.Field(d.attention.qk_norm);
  ar.Field(d.attention.causal);
  ar.Field(d.attention.softcap);
  ar.Field(d.attention.window);
  ar.Field(d.framework);
  ar.Field(d.model);
  ar.Field(d.weight_decay);
  ar.Field(d.step_from_attach);
  ar.Map(d.labels);
}

template <typename Archive>
void Describe(Archive& ar, RunCoverage& c) {
  ar.Field(c.attempt);
  ar.Field(c.steps);
  ar.Field(c.off);
  ar.Field(c.head_step);
  ar.Field(c.head_gap);
  ar.Field(c.loss_step);
  ar.Field(c.loss_gap);
  ar.Field(c.period);
  ar.List(c.missed, 1, [](Archive& a, uint8_t& missed) { a.Field(missed); });
}

template <typename Archive>
void Describe(Archive& ar, RunRecord& r) {
  ar.Field(r.id);
  Describe(ar, r.description);
  ar.Field(r.step);
  ar.Field(r.stage);
  ar.Field(r.ended);
  ar.Field(r.end_reason);
  ar.Field(r.started_unix_ns);
  ar.Field(r.last_report_unix_ns);
  ar.Field(r.frames);
  ar.Field(r.frames_dropped);
  ar.Field(r.steps_recorded);
  ar.Field(r.applied_lsn);
  ar.List(r.signals, sizeof(SignalId), [](Archive& a, SignalId& signal) { a.Field(signal); });
  if (ar.version() >= 2) ar.Field(r.kind_changed);
  if (ar.version() >= 3) ar.Field(r.import_of);
  if (ar.version() >= 4) ar.Field(r.frames_stripped);
  if (ar.version() >= 5) ar.Field(r.description.launch_unix_ms);
  if (ar.version() >= 6) ar.Field(r.import_notifies);
  if (ar.version() >= 7) Describe(ar, r.coverage);
  Layout& layout = r.description.layout;
  if (ar.version() >= 8) {
    ar.Field(layout.experts);
    ar.Field(layout.ranks);
    ar.Field(layout.tensors);
    ar.Field(layout.modules);
    if (ar.version() >= 9) ar.Field(layout.own);
    if (ar.version() >= 10) {
      ar.Field(r.renamed);
      ar.Field(r.deleted);
    }
  } else {
    layout.ranks = static_cast<int32_t>(r.description.world);
  }
}

template <typename Archive>
void Describe(Archive& ar, RankRecord& r) {
  ar.Field(r.rank);
  ar.Field(r.epoch);
  ar.Field(r.durable_seq);
}

template <typename Archive>
void Describe(Archive& ar, RunEvent& e) {
  ar.Field(e.attempt);
  ar.Field(e.step);
  ar.Field(e.kind);
  ar.Field(e.value);
  ar.Field(e.text);
  ar.Field(e.time_unix_ns);
}

template <typename Archive>
void Describe(Archive& ar, Head& h) {
  ar.Field(h.layer);
  ar.Field(h.head);
}

template <typename Archive>
void Describe(Archive& ar, SiblingBand& b) {
  ar.Field(b.runs);
  ar.Field(b.step_begin);
  ar.Field(b.step_end);
  ar.Field(b.min);
  ar.Field(b.p01);
  ar.Field(b.p50);
  ar.Field(b.p99);
  ar.Field(b.max);
}

template <typename Archive>
void Describe(Archive& ar, Evidence& e) {
  ar.Field(e.signal);
  Describe(ar, e.where);
  ar.Field(e.value);
  ar.Field(e.threshold);
  ar.Field(e.baseline);
  ar.Field(e.first_step);
  ar.Field(e.detector);
  ar.Field(e.text);
  if (ar.version() >= 2) Describe(ar, e.siblings);
}

template <typename Archive>
void Describe(Archive& ar, AlertTransition& t) {
  ar.Field(t.id);
  ar.Field(t.run);
  ar.Field(t.run_name);
  ar.Field(t.attempt);
  ar.Field(t.key);
  ar.Field(t.k);
  ar.Field(t.state);
  ar.Field(t.severity);
  ar.Field(t.rule);
  ar.Field(t.stage);
  ar.Field(t.step);
  ar.Field(t.first_step);
  Describe(ar, t.strongest);
  ar.List(t.heads, 8, [](Archive& a, Head& head) { Describe(a, head); });
  ar.Field(t.heads_total);
  ar.Field(t.eta.known);
  ar.Field(t.eta.steps);
  ar.Field(t.eta.lower_steps);
  ar.Field(t.eta.upper_steps);
  ar.List(t.evidence, 40, [](Archive& a, Evidence& evidence) { Describe(a, evidence); });
  ar.Field(t.cause);
  ar.Field(t.summary);
  ar.Field(t.advice);
  ar.Field(t.time_unix_ns);
  if (ar.version() >= 2) ar.Field(t.siblings);
}

template <typename Archive>
void Describe(Archive& ar, BaselinePercentiles& b) {
  ar.Field(b.run);
  ar.Field(b.name);
  for (uint8_t& byte : b.uuid) ar.Field(byte);
  ar.Field(b.kind);
  ar.Field(b.attempt);
  ar.Field(b.step);
  ar.Field(b.steps_recorded);
  ar.Field(b.learned_unix_ns);
  constexpr size_t kBandBytes = sizeof(SignalId) + 1 + 4 + kBandProbs.size() * sizeof(float);
  ar.List(b.bands, kBandBytes, [](Archive& a, Band& band) {
    a.Field(band.signal);
    a.Field(band.range);
    a.Field(band.values);
    for (float& value : band.quantiles) a.Field(value);
    if (a.version() >= 2) a.Field(band.own);
  });
  if (ar.version() >= 2) ar.List(b.own, 1, [](Archive& a, std::string& name) { a.Field(name); });
}

template <typename Archive>
void Describe(Archive& ar, Action& a) {
  ar.Field(a.id);
  ar.Field(a.attempt);
  ar.Field(a.kind);
  ar.List(a.scope.layers, 4, [](Archive& to, int32_t& layer) { to.Field(layer); });
  ar.List(a.scope.heads, 8, [](Archive& to, Head& head) { Describe(to, head); });
  ar.Field(a.mode);
  ar.Field(a.value);
  ar.Field(a.apply_at_step);
  ar.Field(a.expires_unix_ns);
  ar.Field(a.expected_effect);
  ar.Field(a.cost);
  ar.Field(a.asked_by);
  ar.Field(a.alert_key);
  ar.Field(a.undoes);
  ar.Field(a.state);
  ar.List(a.history, 19, [](Archive& to, ActionChange& change) {
    to.Field(change.state);
    to.Field(change.time_unix_ns);
    to.Field(change.by);
    to.Field(change.reason);
    to.Field(change.step);
  });
  if (ar.version() >= 2) ar.Field(a.not_allowed);
}

template <typename Archive>
void Describe(Archive& ar, ActionRequest& r) {
  ar.Field(r.verb);
  Describe(ar, r.action);
  ar.Field(r.id);
  ar.Field(r.by);
  ar.Field(r.reason);
}

template <typename Archive>
void Describe(Archive& ar, AuditEntry& e) {
  ar.Field(e.time_unix_ns);
  ar.Field(e.step);
  ar.Field(e.by);
  ar.Field(e.what);
  ar.Field(e.action_id);
  ar.Field(e.kind);
  ar.Field(e.refused);
  ar.Field(e.detail);
}

template <typename Archive>
void Describe(Archive& ar, Database::AlertNote& n) {
  ar.Field(n.acknowledged);
  ar.Field(n.by);
  ar.Field(n.comment);
  ar.Field(n.silenced_until_unix_ns);
  if (ar.version() < 2) return;
  ar.List(n.false_alarms, 23, [](Archive& list, FalseAlarm& said) {
    list.Field(said.by);
    list.Field(said.reason);
    list.Field(said.time_unix_ns);
    list.Field(said.severity);
    list.Field(said.step);
    list.Field(said.illness.cause);
    list.Field(said.illness.rule);
    list.List(said.illness.places, 1, [](Archive& places, std::string& place) { places.Field(place); });
    list.Field(said.undone);
  });
}

template <typename Record>
uint8_t VersionOf(const Record&) {
  return kRecordVersion<Record>;
}
// What servers of before read as long as there is nothing in it that they would lose:
// those of a cluster are replaced one after the other, and then the clients.
uint8_t VersionOf(const RunRecord& run) {
  const Layout& layout = run.description.layout;
  const bool has_rows = layout.experts != 0 || layout.tensors != 0 || layout.modules != 0;
  if (!run.renamed.empty() || run.deleted) return 10;
  if (layout.own != 0) return 9;
  if (has_rows || layout.ranks > static_cast<int32_t>(run.description.world)) return 8;
  if (!run.coverage.Follows(run.signals, layout.layers)) return 7;
  if (run.import_notifies) return 6;
  if (run.description.launch_unix_ms > 0) return 5;
  if (run.frames_stripped > 0) return 4;
  return run.import_of.empty() ? 2 : 3;
}

uint8_t VersionOf(const Action& action) { return action.not_allowed.empty() ? 1 : 2; }

uint8_t VersionOf(const BaselinePercentiles& bands) { return bands.own.empty() ? 1 : 2; }

uint8_t VersionOf(const Database::AlertNote& note) { return note.false_alarms.empty() ? 1 : 2; }

template <typename Record>
std::string Encode(Record record) {
  std::string bytes;
  const uint8_t version = VersionOf(record);
  ByteWriter(&bytes).Put(version);
  Putter putter(&bytes, version);
  Describe(putter, record);
  return bytes;
}

template <typename Record>
absl::StatusOr<Record> Decode(std::string_view bytes, const char* what) {
  ByteReader in(bytes);
  Record record;
  const uint8_t version = in.Get<uint8_t>();
  if (version < 1 || version > kRecordVersion<Record>) {
    return absl::DataLossError(absl::StrCat("stored ", what, ": unknown version"));
  }
  Getter getter(&in, version);
  Describe(getter, record);
  if (!in.done()) return absl::DataLossError(absl::StrCat("stored ", what, ": damaged"));
  return record;
}

}  // namespace

std::string EncodeRunRecord(const RunRecord& run) { return Encode(run); }
absl::StatusOr<RunRecord> DecodeRunRecord(std::string_view bytes) { return Decode<RunRecord>(bytes, "run"); }
std::string EncodeRankRecord(const RankRecord& rank) { return Encode(rank); }
absl::StatusOr<RankRecord> DecodeRankRecord(std::string_view bytes) { return Decode<RankRecord>(bytes, "rank"); }
std::string EncodeRunEvent(const RunEvent& event) { return Encode(event); }
absl::StatusOr<RunEvent> DecodeRunEvent(std::string_view bytes) { return Decode<RunEvent>(bytes, "event"); }
std::string EncodeTransition(const AlertTransition& transition) { return Encode(transition); }
absl::StatusOr<AlertTransition> DecodeTransition(std::string_view bytes) {
  return Decode<AlertTransition>(bytes, "transition");
}
std::string EncodeAlertNote(const Database::AlertNote& note) { return Encode(note); }
absl::StatusOr<Database::AlertNote> DecodeAlertNote(std::string_view bytes) {
  return Decode<Database::AlertNote>(bytes, "alert note");
}
std::string EncodeAction(const Action& action) { return Encode(action); }
absl::StatusOr<Action> DecodeAction(std::string_view bytes) { return Decode<Action>(bytes, "action"); }
std::string EncodeActionRequest(const ActionRequest& request) { return Encode(request); }
absl::StatusOr<ActionRequest> DecodeActionRequest(std::string_view bytes) {
  return Decode<ActionRequest>(bytes, "request");
}
std::string EncodeAuditEntry(const AuditEntry& entry) { return Encode(entry); }
absl::StatusOr<AuditEntry> DecodeAuditEntry(std::string_view bytes) { return Decode<AuditEntry>(bytes, "audit entry"); }
std::string EncodeBaselinePercentiles(const BaselinePercentiles& bands) { return Encode(bands); }
absl::StatusOr<BaselinePercentiles> DecodeBaselinePercentiles(std::string_view bytes) {
  return Decode<BaselinePercentiles>(bytes, "baseline");
}

std::string EncodeRunRows(const RunRows& rows) {
  std::string bytes;
  ByteWriter out(&bytes);
  // Servers of before read it as long as there is nothing in it that they would lose.
  const bool own = !rows.own_signals.empty();
  out.Put(own ? kRunRowsVersion : uint8_t{1});
  for (const RowNames* const of : {&rows.tensors, &rows.modules}) {
    out.PutVarint(of->names().size());
    for (const std::string& name : of->names()) out.PutString(name);
  }
  if (!own) return bytes;
  out.PutVarint(rows.own_signals.size());
  for (const OwnSignal& signal : rows.own_signals) {
    out.PutString(signal.name);
    out.PutString(signal.unit);
    out.PutString(signal.help);
    out.Put(signal.granularity);
    out.Put(signal.merge);
    out.PutVarint(signal.attempt);
    for (const std::optional<double>& limit : {signal.low, signal.high}) {
      out.Put(limit.has_value());
      out.Put(limit.value_or(0));
    }
  }
  out.PutVarint(rows.own_cells.size());
  for (const OwnCell& cell : rows.own_cells) {
    out.PutVarint(static_cast<uint64_t>(cell.signal));
    out.PutVarint(static_cast<uint64_t>(cell.layer));
    out.PutVarint(static_cast<uint64_t>(cell.head));
  }
  return bytes;
}

absl::StatusOr<RunRows> DecodeRunRows(std::string_view bytes) {
  ByteReader in(bytes);
  const absl::Status damaged = absl::DataLossError("stored row names: damaged, or of another version");
  const auto version = in.Get<uint8_t>();
  if (version < 1 || version > kRunRowsVersion) return damaged;
  RunRows rows;
  for (RowNames* const of : {&rows.tensors, &rows.modules}) {
    std::vector<std::string> names(in.GetCount(1));
    if (names.size() > static_cast<size_t>(kNamedRowsMax)) return damaged;
    for (std::string& name : names) name = in.GetString();
    *of = RowNames(std::move(names));
  }
  if (version >= 2) {
    rows.own_signals.resize(in.GetCount(24));
    if (rows.own_signals.size() > kOwnSignalsMax) return damaged;
    for (OwnSignal& signal : rows.own_signals) {
      signal.name = in.GetString();
      signal.unit = in.GetString();
      signal.help = in.GetString();
      signal.granularity = in.Get<Granularity>();
      signal.merge = in.Get<Merge>();
      signal.attempt = static_cast<uint32_t>(in.GetVarint());
      for (std::optional<double>* limit : {&signal.low, &signal.high}) {
        const bool has = in.Get<bool>();
        const auto value = in.Get<double>();
        if (has) *limit = value;
      }
    }
    for (size_t left = in.GetCount(3); left > 0; --left) {
      OwnCell cell;
      cell.signal = static_cast<int32_t>(in.GetVarint());
      cell.layer = static_cast<int32_t>(in.GetVarint());
      cell.head = static_cast<int32_t>(in.GetVarint());
      const bool known = cell.signal >= 0 && static_cast<size_t>(cell.signal) < rows.own_signals.size();
      if (!in.ok() || !known || cell.layer < 0 || cell.head < 0 || rows.AddOwnCell(cell) + 1 != rows.own.size()) {
        return damaged;
      }
    }
  }
  if (!in.done()) return damaged;
  return rows;
}

std::string PackState(std::string_view state) {
  std::string bytes(1 + ZSTD_compressBound(state.size()), '\0');
  bytes[0] = static_cast<char>(kJudgeStateVersion);
  const size_t size = ZSTD_compress(bytes.data() + 1, bytes.size() - 1, state.data(), state.size(), /*level=*/1);
  bytes.resize(ZSTD_isError(size) ? 1 : 1 + size);
  return bytes;
}

absl::StatusOr<std::string> UnpackState(std::string_view bytes) {
  const absl::Status damaged = absl::DataLossError("stored state: damaged, or of another version");
  if (bytes.empty() || bytes[0] != static_cast<char>(kJudgeStateVersion)) return damaged;
  bytes.remove_prefix(1);
  const unsigned long long size = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
  if (size > kStateBytesMax) return damaged;  // Also what is no frame at all.
  std::string state(size, '\0');
  const size_t got = ZSTD_decompress(state.data(), state.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(got) || got != size) return damaged;
  return state;
}

}  // namespace bellwether::server
