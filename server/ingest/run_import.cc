#include "server/ingest/run_import.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "bellwether/recording.h"
#include "server/ingest/decode.h"
#include "server/ingest/encode.h"
#include "server/util/await_for.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of an exported recording: far below the bytes of a message.
constexpr size_t kNamesAtOnce = 1024;

// The same for the same hello, in any process.
std::string RecordingOf(const v1::ClientMessage& hello) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.SetSerializationDeterministic(true);  // Labels are a map.
    hello.SerializeToCodedStream(&out);
  }
  return FormatUuid(UuidOfName(bytes));
}

// Plays the stream's part for one recorded rank.
struct Rank final : public SessionOwner {
  std::shared_ptr<IngestSession> session;
  uint64_t seq = 0;
  bool said_bye = false;
  // Said once it is known that the recording is whole, or that the rank goes on.
  std::optional<v1::ClientMessage> bye;

  absl::Mutex mutex;
  bool room ABSL_GUARDED_BY(mutex) = false;
  bool fenced ABSL_GUARDED_BY(mutex) = false;
  bool moved ABSL_GUARDED_BY(mutex) = false;  // Fenced, because another server serves the run.
  uint64_t durable ABSL_GUARDED_BY(mutex) = 0;

  ~Rank() override {
    if (session != nullptr) session->Detach();
  }
  void OnOpen(uint64_t) override {}
  void OnDurable(uint64_t up_to) override {
    absl::MutexLock lock(&mutex);
    durable = std::max(durable, up_to);
  }
  void OnRoom() override {
    absl::MutexLock lock(&mutex);
    room = true;
  }
  void OnFenced() override {
    absl::MutexLock lock(&mutex);
    fenced = room = true;
  }
  void OnMoved(const std::string&) override {
    absl::MutexLock lock(&mutex);
    fenced = room = moved = true;
  }
  // There is no trainer to measure more, nor to act.
  void OnDeeper(const std::vector<Head>&) override {}
  void OnAction(const Action&) override {}
  absl::Status WhyFenced() {
    absl::MutexLock lock(&mutex);
    if (!moved) return absl::AbortedError("another writer took over the run during the import");
    return absl::UnavailableError(
        "another server of the cluster serves the run since; the same import again goes on where this one stopped");
  }
  void AwaitRoom() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&room));
    room = false;
  }
  bool AwaitDurable() {
    absl::MutexLock lock(&mutex);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return fenced || durable >= seq; };
    AwaitFor(&mutex, absl::Condition(&done), absl::Seconds(60));
    return durable >= seq;
  }
};

class RecordingImport final : public RunImport {
 public:
  RecordingImport(ImportSink* sink, const RunTable* runs, const DecodeLimits& limits, std::string as_name, bool notify)
      : sink_(sink), runs_(runs), limits_(limits), as_name_(std::move(as_name)), notify_(notify) {
    limits_.own_low_at_most_high = false;  // What was once taken is taken again.
  }

  absl::Status Feed(std::string_view bytes) override;
  absl::StatusOr<Result> Finish() override;

 private:
  absl::Status FeedAll(std::string_view bytes);
  absl::Status CheckSameRun(const v1::RunDescription& run);
  absl::Status Take(v1::RecordedMessage* recorded);
  absl::Status Open(uint32_t rank, v1::ClientMessage* message);
  // ALREADY_EXISTS: there is a run of that uuid which is no part of this import.
  absl::Status CheckHere(const RunDescription& run) const;
  absl::Status Put(Rank* rank, v1::ClientMessage* message);

  ImportSink* const sink_;
  const RunTable* const runs_;
  DecodeLimits limits_;
  const std::string as_name_;
  const bool notify_;
  RecordingReader reader_;
  bool ended_ = false;
  std::string name_, uuid_;  // As the first hello says them.
  std::string recording_;    // Tells it from others: of its first hello.
  Result result_;
  std::map<uint32_t, std::unique_ptr<Rank>> ranks_;
};

