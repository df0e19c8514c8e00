#include "client_lib/src/validate.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "bellwether/signal_table.h"
#include "client_lib/src/last_error.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {
namespace {

// Granularity of every measured signal by id; 0 = no such, or derived.
struct MeasuredTable {
  uint8_t granularity[kSignalIdEnd] = {};

  MeasuredTable() {
    for (size_t i = 0; i < SignalCount(); ++i) {
      const SignalInfo& info = SignalTable()[i];
      if (!info.derived) granularity[static_cast<int>(info.id)] = static_cast<uint8_t>(info.granularity);
    }
  }
};
const MeasuredTable measured;

bool InRange(const char* name, uint32_t value, uint32_t min, uint32_t max) {
  if (value >= min && value <= max) return true;
  SetLastError("%s is %u, must be %u..%u", name, value, min, max);
  return false;
}

bool IsRunName(const char* name) {
  const size_t bytes = strnlen(name, kRunNameMax + 1);
  if (bytes < 1 || bytes > kRunNameMax) return false;
  for (size_t i = 0; i < bytes; ++i) {
    const char c = name[i];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!letter && (c == '\0' || std::strchr("_.:/-", c) == nullptr)) return false;
  }
  return true;
}

bool IsOwnName(const char* name) {
  const size_t bytes = strnlen(name, 65);
  if (bytes > 64 || name[0] < 'a' || name[0] > 'z') return false;
  for (size_t i = 0; i < bytes; ++i) {
    const char c = name[i];
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (!plain && std::strchr("_./-", c) == nullptr) return false;
  }
  return true;
}

// Length of the UTF-8 character at `s`, 0 if it is none.  `s` ends with a zero,
// so that a cut character fails at the zero.
size_t CharacterBytes(const unsigned char* s) {
  const auto follows = [s](int from, int count) {
    for (int i = from; i < from + count; ++i) {
      if ((s[i] & 0xC0) != 0x80) return false;
    }
    return true;
  };
  if (s[0] < 0x80) return 1;
  if (s[0] >= 0xC2 && s[0] <= 0xDF) return follows(1, 1) ? 2 : 0;
  if (s[0] >= 0xE0 && s[0] <= 0xEF) {
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0;  // Overlong.
    if (s[0] == 0xED && s[1] > 0x9F) return 0;  // Surrogate.
    return follows(1, 2) ? 3 : 0;
  }
  if (s[0] >= 0xF0 && s[0] <= 0xF4) {
    if (s[0] == 0xF0 && s[1] < 0x90) return 0;
    if (s[0] == 0xF4 && s[1] > 0x8F) return 0;
    return follows(1, 3) ? 4 : 0;
  }
  return 0;
}

bool IsPath(const char* name, const char* path) {
  if (path == nullptr || (path[0] != '\0' && strnlen(path, kPathMax) < kPathMax)) return true;
  SetLastError("%s is %s, must be a path of 1..%u bytes or NULL", name, path[0] == '\0' ? "empty" : "too long",
               kPathMax - 1);
  return false;
}

bool IsFlag(const char* name, uint8_t value) { return InRange(name, value, 0, 1); }

// Certificates and tokens never cross a network in the clear.
bool IsLoopback(std::string_view server) {
  return server.rfind("unix:", 0) == 0 || server.rfind("127.", 0) == 0 || server.rfind("localhost:", 0) == 0 ||
         server.rfind("[::1]:", 0) == 0;
}

bool ValidateServer(const bw_client_options& o) {
  if (o.server == nullptr && o.record_path == nullptr) {
    SetLastError("server and record_path are both NULL, one must be given");
    return false;
  }
  if (o.server != nullptr) {
    const size_t bytes = strnlen(o.server, kServerMax + 1);
    if (bytes < 3 || bytes > kServerMax || std::strchr(o.server, ':') == nullptr) {
      SetLastError("server is \"%.100s\", must be host:port or unix:/path, at most %u bytes", o.server, kServerMax);
      return false;
    }
  }
  if ((o.tls_cert == nullptr) != (o.tls_key == nullptr)) {
    SetLastError("tls_cert and tls_key must be given together; %s is NULL",
                 o.tls_cert == nullptr ? "tls_cert" : "tls_key");
    return false;
  }
  if (o.tls_cert != nullptr && o.tls_ca == nullptr) {
    SetLastError("tls_ca is NULL, must be given with tls_cert");
    return false;
  }
  if (o.token_file != nullptr && o.server != nullptr && o.tls_ca == nullptr && !IsLoopback(o.server)) {
    SetLastError("token_file needs tls_ca, or a server on loopback or a unix socket; server is \"%.100s\"", o.server);
    return false;
  }
  return IsPath("record_path", o.record_path) && IsPath("sender_path", o.sender_path) && IsPath("tls_ca", o.tls_ca) &&
         IsPath("tls_cert", o.tls_cert) && IsPath("tls_key", o.tls_key) && IsPath("token_file", o.token_file) &&
         IsPath("log_path", o.log_path) && IsPath("spool_dir", o.spool_dir);
}

