#include "server/engine/ingest_coordinator.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/engine/rank_session.h"
#include "server/ingest/log_records.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of Sampling.deeper.
constexpr size_t kDeeperHeadsMax = 64;
// The furthest first.
std::vector<Head> DeeperHeads(const RunSnapshot& run) {
  const Layout& layout = run.record.description.layout;
  std::vector<std::pair<int, Head>> found;  // -stage, head
  for (size_t i = 0; i < run.head_stage.size(); ++i) {
    if (run.head_stage[i] == 0) continue;
    found.push_back(
        {-int{run.head_stage[i]}, {static_cast<int32_t>(i) / layout.heads, static_cast<int32_t>(i) % layout.heads}});
  }
  std::sort(found.begin(), found.end());
  if (found.size() > kDeeperHeadsMax) found.resize(kDeeperHeadsMax);
  std::vector<Head> heads;
  for (const auto& [stage, head] : found) heads.push_back(head);
  return heads;
}

// Counts names that were refused.  "": the run's events have said as much already.
std::string WordsOfRefused(const absl::Status& why, size_t names, NamesTaken* taken) {
  constexpr uint64_t kToldAgain = 4;
  taken->refused += names;
  ++taken->refused_messages;
  if (taken->refused_messages < kToldAgain * taken->told_messages) return {};
  taken->told_messages = taken->refused_messages;
  std::string text = absl::StrCat("names left out, and values of them: ", why.message());
  if (taken->refused_messages > 1) {
    absl::StrAppend(&text, "; ", taken->refused_messages, " messages of ", taken->refused, " names so far");
  }
  return text;
}

// A run stays with its model.  The words of all fields fit into what a client keeps of its last error.
absl::Status CheckModel(const Layout& held, const RunDescription& offered) {
  std::string text;
  for (const Layout::Difference& each : held.DifferencesOf(offered.layout)) {
    absl::StrAppend(&text, text.empty() ? "hello.run.layout." : ", ", each.field, " = ", each.offered,
                    text.empty() ? " (the run has " : " (", each.held, ")");
  }
  if (text.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      text, ": another model needs another run; give it another name (BELLWETHER_RUN) than ", offered.name));
}

}  // namespace

IngestCoordinator::IngestCoordinator(const Parts& parts)
    : runs_(*parts.runs),
      shards_(*parts.shards),
      registry_(*parts.registry),
      ownership_(parts.ownership),
      admission_(parts.admission),
      replay_(*parts.replay),
      log_(parts.runs->wal),
      clock_(parts.runs->clock),
      gaps_(parts.runs->counters->counter("bellwether_ingest_seq_gaps_total")),
      ack_seconds_(parts.runs->counters->histogram("bellwether_ack_seconds")) {}

absl::Status IngestCoordinator::AdmitRun(const RunUuid& uuid) const {
  std::string address;
  absl::Status here = ownership_->Admit(uuid, &address);
  return address.empty() ? here : MovedTo(address);
}

absl::StatusOr<std::shared_ptr<RunEntry>> IngestCoordinator::FindOrCreate(const HelloMessage& hello,
                                                                          int64_t time_unix_ms) {
  if (std::shared_ptr<RunEntry> entry = registry_.Find(hello.run.uuid); entry != nullptr) {
    if (entry->deleting) return absl::UnavailableError("the run is being deleted; come back");
    BW_RETURN_IF_ERROR(CheckModel(entry->description.layout, hello.run));
    return entry;
  }
  BW_RETURN_IF_ERROR(admission_->Admit(hello.run.layout, runs_.table->List(), clock_->UnixNanos()));
  RunRecord record;
  record.id = ownership_->NextRun(hello.run.uuid);
  record.description = hello.run;
  record.import_of = hello.import_of;
  record.import_notifies = hello.import_notifies;
  record.started_unix_ns = time_unix_ms * 1'000'000;
  record.applied_lsn = log_->last_lsn();
  BW_ASSIGN_OR_RETURN(std::unique_ptr<LiveRun> run, LiveRun::Load(runs_, record));
  std::shared_ptr<RunEntry> entry = registry_.Add(record);
  entry->unlogged = std::move(run);
  return entry;
}