absl::Status RecordingImport::Feed(std::string_view bytes) {
  const absl::Status fed = FeedAll(bytes);
  // No later bytes make it whole: the run does not wait for them.
  const bool refused = absl::IsInvalidArgument(fed) || absl::IsFailedPrecondition(fed);
  if (refused && !ranks_.empty()) sink_->EndUnheard(result_.run);
  return fed;
}

absl::Status RecordingImport::FeedAll(std::string_view bytes) {
  reader_.Feed(bytes);
  v1::RecordedMessage recorded;
  for (;;) {
    switch (reader_.Next(&recorded)) {
      case RecordingReader::Result::kMessage:
        BW_RETURN_IF_ERROR(Take(&recorded));
        break;
      case RecordingReader::Result::kNeedMore:
        return absl::OkStatus();
      case RecordingReader::Result::kEnd:
        ended_ = true;
        return absl::OkStatus();
      case RecordingReader::Result::kError:
        return absl::InvalidArgumentError(reader_.error());
    }
  }
}

absl::Status RecordingImport::Take(v1::RecordedMessage* recorded) {
  v1::ClientMessage* message = recorded->mutable_message();
  const auto found = ranks_.find(recorded->rank());
  if (message->has_hello()) {
    BW_RETURN_IF_ERROR(CheckSameRun(message->hello().run()));
    if (found == ranks_.end()) return Open(recorded->rank(), message);
    return absl::OkStatus();  // The rank reconnected while it was recorded.
  }
  if (found == ranks_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("the recording has no hello of rank ", recorded->rank()));
  }
  if (message->has_heartbeat()) return absl::OkStatus();
  Rank* const rank = found->second.get();
  if (std::optional<v1::ClientMessage> before = std::exchange(rank->bye, std::nullopt)) {
    BW_RETURN_IF_ERROR(Put(rank, &*before));
  }
  if (!message->has_bye()) return Put(rank, message);
  rank->bye = std::move(*message);
  return absl::OkStatus();
}

absl::Status RecordingImport::CheckSameRun(const v1::RunDescription& run) {
  if (ranks_.empty()) {
    name_ = run.name();
    uuid_ = run.uuid();
  }
  if (run.name() == name_ && run.uuid() == uuid_) return absl::OkStatus();
  const auto shown = [](const std::string& name) { return IsRunName(name) ? name : std::string("?"); };
  return absl::InvalidArgumentError(
      run.name() == name_
          ? absl::StrCat("hello.run.uuid: the recording holds two runs of the name \"", shown(name_), "\": must be one")
          : absl::StrCat("hello.run.name: the recording holds \"", shown(name_), "\" and \"", shown(run.name()),
                         "\": must be one run"));
}

absl::Status RecordingImport::Open(uint32_t number, v1::ClientMessage* message) {
  if (ranks_.empty()) recording_ = RecordingOf(*message);
  v1::RunDescription* run = message->mutable_hello()->mutable_run();
  if (!as_name_.empty()) {
    const RunUuid uuid = UuidOfName(as_name_);
    run->set_name(as_name_);
    run->set_uuid(uuid.data(), uuid.size());
  }
  message->set_seq(0);
  // Its attempts are to be counted as it tells them: it is no launch.
  run->clear_launch_unix_ms();
  // There is no trainer now that could apply anything.
  message->mutable_hello()->clear_capabilities();
  message->mutable_hello()->set_client_version(absl::StrCat(std::string(kImportOf), recording_));
  message->mutable_hello()->set_import_notifies(notify_);
  BW_ASSIGN_OR_RETURN(const IngestMessage plain, Decode(*message, nullptr, limits_));
  const auto& hello = std::get<HelloMessage>(plain.body);
  if (ranks_.empty()) BW_RETURN_IF_ERROR(CheckHere(hello.run));
  auto rank = std::make_unique<Rank>();
  BW_ASSIGN_OR_RETURN(rank->session, sink_->Open(hello, message->SerializeAsString(), rank.get()));
  if (ranks_.empty()) result_.run = runs_->Find(FormatUuid(hello.run.uuid))->record.id;
  ranks_[number] = std::move(rank);
  return absl::OkStatus();
}