bool ValidateSpool(const bw_client_options& o) {
  if (o.spool_dir != nullptr && o.server == nullptr) {
    SetLastError("spool_dir is given and server is NULL: there is nobody to send it to");
    return false;
  }
  if (o.spool_bytes == 0 || (o.spool_bytes >= kSpoolBytesMin && o.spool_bytes <= kSpoolBytesMax)) return true;
  SetLastError("spool_bytes is %llu, must be 0 or %llu..%llu", static_cast<unsigned long long>(o.spool_bytes),
               static_cast<unsigned long long>(kSpoolBytesMin), static_cast<unsigned long long>(kSpoolBytesMax));
  return false;
}

// As the server's ShapeOf().
struct Rectangle {
  uint32_t layers = 0, heads = 0;
};
Rectangle AllOf(Granularity granularity, const FrameLimits& limits) {
  switch (granularity) {
    case Granularity::kRun:
      return {1, 1};
    case Granularity::kHead:
      return {limits.layers, limits.heads};
    case Granularity::kKvHead:
      return {limits.layers, limits.kv_heads};
    case Granularity::kLayer:
      return {limits.layers, 1};
    case Granularity::kExpert:
      return {limits.layers, limits.experts};
    case Granularity::kRank:
      return {limits.world, 1};
    case Granularity::kTensor:
      return {limits.tensors, 1};
    case Granularity::kModule:
      return {limits.modules, 1};
    case Granularity::kOwn:
      return {0, 0};  // They are no blocks.
  }
  return {};
}

bool ValidateBlock(const bw_block& b, uint32_t index, const FrameLimits& limits) {
  const uint8_t granularity = b.signal < kSignalIdEnd ? measured.granularity[b.signal] : 0;
  if (granularity == 0) {
    SetLastError("blocks[%u].signal is %u, must be a measured signal of the catalogue (bw_signal_by_name)", index,
                 b.signal);
    return false;
  }
  if (b.reserved != 0) {
    SetLastError("blocks[%u].reserved is %u, must be 0", index, b.reserved);
    return false;
  }
  if (b.values == nullptr) {
    SetLastError("blocks[%u].values is NULL", index);
    return false;
  }
  const Rectangle all = AllOf(static_cast<Granularity>(granularity), limits);
  const uint32_t layers = all.layers, heads = all.heads;
  if (layers == 0 || heads == 0) {
    SetLastError("blocks[%u].signal is %u, of which this client has no rows (bw_client_push_names, experts)", index,
                 b.signal);
    return false;
  }
  // Subtracts instead of adding: begin + count may wrap around.
  if (b.layer_count < 1 || b.layer_count > layers || b.layer_begin > layers - b.layer_count) {
    SetLastError("blocks[%u] covers layers %u + %u, must lie within 0..%u", index, b.layer_begin, b.layer_count,
                 layers - 1);
    return false;
  }
  if (b.head_count < 1 || b.head_count > heads || b.head_begin > heads - b.head_count) {
    SetLastError("blocks[%u] covers heads %u + %u, must lie within 0..%u (signal %u)", index, b.head_begin,
                 b.head_count, heads - 1, b.signal);
    return false;
  }
  return true;
}