absl::Status IngestCoordinator::ResolveAttempt(int64_t time_unix_ms, HelloMessage* hello) const {
  RunDescription& run = hello->run;
  run.launch_unix_ms = Launches::Credible(run.launch_unix_ms, time_unix_ms);
  const std::shared_ptr<RunEntry> known = registry_.Find(run.uuid);
  if (known == nullptr) return absl::OkStatus();
  const std::optional<uint32_t> attempt = known->launches.AttemptOf(run.launch_unix_ms, run.attempt);
  if (!attempt.has_value()) {
    return absl::AbortedError(absl::StrCat("hello.run.launch_unix_ms = ", run.launch_unix_ms, ": attempt ",
                                           known->launches.newest_attempt(), " of run ", run.name,
                                           " was launched later"));
  }
  run.attempt = *attempt;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<IngestSession>> IngestCoordinator::Open(const HelloMessage& sent, std::string payload,
                                                                       SessionOwner* owner) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  HelloMessage hello = sent;
  LogBackend& log = *log_->lane(ownership_->LaneOf(hello.run.uuid));
  absl::MutexLock registry(&registry_.mutex());
  const int64_t time_unix_ms = clock_->UnixMillis();
  // Before the log's health: another server may serve the run and be well.
  BW_RETURN_IF_ERROR(AdmitRun(hello.run.uuid));
  BW_RETURN_IF_ERROR(log.health());
  BW_RETURN_IF_ERROR(ResolveAttempt(time_unix_ms, &hello));
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunEntry> run, FindOrCreate(hello, time_unix_ms));
  const absl::Cleanup forget_unlogged = [this, &run] {
    registry_.mutex().AssertHeld();
    if (run->unlogged != nullptr) registry_.Forget(*run);
  };
  Shard& shard = shards_.Of(run->id);
  std::shared_ptr<RankSession> fenced;
  std::shared_ptr<RankSession> session;
  {
    absl::MutexLock lock(&shard.mutex());
    const bool is_new = run->ranks.empty();
    std::unique_ptr<RankSlot>& slot = run->ranks[hello.rank];
    if (slot == nullptr) slot = std::make_unique<RankSlot>();
    // The sender of a trainer that died must not fence the sender of a later attempt,
    // whichever of them finds a restarted server first.
    if (hello.run.attempt < slot->attempt) {
      return absl::AbortedError(absl::StrCat("hello.run.attempt = ", hello.run.attempt, ": attempt ", slot->attempt,
                                             " of run ", hello.run.name, " has begun at rank ", hello.rank));
    }
    // An import fences nothing, neither a trainer nor another import.
    const std::shared_ptr<RankSession> held = slot->session.lock();
    if (!hello.import_of.empty() && held != nullptr && held->attached()) {
      return absl::AbortedError(
          absl::StrCat("run ", hello.run.name, " is written to by somebody else just now; come back in a moment"));
    }
    WalRecord record;
    record.kind = WalKind::kHello;
    record.run = run->id;
    record.rank = hello.rank;
    record.attempt = hello.run.attempt;
    record.epoch = slot->epoch + 1;
    record.time_unix_ms = time_unix_ms;
    record.payload = std::move(payload);
    const size_t bytes = record.payload.size();
    const auto adopt = [this, &run, &shard] {
      shard.mutex().AssertHeld();
      if (run->unlogged == nullptr) return;
      RunPublisher::PublishRecord(run->unlogged->record(), runs_);
      shard.Adopt(std::move(run->unlogged));
    };
    BW_ASSIGN_OR_RETURN(const Lsn lsn, shard.Append(std::move(record), {0, hello}, bytes, adopt));
    ++slot->epoch;
    slot->attempt = hello.run.attempt;
    run->launches.Begin(hello.run.launch_unix_ms, hello.run.attempt);
    slot->deeper.clear();  // The new session was asked for nothing yet.
    fenced = slot->session.lock();
    session = std::make_shared<RankSession>(this, run, slot.get(), hello, owner);
    slot->session = session;
    if (is_new) {
      AppendRules(&shard, *run, time_unix_ms);
      AppendPolicy(&shard, *run, time_unix_ms);
    }
    PendingAcks(run->id).push_back({lsn, PendingAck::Of::kHello, slot->last_seq, clock_->MonotonicNanos(), session});
  }
  if (fenced != nullptr) fenced->Notify([](SessionOwner* old) { old->OnFenced(); });
  // The log may have become durable before the acknowledgement above was queued.
  OnDurable(log_->LaneOf(run->id), log.durable_lsn());
  return session;
}

void IngestCoordinator::AppendRules(Shard* shard, const RunEntry& run, int64_t time_unix_ms) {
  const RuleSetPtr rules = runs_.rules->current();
  if (rules->text.empty()) return;
  WalRecord record;
  record.kind = WalKind::kRules;
  record.run = run.id;
  record.attempt = run.launches.newest_attempt();
  record.time_unix_ms = time_unix_ms;
  record.payload = rules->text;
  shard->mutex().AssertHeld();
  const RulesMessage message{std::make_shared<const std::string>(rules->text)};
  (void)shard->Append(std::move(record), {0, message});  // On an error the shard's next tick finds the difference.
}

