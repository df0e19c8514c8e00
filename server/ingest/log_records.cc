#include "server/ingest/log_records.h"

#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/ingest/decode.h"
#include "server/ingest/encode.h"
#include "server/ingest/launches.h"
#include "server/store/record_codec.h"
#include "server/util/byte_io.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

std::string EncodeEvent(const RunEvent& event, uint64_t seq) {
  v1::ClientMessage message = ToMessage(event);
  message.set_seq(seq);  // Decode wants one; without an epoch it is no client's.
  return message.SerializeAsString();
}

std::string EncodeStepClosed(const StepClosedMessage& message) {
  return absl::StrCat(message.attempt, " ", message.step);
}

std::string EncodeSilence(const SilenceMessage& message) {
  return absl::StrCat(message.silent_ranks, " ", message.seconds);
}

std::string EncodeRunSilent(const RunSilentMessage& message) { return absl::StrCat(message.last_report_unix_ms); }

std::string EncodeActionRequest(const ActionRequestMessage& message) {
  std::string payload;
  ByteWriter out(&payload);
  out.PutString(EncodeActionRequest(message.request));
  out.PutString(message.malformed);
  return payload;
}

std::string EncodePolicy(const PolicyMessage& message) {
  std::string payload;
  ByteWriter out(&payload);
  out.PutString(*message.text);
  out.Put(message.own);
  out.PutString(message.by);
  out.PutString(message.malformed);
  return payload;
}

// As in the note that the database keeps of it.
std::string EncodeFalseAlarm(const FalseAlarmMessage& message) {
  std::string payload;
  ByteWriter out(&payload);
  out.PutString(message.said.key);
  out.PutString(EncodeAlertNote({.false_alarms = {message.said}}));
  return payload;
}

std::string EncodeRename(const RenameMessage& message) { return message.name; }

std::string EncodeActionSent(const ActionSentMessage& message) { return message.id; }

std::string EncodeSpectra(const SpectraMessage& message) {
  std::string payload;
  ByteWriter out(&payload);
  out.PutVarint(message.answers.size());
  for (const GramAnswer& answer : message.answers) {
    out.Put(answer.attempt);
    out.Put(answer.step);
    out.Put(answer.where.layer);
    out.Put(answer.where.head);
    out.Put(answer.increment);
    out.Put(answer.outcome);
    out.Put(answer.count);
    for (size_t i = 0; i < answer.count; ++i) {
      out.Put(static_cast<uint16_t>(answer.values[i].signal));
      out.Put(answer.values[i].value);
    }
  }
  return payload;
}

namespace {

// Whether the record is whole, and of heads and signals that there are.
bool DecodeSpectra(std::string_view payload, const Layout& layout, SpectraMessage* message) {
  ByteReader in(payload);
  message->answers.resize(in.GetCount(23));
  for (GramAnswer& answer : message->answers) {
    answer.attempt = in.Get<uint32_t>();
    answer.step = in.Get<int64_t>();
    answer.where.layer = in.Get<int32_t>();
    answer.where.head = in.Get<int32_t>();
    answer.increment = in.Get<bool>();
    answer.outcome = in.Get<GramAnswer::Outcome>();
    answer.count = in.Get<uint8_t>();
    if (answer.count > GramAnswer::kValuesMax || answer.where.layer < 0 || answer.where.layer >= layout.layers ||
        answer.where.head < 0 || answer.where.head >= layout.heads) {
      return false;
    }
    for (size_t i = 0; i < answer.count; ++i) {
      answer.values[i].signal = static_cast<SignalId>(in.Get<uint16_t>());
      answer.values[i].value = in.Get<float>();
      const SignalInfo* const signal = FindSignal(answer.values[i].signal);
      if (signal == nullptr || signal->derived || signal->granularity != Granularity::kHead) return false;
    }
  }
  return in.done();
}

absl::StatusOr<IngestMessage> DecodeOfActions(const WalRecord& record) {
  ByteReader in(record.payload);
  IngestMessage plain;
  if (record.kind == WalKind::kActionRequest) {
    ActionRequestMessage message;
    BW_ASSIGN_OR_RETURN(message.request, DecodeActionRequest(in.GetString()));
    message.malformed = in.GetString();
    plain.body = std::move(message);
  } else if (record.kind == WalKind::kPolicy) {
    PolicyMessage message;
    message.text = std::make_shared<const std::string>(in.GetString());
    message.own = in.Get<bool>();
    message.by = in.GetString();
    message.malformed = in.GetString();
    plain.body = std::move(message);
  } else if (record.kind == WalKind::kFalseAlarm) {
    FalseAlarmMessage message;
    std::string key(in.GetString());
    BW_ASSIGN_OR_RETURN(Database::AlertNote note, DecodeAlertNote(in.GetString()));
    if (note.false_alarms.size() != 1) return absl::DataLossError("a false alarm that is none");
    message.said = std::move(note.false_alarms.front());
    message.said.key = std::move(key);
    plain.body = std::move(message);
  } else {
    plain.body = ActionSentMessage{std::string(in.GetRaw(in.remaining()))};
  }
  if (!in.done()) return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
  return plain;
}

}  // namespace