// The indices of two equal names; 0, 0: there are none.
std::pair<uint32_t, uint32_t> SameNames(const char* const* names, uint32_t count) {
  static_assert(BW_NAMED_ROWS_MAX <= UINT16_MAX + 1);
  uint16_t order[BW_NAMED_ROWS_MAX];  // A trainer's heap is not ours.
  std::iota(order, order + count, uint16_t{0});
  std::sort(order, order + count, [names](uint16_t a, uint16_t b) {
    const int by_name = std::strcmp(names[a], names[b]);
    return by_name != 0 ? by_name < 0 : a < b;
  });
  const uint16_t* const end = order + count;
  const uint16_t* const found =
      std::adjacent_find(static_cast<const uint16_t*>(order), end,
                         [names](uint16_t a, uint16_t b) { return std::strcmp(names[a], names[b]) == 0; });
  return found == end ? std::pair(0u, 0u) : std::pair<uint32_t, uint32_t>(found[0], found[1]);
}

}  // namespace

bool ValidateText(const char* name, const char* text, size_t bytes_max, uint32_t* bytes) {
  *bytes = 0;
  if (text == nullptr) return true;
  const size_t length = strnlen(text, bytes_max + 1);
  if (length > bytes_max) {
    SetLastError("%s is longer than %zu bytes", name, bytes_max);
    return false;
  }
  const auto* s = reinterpret_cast<const unsigned char*>(text);
  for (size_t i = 0; i < length;) {
    const size_t step = CharacterBytes(s + i);
    if (step == 0 || s[i] < 0x20 || s[i] == 0x7F) {
      SetLastError("%s has byte 0x%02x at %zu, must be UTF-8 without control characters", name, s[i], i);
      return false;
    }
    i += step;
  }
  *bytes = static_cast<uint32_t>(length);
  return true;
}

bool ParseUuid(const char* text, uint8_t (&uuid)[16]) {
  if (strnlen(text, 33) != 32) return false;
  for (int i = 0; i < 32; ++i) {
    const char c = text[i];
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else {
      return false;
    }
    uuid[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? digit << 4 : uuid[i / 2] | digit);
  }
  return true;
}

bool CopyOptions(const bw_client_options* given, bw_client_options* options) {
  constexpr size_t kBytes1_0 = offsetof(bw_client_options, ranks_agree);
  if (given->struct_size < kBytes1_0) {
    SetLastError("options.struct_size is %u, must be at least %zu", given->struct_size, kBytes1_0);
    return false;
  }
  *options = {};
  std::memcpy(options, given, std::min<size_t>(given->struct_size, sizeof(*options)));
  return true;
}

bool ValidateOptions(const bw_client_options& o) {
  const uint32_t world = o.world == 0 ? 1 : o.world;
  if (!InRange("world", world, 1, BW_WORLD_MAX) || !InRange("rank", o.rank, 0, world - 1) ||
      !InRange("reporters", o.reporters == 0 ? world : o.reporters, 1, world) ||
      !InRange("attempt", o.attempt, 0, kAttemptMax) || !InRange("layers", o.layers, 1, BW_LAYERS_MAX) ||
      !InRange("heads", o.heads, 1, BW_HEADS_MAX) ||
      !InRange("kv_heads", o.kv_heads == 0 ? o.heads : o.kv_heads, 1, o.heads) ||
      !InRange("head_dim", o.head_dim, 0, 1024) || !InRange("seq_len", o.seq_len, 0, kSeqLenMax) ||
      !InRange("window", o.window, 0, INT32_MAX) ||
      !InRange("ring_frames", o.ring_frames == 0 ? kRingFramesDefault : o.ring_frames, 2, kRingFramesMax)) {
    return false;
  }
  if (o.kv_heads != 0 && o.heads % o.kv_heads != 0) {
    SetLastError("kv_heads is %u, must divide heads, %u", o.kv_heads, o.heads);
    return false;
  }
  if (o.run == nullptr || !IsRunName(o.run)) {
    SetLastError("run is \"%.140s\", must match [a-zA-Z0-9_.:/-]{1,128}", o.run == nullptr ? "" : o.run);
    return false;
  }
  uint8_t uuid[16];
  if (o.run_uuid != nullptr && !ParseUuid(o.run_uuid, uuid)) {
    SetLastError("run_uuid is \"%.40s\", must be 32 hexadecimal digits", o.run_uuid);
    return false;
  }
  uint32_t bytes;
  if (!ValidateServer(o) || !ValidateText("framework", o.framework, 64, &bytes) ||
      !ValidateText("model", o.model, 128, &bytes) ||
      !ValidateText("attention_kernel", o.attention_kernel, 64, &bytes) ||
      !ValidateText("score_dtype", o.score_dtype, 16, &bytes)) {
    return false;
  }
  if (!std::isfinite(o.weight_decay)) {
    SetLastError("weight_decay is %g, must be finite", o.weight_decay);
    return false;
  }
  if (!(o.softcap >= 0) || !std::isfinite(o.softcap)) {
    SetLastError("softcap is %g, must be finite and >= 0", static_cast<double>(o.softcap));
    return false;
  }
  if (!IsFlag("causal", o.causal) || !IsFlag("centred", o.centred) || !IsFlag("qk_norm", o.qk_norm) ||
      !IsFlag("step_from_attach", o.step_from_attach)) {
    return false;
  }
  constexpr uint32_t kActions = (2u << kActionKindMax) - 2;  // Bits 1..kActionKindMax.
  if ((o.actions_mask & ~kActions) != 0) {
    SetLastError("actions_mask is 0x%x, must have no bit outside 0x%x", o.actions_mask, kActions);
    return false;
  }
  if (o.launch_unix_ms < 0 || o.launch_unix_ms > kLaunchUnixMsMax) {
    SetLastError("launch_unix_ms is %lld, must be 0..%lld", static_cast<long long>(o.launch_unix_ms),
                 static_cast<long long>(kLaunchUnixMsMax));
    return false;
  }
  return InRange("ranks_agree", o.ranks_agree, 0, 1) && InRange("experts", o.experts, 0, BW_EXPERTS_MAX) &&
         InRange("reserved", o.reserved, 0, 0) && ValidateSpool(o);
}