void IngestCoordinator::AppendPolicy(Shard* shard, const RunEntry& run, int64_t time_unix_ms) {
  const PolicyPtr policy = runs_.policy->current();
  if (policy->text == DefaultPolicy()->text) return;
  const PolicyMessage message = ServerPolicy(policy);
  WalRecord record;
  record.kind = WalKind::kPolicy;
  record.run = run.id;
  record.attempt = run.launches.newest_attempt();
  record.time_unix_ms = time_unix_ms;
  record.payload = EncodePolicy(message);
  shard->mutex().AssertHeld();
  (void)shard->Append(std::move(record), {0, message});  // As above.
}

// One seq that is far off would leave no number for the messages after it.  A rank that
// is new to this server goes on with its client's numbers.
absl::Status IngestCoordinator::CheckRise(const RankSession& session, uint64_t seq) const {
  constexpr uint64_t kRiseMax = uint64_t{1} << 32;  // Messages that were lost in between.
  constexpr uint64_t kFirstMax = uint64_t{1} << 53;
  const uint64_t last = session.slot()->last_seq;
  const uint64_t from = last != 0 ? last : std::min(std::max<uint64_t>(session.first_unacked_seq(), 1) - 1, kFirstMax);
  if (seq - from <= kRiseMax || seq < from) return absl::OkStatus();
  runs_.counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "seq"}})->Add();
  return absl::InvalidArgumentError(
      absl::StrCat("seq = ", seq, ": must be in [", last + 1, ", ", from + kRiseMax, "]: ", last, " was the last one"));
}

void IngestCoordinator::AdmitNames(RunId run, NamesTaken* taken, IngestMessage* message, std::string* payload) const {
  const auto* const names = std::get_if<NamesMessage>(&message->body);
  const bool waits = taken->given.tensors.size() + taken->given.modules.size() > 0;
  if (names == nullptr && !waits) return;
  const RunSnapshotPtr snapshot = runs_.table->Get(run);
  if (snapshot == nullptr) return;
  const Layout& layout = snapshot->record.description.layout;
  if (waits && layout.tensors >= taken->until.tensors && layout.modules >= taken->until.modules) taken->given = {};
  if (names == nullptr) return;
  std::shared_ptr<const RunRows> rows = snapshot->rows;
  if (rows != nullptr) {
    taken->stored = nullptr;
  } else {
    // A run that has come back: the snapshot of its record has no names.
    if (taken->stored == nullptr && layout.tensors + layout.modules > 0) {
      if (auto read = RowsOf(*snapshot, *runs_.database); read.ok()) taken->stored = *std::move(read);
    }
    static const auto none = std::make_shared<const RunRows>();
    rows = taken->stored != nullptr ? taken->stored : none;
  }
  const Granularity granularity = names->granularity;
  const RowNames& known = rows->of(granularity);
  // What other messages were given since the snapshot counts, too; what several ranks name counts once.
  RowNames given;
  const auto give = [&](const std::vector<std::string>& each) {
    for (const std::string& name : each) {
      if (known.Find(name) < 0) given.Add(name);
    }
  };
  give(taken->given.of(granularity).names());
  const int32_t before = given.size();
  give(names->names);
  if (given.size() > before) {
    Layout more = layout;
    int32_t& count = granularity == Granularity::kTensor ? more.tensors : more.modules;
    count = std::max(count, std::min(known.size() + given.size(), kNamedRowsMax));
    const absl::Status admitted =
        admission_->AdmitRows(snapshot->record, more, runs_.table->List(), clock_->UnixNanos());
    if (!admitted.ok()) {
      const RunEvent event{names->attempt,
                           std::max<int64_t>(snapshot->record.step, 0),
                           EventKind::kAnnotation,
                           0,
                           WordsOfRefused(admitted, names->names.size(), taken),
                           clock_->UnixNanos()};
      if (!event.text.empty()) LogWarning("run {}: {}", snapshot->record.description.name, event.text);
      *payload = EncodeEvent(event, message->seq);
      message->body = event;
      return;
    }
  }
  taken->given.of(granularity) = std::move(given);
  const auto rows_with = [&](Granularity each) { return rows->of(each).size() + taken->given.of(each).size(); };
  taken->until.tensors = std::min(rows_with(Granularity::kTensor), kNamedRowsMax);
  taken->until.modules = std::min(rows_with(Granularity::kModule), kNamedRowsMax);
}