absl::Status RecordingImport::CheckHere(const RunDescription& run) const {
  const RunSnapshotPtr here = runs_->Find(FormatUuid(run.uuid));
  if (here == nullptr) return absl::OkStatus();
  const RunRecord& record = here->record;
  if ((record.ended && record.end_reason != kEndedSilent) || record.import_of.empty()) {
    return absl::AlreadyExistsError(absl::StrCat("run ", run.name, " is here already; give the import another name"));
  }
  if (record.import_of != recording_) {
    return absl::AlreadyExistsError(absl::StrCat("run ", run.name,
                                                 " is here in part, from another recording whose import was cut off: "
                                                 "import that again, or give this one another name"));
  }
  return absl::OkStatus();
}

absl::Status RecordingImport::Put(Rank* rank, v1::ClientMessage* message) {
  message->set_seq(message->has_bye() ? 0 : rank->seq + 1);
  BW_ASSIGN_OR_RETURN(IngestMessage plain, Decode(*message, &rank->session->layout(), limits_));
  std::string payload = message->SerializeAsString();
  if (message->has_bye()) {
    rank->said_bye = true;
    rank->session->Bye(std::move(plain), std::move(payload));
    return absl::OkStatus();
  }
  for (;;) {
    BW_ASSIGN_OR_RETURN(const auto taken, rank->session->Put(plain, payload));
    if (taken == IngestSession::Taken::kFenced) return rank->WhyFenced();
    if (taken != IngestSession::Taken::kBusy) break;
    rank->AwaitRoom();
  }
  ++rank->seq;
  ++(message->has_event() ? result_.events : result_.frames);
  return absl::OkStatus();
}

absl::StatusOr<RunImport::Result> RecordingImport::Finish() {
  if (!ended_) return absl::InvalidArgumentError("the recording is cut short: it has no end");
  if (ranks_.empty()) return absl::InvalidArgumentError("the recording is empty");
  for (auto& [number, rank] : ranks_) {
    if (!rank->bye.has_value()) {
      if (rank->said_bye) continue;
      rank->bye.emplace().mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    }
    BW_RETURN_IF_ERROR(Put(rank.get(), &*rank->bye));
  }
  for (auto& [number, rank] : ranks_) {
    if (!rank->AwaitDurable()) return absl::UnavailableError("the import did not become durable");
  }
  sink_->AwaitApplied(result_.run);
  // A goodbye has no number and is not acknowledged.  All of them were taken if the run
  // has ended.
  const RunSnapshotPtr run = runs_->Get(result_.run);
  if (run == nullptr || (!run->record.ended && ranks_.size() >= run->record.description.reporters)) {
    return absl::UnavailableError("the end of the import is lost; the same import again makes it whole");
  }
  return result_;
}

int PartsFor(int count, int at_once) { return (count + at_once - 1) / at_once; }

template <class Message>
void MovePart(int part, int at_once, google::protobuf::RepeatedPtrField<Message>* from,
              google::protobuf::RepeatedPtrField<Message>* to) {
  const int end = std::min(from->size(), (part + 1) * at_once);
  for (int at = part * at_once; at < end; ++at) *to->Add() = std::move((*from)[at]);
}

}  // namespace

std::unique_ptr<RunImport> ImportRecording(ImportSink* sink, const RunTable* runs, const DecodeLimits& limits,
                                           std::string as_name, bool notify) {
  return std::make_unique<RecordingImport>(sink, runs, limits, std::move(as_name), notify);
}