absl::StatusOr<IngestMessage> DecodeRecord(const WalRecord& record, const Layout* layout, const DecodeLimits& limits) {
  if (record.kind == WalKind::kStepClosed || record.kind == WalKind::kSilence) {
    uint32_t first = 0;
    int64_t second = 0;
    if (std::sscanf(record.payload.c_str(), "%u %ld", &first, &second) != 2) {
      return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
    }
    IngestMessage plain;
    if (record.kind == WalKind::kStepClosed) {
      plain.body = StepClosedMessage{first, second};
    } else {
      plain.body = SilenceMessage{first, second};
    }
    return plain;
  }
  if (record.kind == WalKind::kRunSilent) {
    RunSilentMessage silent;
    if (!absl::SimpleAtoi(record.payload, &silent.last_report_unix_ms)) {
      return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
    }
    IngestMessage plain;
    plain.body = silent;
    return plain;
  }
  if (record.kind == WalKind::kSpectra) {
    SpectraMessage spectra;
    if (layout == nullptr || !DecodeSpectra(record.payload, *layout, &spectra)) {
      return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
    }
    IngestMessage plain;
    plain.body = std::move(spectra);
    return plain;
  }
  if (record.kind == WalKind::kActionRequest || record.kind == WalKind::kPolicy ||
      record.kind == WalKind::kActionSent || record.kind == WalKind::kFalseAlarm) {
    return DecodeOfActions(record);
  }
  if (record.kind == WalKind::kRules) {
    IngestMessage plain;
    plain.body = RulesMessage{std::make_shared<const std::string>(record.payload)};
    return plain;
  }
  if (record.kind == WalKind::kRename) {
    if (!IsRunName(record.payload)) {
      return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
    }
    IngestMessage plain;
    plain.body = RenameMessage{record.payload};
    return plain;
  }
  v1::ClientMessage message;
  if (!message.ParseFromString(record.payload)) {
    return absl::DataLossError(absl::StrCat("log record ", record.lsn, " cannot be parsed"));
  }
  // What was once taken is read again, whatever is refused by now.
  DecodeLimits taken = limits;
  taken.losses_max = std::numeric_limits<uint64_t>::max();
  taken.own_low_at_most_high = false;
  BW_ASSIGN_OR_RETURN(IngestMessage plain, Decode(message, record.kind == WalKind::kHello ? nullptr : layout, taken));
  // As the run counts it, which the client that wrote the payload need not know (launches.h).
  if (auto* const hello = std::get_if<HelloMessage>(&plain.body)) {
    hello->run.attempt = record.attempt;
    hello->run.launch_unix_ms = Launches::Credible(hello->run.launch_unix_ms, record.time_unix_ms);
  }
  return plain;
}

}  // namespace bellwether::server