bool ValidateNames(uint32_t granularity, uint32_t first, uint32_t count, const char* const* names, FrameLimits limits,
                   uint32_t* bytes) {
  if (!InRange("granularity", granularity, static_cast<uint32_t>(Granularity::kTensor),
               static_cast<uint32_t>(Granularity::kModule)) ||
      !InRange("count", count, 1, BW_NAMED_ROWS_MAX) ||
      !InRange("first", first, 0, std::min(limits.named(granularity), BW_NAMED_ROWS_MAX - count))) {
    return false;
  }
  uint64_t all = 0;
  for (uint32_t i = 0; i < count; ++i) {
    char field[24];
    std::snprintf(field, sizeof(field), "names[%u]", i);
    uint32_t size = 0;
    if (!ValidateText(field, names[i], BW_ROW_NAME_MAX, &size)) return false;
    if (size == 0) {
      SetLastError("%s is empty, must have 1..%d bytes", field, BW_ROW_NAME_MAX);
      return false;
    }
    all += size + 1;
  }
  if (all > BW_NAMES_BYTES_MAX) {
    SetLastError("names have %llu bytes together, must have at most %u", static_cast<unsigned long long>(all),
                 BW_NAMES_BYTES_MAX);
    return false;
  }
  const auto [one, other] = SameNames(names, count);
  if (one != other) {
    SetLastError("names[%u] is \"%.140s\" as names[%u] is, each must be another", other, names[other], one);
    return false;
  }
  *bytes = static_cast<uint32_t>(all);
  return true;
}

bool ValidateStep(const char* what, int64_t step) {
  if (step >= 0 && step <= kStepMax) return true;
  SetLastError("%s is %lld, must be 0..%lld", what, static_cast<long long>(step), static_cast<long long>(kStepMax));
  return false;
}

bool CopyFrame(const bw_frame& given, bw_frame* frame) {
  constexpr size_t kBytes1_0 = offsetof(bw_frame, own_count);
  if (given.struct_size < kBytes1_0) {
    SetLastError("frame.struct_size is %u, must be at least %zu", given.struct_size, kBytes1_0);
    return false;
  }
  *frame = {};
  std::memcpy(frame, &given, std::min<size_t>(given.struct_size, sizeof(*frame)));
  return true;
}

