// message.h: a trainer's message, checked and free of protobuf.

#ifndef BELLWETHER_SERVER_INGEST_MESSAGE_H_
#define BELLWETHER_SERVER_INGEST_MESSAGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "server/model/action.h"
#include "server/model/false_alarm.h"
#include "server/model/gram_types.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"
#include "server/store/wal.h"

namespace bellwether::server {

struct HelloMessage {
  RunDescription run;
  uint32_t rank = 0;
  uint64_t first_unacked_seq = 0;
  uint64_t dropped_total = 0;
  uint64_t stripped_total = 0;
  uint32_t kinds_mask = 0;       // Bit k: ActionKind k can be applied there.
  bool ranks_agree = false;      // It passes actions on to all ranks and answers for them.
  std::string import_of;         // As RunRecord's,
  bool import_notifies = false;  // both.
};

// What rows of a rank are, from `first` on.
struct NamesMessage {
  uint32_t attempt = 0;
  Granularity granularity = Granularity::kTensor;
  int32_t first = 0;
  std::vector<std::string> names;
};

struct ActionResultMessage {
  std::string id;
  uint32_t attempt = 0;
  bool applied = false;
  int64_t step = 0;
  std::string reason;
};

struct HeartbeatMessage {
  uint64_t dropped_total = 0;
  uint64_t stripped_total = 0;
};

struct ByeMessage {
  enum class Reason : uint8_t { kUnknown = 0, kFinished = 1, kDied = 2, kDetached = 3 };
  Reason reason = Reason::kUnknown;
  std::string detail;
};

// Messages of the server itself, through its own log, so that a replay decides
// the same.  A step was closed by its deadline.  Ranks fell silent, or a whole
// run did.  Other rules or another policy are in force.  Gram matrices have
// given signals or were left alone.  People asked something about actions, or
// called an alert a false alarm.  An action was handed out.
struct StepClosedMessage {
  uint32_t attempt = 0;
  int64_t step = 0;
};
struct SilenceMessage {
  uint32_t silent_ranks = 0;
  int64_t seconds = 0;
};
struct RunSilentMessage {
  int64_t last_report_unix_ms = 0;  // A rank that reports after this time is not late.
};
struct RulesMessage {
  std::shared_ptr<const std::string> text;  // Never null; shared by many runs.
};

struct SpectraMessage {
  std::vector<GramAnswer> answers;
};

// The result of a request.  Not in the log: the caller waits for it.
struct ActionOutcome {
  absl::Status status;
  Action action;
};
struct ActionRequestMessage {
  ActionRequest request;
  std::string malformed;                   // Why it cannot even be asked; kept for the audit.
  std::shared_ptr<ActionOutcome> outcome;  // Null in recovery.
};
struct PolicyMessage {
  std::shared_ptr<const std::string> text;  // Never null; shared by many runs.
  bool own = false;                         // A person set it for this run; else it is the server's.
  std::string by;                           // The caller's name.
  std::string malformed;                    // As above.
  std::shared_ptr<ActionOutcome> outcome;
};
struct ActionSentMessage {
  std::string id;
};

struct FalseAlarmMessage {
  FalseAlarm said;
};

struct RenameMessage {
  std::string name;
};

struct IngestMessage {
  uint64_t seq = 0;
  std::variant<HelloMessage, RankFrame, ShippedGram, RunEvent, ActionResultMessage, HeartbeatMessage, ByeMessage,
               StepClosedMessage, SilenceMessage, RulesMessage, SpectraMessage, ActionRequestMessage, PolicyMessage,
               ActionSentMessage, RunSilentMessage, NamesMessage, FalseAlarmMessage, RenameMessage>
      body;
};

// A message in the order of the log.
struct LoggedMessage {
  Lsn lsn = 0;
  RunId run = 0;
  uint32_t rank = 0;
  uint64_t epoch = 0;        // Of the rank's session; 0 = a message of the server.
  int64_t time_unix_ms = 0;  // When the server took it.
  IngestMessage message;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_MESSAGE_H_