absl::StatusOr<IngestSession::Taken> IngestCoordinator::Put(RankSession* session, IngestMessage& message,
                                                            std::string& payload) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  const RunId run = session->run().id;
  Shard& shard = shards_.Of(run);
  {
    absl::MutexLock lock(&shard.mutex());
    RankSlot& slot = *session->slot();
    if (slot.epoch != session->epoch()) return IngestSession::Taken::kFenced;
    if (message.seq <= slot.last_seq) {
      // The duplicate is durable at the latest with the log's newest record.
      PendingAcks(run).push_back({log_->last_lsn(), PendingAck::Of::kMessage, message.seq, clock_->MonotonicNanos(),
                                  session->shared_from_this()});
    } else {
      BW_RETURN_IF_ERROR(CheckRise(*session, message.seq));
      const size_t bytes = payload.size();
      const auto wait_for_room = [&] {
        shard.CallWhenRoom([waiting = session->weak_from_this()] {
          if (const auto alive = waiting.lock()) alive->Notify([](SessionOwner* owner) { owner->OnRoom(); });
        });
        return IngestSession::Taken::kBusy;
      };
      if (!shard.HasRoom(bytes)) return wait_for_room();
      AdmitNames(run, session->names(), &message, &payload);
      WalRecord record;
      record.kind = WalKind::kMessage;
      record.run = run;
      record.rank = session->rank();
      record.epoch = session->epoch();
      record.seq = message.seq;
      record.time_unix_ms = clock_->UnixMillis();
      record.payload = std::move(payload);
      const uint64_t seq = message.seq;
      const auto appended = shard.Append(std::move(record), std::move(message), bytes);
      if (!appended.ok()) {
        if (!absl::IsResourceExhausted(appended.status())) return appended.status();
        payload = std::move(record.payload);
        return wait_for_room();
      }
      if (seq != slot.last_seq + 1) gaps_->Add();
      slot.last_seq = seq;
      PendingAcks(run).push_back(
          {*appended, PendingAck::Of::kMessage, seq, clock_->MonotonicNanos(), session->shared_from_this()});
      return IngestSession::Taken::kTaken;
    }
  }
  OnDurable(log_->LaneOf(run), log_->LogOf(run)->durable_lsn());
  return IngestSession::Taken::kDuplicate;
}

bool IngestCoordinator::Bye(RankSession* session, IngestMessage message, std::string payload) {
  const RunEntry& run = session->run();
  Shard& shard = shards_.Of(run.id);
  absl::MutexLock lock(&shard.mutex());
  if (session->slot()->epoch != session->epoch()) return false;
  WalRecord record;
  record.kind = WalKind::kBye;
  record.run = run.id;
  record.rank = session->rank();
  record.epoch = session->epoch();
  record.time_unix_ms = clock_->UnixMillis();
  record.payload = std::move(payload);
  const auto lsn = shard.Append(std::move(record), std::move(message));
  if (!lsn.ok()) {
    LogWarning("run {}: the goodbye of rank {} is lost: {}", run.description.name, session->rank(),
               std::string(lsn.status().message()));
    return false;
  }
  PendingAcks(run.id).push_back({*lsn, PendingAck::Of::kBye, 0, clock_->MonotonicNanos(), session->shared_from_this()});
  return true;
}

void IngestCoordinator::OnDurable(uint32_t lane, Lsn durable) {
  const int64_t now_ns = clock_->MonotonicNanos();
  for (size_t i = 0; i < shards_.size(); ++i) {
    std::vector<PendingAck> ready;
    {
      absl::MutexLock lock(&shards_[i].mutex());
      std::deque<PendingAck>& pending = PendingAcks(i, lane);
      while (!pending.empty() && pending.front().lsn <= durable) {
        ready.push_back(std::move(pending.front()));
        pending.pop_front();
      }
    }
    // One acknowledgement per session: of its highest seq.
    std::map<RankSession*, const PendingAck*> last;
    for (const PendingAck& ack : ready) {
      if (ack.of == PendingAck::Of::kBye) continue;
      ack_seconds_->Observe(static_cast<double>(now_ns - ack.since_ns) * 1e-9);
      if (ack.of == PendingAck::Of::kHello) {
        ack.session->Notify([&](SessionOwner* owner) { owner->OnOpen(ack.seq); });
      } else {
        last[ack.session.get()] = &ack;
      }
    }
    for (const auto& [session, ack] : last) {
      session->Notify([&](SessionOwner* owner) { owner->OnDurable(ack->seq); });
    }
    for (const PendingAck& ack : ready) {  // After every other acknowledgement of the session.
      if (ack.of == PendingAck::Of::kBye) ack.session->Notify([](SessionOwner* owner) { owner->OnGoodbye(); });
    }
  }
}