bool ValidateOwn(const bw_own_values& own, uint32_t index, const FrameLimits& limits, OwnHeader* header) {
  const auto named = [index](const char* field, char(&to)[32]) {
    std::snprintf(to, sizeof(to), "own[%u].%s", index, field);
    return to;
  };
  char field[32];
  if (own.name == nullptr || !IsOwnName(own.name)) {
    SetLastError("own[%u].name is \"%.70s\", must match [a-z][a-z0-9_./-]{0,63}", index,
                 own.name == nullptr ? "" : own.name);
    return false;
  }
  if (FindSignal(std::string_view(own.name)) != nullptr) {
    SetLastError("own[%u].name is \"%.70s\", which is a signal of the catalogue: give it another name", index,
                 own.name);
    return false;
  }
  *header = {.low = own.low,
             .high = own.high,
             .granularity = own.granularity,
             .merge = own.merge,
             .layer = own.layer,
             .head = own.head,
             .count = own.count,
             .limits = own.limits,
             .text_bytes = {static_cast<uint32_t>(std::strlen(own.name)), 0, 0},
             .reserved = 0};
  if (!ValidateText(named("unit", field), own.unit, 32, &header->text_bytes[1]) ||
      !ValidateText(named("help", field), own.help, 256, &header->text_bytes[2]) ||
      !InRange(named("merge", field), own.merge, 1, 3) || !InRange(named("limits", field), own.limits, 0, 3)) {
    return false;
  }
  if (((own.limits & 1) != 0 && !std::isfinite(own.low)) || ((own.limits & 2) != 0 && !std::isfinite(own.high))) {
    SetLastError("own[%u]: low and high must be finite", index);
    return false;
  }
  if ((own.limits & 3) == 3 && own.low > own.high) {
    SetLastError("own[%u].low is %g, must be at most own[%u].high, which is %g", index, own.low, index, own.high);
    return false;
  }
  uint32_t rows = 1, columns = 1;
  switch (own.granularity) {
    case static_cast<uint32_t>(Granularity::kRun):
      break;
    case static_cast<uint32_t>(Granularity::kLayer):
      rows = BW_LAYERS_MAX;
      break;
    case static_cast<uint32_t>(Granularity::kRank):
      rows = limits.world;
      break;
    case static_cast<uint32_t>(Granularity::kHead):
      rows = BW_LAYERS_MAX, columns = BW_HEADS_MAX;
      break;
    case static_cast<uint32_t>(Granularity::kExpert):
      rows = BW_LAYERS_MAX, columns = BW_EXPERTS_MAX;
      break;
    default:
      SetLastError("own[%u].granularity is %u, must be 1 run, 2 head, 4 layer, 5 expert or 6 rank", index,
                   own.granularity);
      return false;
  }
  const bool across = columns > 1;
  if (!InRange(named("count", field), own.count, 1, std::min<uint32_t>(BW_OWN_VALUES_MAX, across ? columns : rows)) ||
      !InRange(named("layer", field), own.layer, 0, rows - (across ? 1 : own.count)) ||
      !InRange(named("head", field), own.head, 0, columns - (across ? own.count : 1))) {
    return false;
  }
  if (own.values == nullptr) {
    SetLastError("own[%u].values is NULL", index);
    return false;
  }
  return true;
}

bool ValidateFrame(const bw_frame& f, const FrameLimits& limits, uint64_t* values) {
  if (f.blocks == nullptr) {
    SetLastError("frame.blocks is NULL");
    return false;
  }
  if (!InRange("frame.block_count", f.block_count, 1, BW_BLOCKS_MAX) || !ValidateStep("frame.step", f.step) ||
      !InRange("frame.partial_rows", f.partial_rows, 0, 1) || !InRange("frame.reserved", f.reserved, 0, 0) ||
      !InRange("frame.own_count", f.own_count, 0, BW_OWN_MAX) || !InRange("frame.reserved2", f.reserved2, 0, 0)) {
    return false;
  }
  if (f.own_count > 0 && f.own == nullptr) {
    SetLastError("frame.own is NULL and own_count is %u", f.own_count);
    return false;
  }
  if (f.time_unix_ns < 0) {
    SetLastError("frame.time_unix_ns is %lld, must be >= 0", static_cast<long long>(f.time_unix_ns));
    return false;
  }
  uint64_t total = 0;
  for (uint32_t i = 0; i < f.block_count; ++i) {
    if (!ValidateBlock(f.blocks[i], i, limits)) return false;
    total += uint64_t{f.blocks[i].layer_count} * f.blocks[i].head_count;
  }
  if (total > limits.frame_values_max) {
    SetLastError("frame has %llu values, must have at most frame_values_max, %llu",
                 static_cast<unsigned long long>(total), static_cast<unsigned long long>(limits.frame_values_max));
    return false;
  }
  *values = total;
  return true;
}

}  // namespace bellwether::client
