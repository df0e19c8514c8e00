// run_types.h: what a run is, as plain structs.
//
// Protobuf stops at ingest/ and query/; everything between them speaks these.

#ifndef BELLWETHER_SERVER_MODEL_RUN_TYPES_H_
#define BELLWETHER_SERVER_MODEL_RUN_TYPES_H_

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace bellwether::server {

// The server's own number of a run; never reused, never leaves the server's
// files.  People and the wire use name and uuid.
using RunId = uint64_t;
using RunUuid = std::array<uint8_t, 16>;

struct Layout {
  int32_t layers = 0;    // 1..512
  int32_t heads = 0;     // 1..1024 query heads per layer
  int32_t kv_heads = 0;  // 1..heads, divides heads
  int32_t head_dim = 0;  // 0 = unknown
  int32_t seq_len = 0;   // 0 = unknown
  int32_t experts = 0;   // Of a layer, at most 4096; 0 = none
  // What a run has more of as it goes on: processes, and rows by name (row_names.h).
  int32_t ranks = 0;
  int32_t tensors = 0;
  int32_t modules = 0;
  int32_t own = 0;  // Cells of own signals (own_signals.h).

  bool operator==(const Layout&) const = default;
  // In what the other is of another model: all but what grows.
  struct Difference {
    const char* field;
    int32_t held, offered;
  };
  std::vector<Difference> DifferencesOf(const Layout& other) const;
  // Takes over what the other has more of.
  void GrowTo(const Layout& other);
};

// -1 = the run, or the layer, as a whole.
struct Head {
  int32_t layer = -1;
  int32_t head = -1;
  bool operator==(const Head&) const = default;
  auto operator<=>(const Head&) const = default;
};

// What the kernel is fed, as Hello told it and Events changed it.
struct AttentionTraits {
  std::string kernel;
  std::string score_dtype;  // "bf16", "fp16", "fp32"
  bool centred = false;
  bool qk_norm = false;
  bool causal = false;
  float softcap = 0;
  int32_t window = 0;
};

struct RunDescription {
  std::string name;
  RunUuid uuid{};
  uint32_t attempt = 0;
  int64_t launch_unix_ms = 0;  // Of the attempt; 0 = not known.
  uint32_t world = 1;
  uint32_t reporters = 1;
  Layout layout;
  AttentionTraits attention;
  std::string framework;
  std::string model;
  double weight_decay = 0;
  bool step_from_attach = false;
  std::map<std::string, std::string> labels;
};

// Numbers as EventKind in runs.proto.
enum class EventKind : uint8_t {
  kNone = 0,
  kLearningRate = 1,
  kRestore = 2,
  kCheckpointSaved = 3,
  kEvaluation = 4,
  kAttach = 5,
  kDetach = 6,
  kCentringOn = 7,
  kCentringOff = 8,
  kAttentionMode = 9,
  kData = 10,
  kBatchSize = 11,
  kSequenceLength = 12,
  kAnnotation = 13,
};

struct RunEvent {
  uint32_t attempt = 0;
  int64_t step = 0;
  EventKind kind = EventKind::kNone;
  double value = 0;
  std::string text;
  int64_t time_unix_ns = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_RUN_TYPES_H_