void IngestCoordinator::AwaitApplied(RunId run) {
  (void)replay_.Await();
  Shard& shard = shards_.Of(run);
  shard.Barrier([] {});  // The worker has the run's Gram matrices.
  runs_.spectra->AwaitIdle();
  shard.CommitAll();
}

void IngestCoordinator::EndUnheard(RunId run) {
  AwaitApplied(run);
  shards_.Of(run).PublishApplied(run);
  const RunSnapshotPtr snapshot = runs_.table->Get(run);
  if (snapshot == nullptr || snapshot->record.ended) return;
  const RunSilentMessage silent{snapshot->record.last_report_unix_ns / 1'000'000};
  WalRecord record;
  record.kind = WalKind::kRunSilent;
  record.run = run;
  record.attempt = snapshot->record.description.attempt;
  record.payload = EncodeRunSilent(silent);
  if (const absl::Status ended = shards_.LogAndApply(std::move(record), {0, silent}); !ended.ok()) {
    LogWarning("run {} stays open until it has been silent for long enough: {}", snapshot->record.description.name,
               std::string(ended.message()));
  }
}

bool IngestCoordinator::HandOver(RunId run, uint32_t rank, const Action& action) {
  std::shared_ptr<RankSession> session;
  {
    absl::MutexLock registry(&registry_.mutex());
    const std::shared_ptr<RunEntry> entry = registry_.Find(run);
    if (entry == nullptr) return false;
    absl::MutexLock lock(&shards_.Of(run).mutex());
    const auto slot = entry->ranks.find(rank);
    if (slot == entry->ranks.end() || slot->second == nullptr) return false;
    session = slot->second->session.lock();
  }
  if (session == nullptr) return false;
  bool passed = false;
  session->Notify([&](SessionOwner* owner) {
    owner->OnAction(action);
    passed = true;
  });
  return passed;
}

bool IngestCoordinator::IsAttached(RunId run) {
  absl::MutexLock registry(&registry_.mutex());
  const std::shared_ptr<RunEntry> entry = registry_.Find(run);
  if (entry == nullptr) return false;
  absl::MutexLock lock(&shards_.Of(run).mutex());
  return std::any_of(entry->ranks.begin(), entry->ranks.end(), [](const auto& rank) {
    const auto session = rank.second == nullptr ? nullptr : rank.second->session.lock();
    return session != nullptr && session->attached();
  });
}

void IngestCoordinator::RequestDeeperHeads() {
  absl::MutexLock registry(&registry_.mutex());
  for (const std::shared_ptr<RunEntry>& run : registry_.List(0, std::numeric_limits<RunId>::max())) {
    const RunSnapshotPtr snapshot = runs_.table->Get(run->id);
    if (snapshot == nullptr || snapshot->record.ended) continue;
    const std::vector<Head> deeper = DeeperHeads(*snapshot);
    std::vector<std::shared_ptr<RankSession>> ask;
    {
      absl::MutexLock lock(&shards_.Of(run->id).mutex());
      for (const auto& [rank, slot] : run->ranks) {
        auto session = slot->session.lock();
        if (session == nullptr || slot->deeper == deeper) continue;
        slot->deeper = deeper;
        ask.push_back(std::move(session));
      }
    }
    for (const auto& session : ask) {
      session->Notify([&](SessionOwner* owner) { owner->OnDeeper(deeper); });
    }
  }
}

std::vector<std::shared_ptr<RankSession>> IngestCoordinator::Fence(RunId first, RunId end) {
  std::vector<std::shared_ptr<RankSession>> sessions;
  for (const std::shared_ptr<RunEntry>& run : registry_.List(first, end)) {
    absl::MutexLock lock(&shards_.Of(run->id).mutex());
    std::erase_if(PendingAcks(run->id), [&run](const PendingAck& ack) { return &ack.session->run() == run.get(); });
    for (const auto& [rank, slot] : run->ranks) {
      ++slot->epoch;  // The session's next message is refused.
      if (auto session = slot->session.lock()) sessions.push_back(std::move(session));
      slot->session.reset();
    }
  }
  return sessions;
}

}  // namespace bellwether::server
