// action.h: one thing to do in a training job, what people ask about it, and
// what is kept of their asking, as plain structs.
//
// The fields are those of actions.proto and query.proto, which specify them.

#ifndef BELLWETHER_SERVER_MODEL_ACTION_H_
#define BELLWETHER_SERVER_MODEL_ACTION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/model/run_types.h"

namespace bellwether::server {

inline constexpr size_t kActionIdBytesMax = 64;
inline constexpr size_t kPolicyBytesMax = 64 << 10;
inline constexpr size_t kScopeLayersMax = 512;
inline constexpr size_t kScopeHeadsMax = 64;
// The authors of changes that no person made; a person may not have these
// names.
inline constexpr char kServerName[] = "server";
inline constexpr char kPolicyName[] = "policy";

// Numbers as ActionKind in actions.proto.
enum class ActionKind : uint8_t {
  kNone = 0,
  kAttentionMode = 1,
  kCenterK = 2,
  kQkClip = 3,
  kLrScale = 4,
  kCheckpointNow = 5,
  kBatchSkip = 6,
  kSamplingDeepen = 7,
  kStop = 8,
  kRollbackSuggest = 9,
};
inline constexpr int kActionKindEnd = 10;

// Numbers as ActionState in actions.proto.
enum class ActionState : uint8_t {
  kNone = 0,
  kProposed = 1,
  kApproved = 2,
  kSent = 3,
  kApplied = 4,
  kRefused = 5,
  kExpired = 6,
  kHelped = 7,
  kDidNotHelp = 8,
  kKept = 9,
  kUndone = 10,
  kEscalated = 11,
};

// Both empty: the whole model.
struct ActionScope {
  std::vector<int32_t> layers;  // Ascending, each once; <= 512
  std::vector<Head> heads;      // Strongest first; <= 64
  bool operator==(const ActionScope&) const = default;
};

struct ActionChange {
  ActionState state = ActionState::kNone;
  int64_t time_unix_ns = 0;
  std::string by;      // A person, "policy", "rank 0", "server"
  std::string reason;  // <= 256 bytes
  int64_t step = 0;
  bool operator==(const ActionChange&) const = default;
};

struct Action {
  std::string id;  // <first 8 digits of the run's uuid>-<n>, n = 1, 2, ... in the run
  uint32_t attempt = 0;
  ActionKind kind = ActionKind::kNone;
  ActionScope scope;
  std::string mode;           // Of attention.mode.
  double value = 0;           // gamma, factor, batches, period; center_k: 1 on, 0 off
  int64_t apply_at_step = 0;  // 0 = the next boundary
  int64_t expires_unix_ns = 0;
  std::string expected_effect;
  std::string cost;
  std::string asked_by;
  std::string alert_key;
  std::string undoes;  // Id of the action that this one takes back; empty = none.
  ActionState state = ActionState::kNone;
  std::vector<ActionChange> history;  // Oldest first; <= 64.
  // While it is proposed: why the trainer would refuse it as things stand; <= 256 bytes.
  // Empty = it can be approved, or not all of its ranks have said what they can apply.
  std::string not_allowed;
};

// What a person asked, checked for form only; through the log.
struct ActionRequest {
  enum class Verb : uint8_t { kPropose = 1, kApprove = 2, kReject = 3, kUndo = 4 };
  Verb verb = Verb::kPropose;
  // kPropose: kind, scope, mode, value, apply_at_step, expires_unix_ns, alert_key;
  // state kApproved: approve it as well, both or neither.
  Action action;
  std::string id;      // Of the others.
  std::string by;      // <= 128 bytes
  std::string reason;  // <= 256 bytes
};

// Requests that came to nothing, and changes of policy, which stand in no
// action's history.
struct AuditEntry {
  int64_t time_unix_ns = 0;
  int64_t step = -1;  // The run's newest; -1 = none
  std::string by;
  std::string what;  // "propose", "approve", "reject", "undo", "set_policy"
  std::string action_id;
  ActionKind kind = ActionKind::kNone;
  std::string refused;  // Why; empty = it was done.
  std::string detail;   // The reason that was given, or the policy's text.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ACTION_H_