absl::Status ExportRecording(const RunRecord& run, const RunRows& rows, EventReader* events, const SeriesStore& series,
                             const std::function<bool(std::string_view)>& sink) {
  RecordingWriter writer(sink);
  const absl::Status refused = absl::AbortedError("the export was stopped by its reader");
  uint64_t seq = 0;
  const auto write = [&](v1::ClientMessage message, bool sequenced) {
    v1::RecordedMessage recorded;
    if (sequenced) message.set_seq(++seq);
    *recorded.mutable_message() = std::move(message);
    return writer.Write(recorded) ? absl::OkStatus() : refused;
  };
  v1::ClientMessage hello;
  RunDescription description = run.description;
  description.world = description.reporters = 1;
  hello.mutable_hello()->set_protocol(kProtocolVersion);
  *hello.mutable_hello()->mutable_run() = ToProto(description);
  hello.mutable_hello()->mutable_run()->mutable_layout()->set_ranks(static_cast<uint32_t>(description.layout.ranks));
  BW_RETURN_IF_ERROR(write(std::move(hello), false));
  const auto is_before = [](const RunEvent& event, const StepSample& sample) {
    return std::pair(event.attempt, event.step) <= std::pair(sample.attempt, sample.step);
  };
  // Null: all that there are.
  const auto write_events = [&](const StepSample* until) -> absl::Status {
    for (;; events->Pop()) {
      BW_ASSIGN_OR_RETURN(const RunEvent* const event, events->Peek());
      if (event == nullptr || (until != nullptr && !is_before(*event, *until))) return absl::OkStatus();
      BW_RETURN_IF_ERROR(write(ToMessage(*event), true));
    }
  };
  uint32_t named_for = UINT32_MAX;  // Each attempt names its rows.
  const auto write_names = [&](uint32_t attempt) -> absl::Status {
    if (std::exchange(named_for, attempt) == attempt) return absl::OkStatus();
    for (const Granularity granularity : {Granularity::kTensor, Granularity::kModule}) {
      const std::vector<std::string>& names = rows.of(granularity).names();
      for (size_t first = 0; first < names.size(); first += kNamesAtOnce) {
        const size_t end = std::min(names.size(), first + kNamesAtOnce);
        BW_RETURN_IF_ERROR(
            write(ToNames(attempt, granularity, first, std::span(names).subspan(first, end - first)), true));
      }
    }
    return absl::OkStatus();
  };
  std::set<std::string> described;
  // What a frame has no room for comes with the next parts of the step.
  const auto write_parts = [&](v1::ClientMessage whole) -> absl::Status {
    v1::Frame& all = *whole.mutable_frame();
    const DecodeLimits limits;
    const int parts =
        std::max({1, PartsFor(all.own_size(), limits.own_max), PartsFor(all.blocks_size(), limits.blocks_max)});
    for (int part = 0; part < parts; ++part) {
      v1::ClientMessage message;
      v1::Frame* const frame = message.mutable_frame();
      frame->set_attempt(all.attempt());
      frame->set_step(all.step());
      frame->set_time_unix_ns(all.time_unix_ns());
      frame->set_part(static_cast<uint32_t>(part));
      frame->set_parts(static_cast<uint32_t>(parts));
      MovePart(part, limits.own_max, all.mutable_own(), frame->mutable_own());
      MovePart(part, limits.blocks_max, all.mutable_blocks(), frame->mutable_blocks());
      BW_RETURN_IF_ERROR(write(std::move(message), true));
    }
    return absl::OkStatus();
  };
  const auto visit = [&](const StepSample& sample) -> absl::Status {
    BW_RETURN_IF_ERROR(write_events(&sample));
    BW_RETURN_IF_ERROR(write_names(sample.attempt));
    v1::ClientMessage frame = ToFrame(sample, rows);
    for (v1::OwnValues& own : *frame.mutable_frame()->mutable_own()) {
      // What people read of a signal stands with its first values.
      if (described.insert(own.name()).second) Describe(*rows.FindOwn(own.name()), &own);
    }
    return write_parts(std::move(frame));
  };
  BW_RETURN_IF_ERROR(series.ReadAll(run.id, run.description.layout, visit));
  BW_RETURN_IF_ERROR(write_events(nullptr));
  v1::ClientMessage bye;
  bye.mutable_bye()->set_reason(run.ended ? v1::BYE_REASON_FINISHED : v1::BYE_REASON_UNSPECIFIED);
  BW_RETURN_IF_ERROR(write(std::move(bye), false));
  return writer.Finish() ? absl::OkStatus() : refused;
}

}  // namespace bellwether::server
