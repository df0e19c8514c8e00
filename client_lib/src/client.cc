#include "client_lib/src/client.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <new>

#include "client_lib/src/last_error.h"
#include "client_lib/src/regular_file.h"
#include "client_lib/src/run_uuid.h"
#include "client_lib/src/watchdog.h"

namespace bellwether::client {
namespace {

// pthread_atfork() handlers cannot be removed: the library is linked with
// -z nodelete so that this one stays where it is.
std::atomic<uint64_t> fork_generation{0};
void CountFork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

constexpr uint32_t kFrameSignalsPerHead = 100;
constexpr uint32_t kFrameSignalsPerRun = 32;
constexpr uint32_t kFrameSignalsPerLayer = 16;
constexpr uint32_t kFrameSignalsPerExpert = 4;
constexpr uint32_t kFrameSignalsPerTensor = 8;

int64_t NowUnixNs() {
  struct timespec now {};
  clock_gettime(CLOCK_REALTIME, &now);  // In user space, by the vdso.
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

template <size_t kBytes>
void Copy(const char* from, char (&to)[kBytes]) {
  if (from != nullptr) std::memcpy(to, from, strnlen(from, kBytes - 1));
}

// The trainer may change its folder before the sender starts, or restarts.
bool CopyPath(const char* name, const char* from, char (&to)[kPathMax]) {
  if (from == nullptr) return true;
  std::string path = from;
  if (path[0] != '/') {
    char folder[PATH_MAX];
    if (getcwd(folder, sizeof(folder)) == nullptr) {
      SetLastError("%s is relative and the working directory is unknown: %s", name, std::strerror(errno));
      return false;
    }
    path = std::string(folder) + "/" + path;
  }
  if (path.size() >= kPathMax) {
    SetLastError("%s has %zu bytes as an absolute path, must have at most %u", name, path.size(), kPathMax - 1);
    return false;
  }
  std::memcpy(to, path.data(), path.size());
  return true;
}

bool FillConfig(const bw_client_options& o, SenderConfig* config) {
  config->rank = o.rank;
  config->world = o.world == 0 ? 1 : o.world;
  config->reporters = o.reporters == 0 ? config->world : o.reporters;
  config->attempt = o.attempt;
  config->launch_unix_ms = o.launch_unix_ms;
  config->layers = o.layers;
  config->heads = o.heads;
  config->kv_heads = o.kv_heads == 0 ? o.heads : o.kv_heads;
  config->head_dim = o.head_dim;
  config->seq_len = o.seq_len;
  config->window = o.window;
  config->experts = o.experts;
  config->actions_mask = o.actions_mask;
  config->causal = o.causal;
  config->centred = o.centred;
  config->qk_norm = o.qk_norm;
  config->step_from_attach = o.step_from_attach;
  config->ranks_agree = o.ranks_agree != 0 ? 1 : 0;
  config->weight_decay = o.weight_decay;
  config->softcap = o.softcap;
  config->spool_bytes = o.spool_bytes == 0 ? kSpoolBytesDefault : o.spool_bytes;
  if (o.run_uuid == nullptr || !ParseUuid(o.run_uuid, config->run_uuid)) RunUuidFromName(o.run, config->run_uuid);
  Copy(o.run, config->run);
  Copy(o.server, config->server);
  Copy(o.framework, config->framework);
  Copy(o.model, config->model);
  Copy(o.attention_kernel, config->attention_kernel);
  Copy(o.score_dtype, config->score_dtype);
  return CopyPath("record_path", o.record_path, config->record_path) && CopyPath("tls_ca", o.tls_ca, config->tls_ca) &&
         CopyPath("tls_cert", o.tls_cert, config->tls_cert) && CopyPath("tls_key", o.tls_key, config->tls_key) &&
         CopyPath("token_file", o.token_file, config->token_file) &&
         CopyPath("log_path", o.log_path, config->log_path) && CopyPath("spool_dir", o.spool_dir, config->spool_dir);
}

}  // namespace

uint64_t ForkGeneration() { return fork_generation.load(std::memory_order_relaxed); }

bw_status Client::Create(const bw_client_options& options, std::unique_ptr<Client>* client) {
  static const int atfork_error = pthread_atfork(nullptr, nullptr, &CountFork);
  if (atfork_error != 0) {
    SetLastError("pthread_atfork: %s", std::strerror(atfork_error));
    return BW_UNAVAILABLE;
  }
  const uint64_t from_layout = uint64_t{options.layers} * options.heads * kFrameSignalsPerHead + kFrameSignalsPerRun +
                               uint64_t{BW_NAMED_ROWS_MAX} * kFrameSignalsPerTensor +
                               uint64_t{options.layers} * options.experts * kFrameSignalsPerExpert +
                               uint64_t{options.layers} * kFrameSignalsPerLayer;
  const uint64_t frame_values = options.frame_values_max == 0 ? from_layout : options.frame_values_max;
  // A Gram matrix of any legal size fits too; pages that none needs stay untouched.
  constexpr uint64_t kSpectrumValues = uint64_t{BW_SPECTRUM_ROWS_MAX} * (BW_SPECTRUM_ROWS_MAX + 1) / 2;
  const SharedMemory::Layout layout{.slot_count = options.ring_frames == 0 ? kRingFramesDefault : options.ring_frames,
                                    .values_max = std::max(frame_values, kSpectrumValues)};
  if (SlotBytes(layout.values_max) > kRingBytesMax / layout.slot_count) {
    SetLastError("ring_frames x frame_values_max is %u x %llu floats, must be at most %llu bytes", layout.slot_count,
                 static_cast<unsigned long long>(layout.values_max), static_cast<unsigned long long>(kRingBytesMax));
    return BW_INVALID_ARGUMENT;
  }
  auto memory = std::make_shared<SharedMemory>();
  if (const int error = memory->Create(layout); error != 0) {
    SetLastError("cannot make the shared ring: %s", std::strerror(error));
    return BW_UNAVAILABLE;
  }
  if (!FillConfig(options, &memory->header()->config)) return BW_INVALID_ARGUMENT;
  if (std::string error;
      options.record_path != nullptr && !CanBeRegularFile(memory->header()->config.record_path, &error)) {
    SetLastError("record_path is %.120s: %s", options.record_path, error.c_str());
    return BW_INVALID_ARGUMENT;
  }
  client->reset(new Client(std::move(memory), options));
  (*client)->limits_.frame_values_max = frame_values;
  return BW_OK;
}

Client::Client(std::shared_ptr<SharedMemory> memory, const bw_client_options& options)
    : memory_(std::move(memory)),
      header_(memory_->header()),
      ring_(*memory_),
      limits_{.layers = options.layers,
              .heads = options.heads,
              .kv_heads = header_->config.kv_heads,
              .experts = options.experts,
              .world = header_->config.world},
      sender_path_(options.sender_path == nullptr ? "" : options.sender_path),
      fork_generation_(ForkGeneration()) {}

Client::~Client() { header_->trainer_state.store(TrainerState::kClosed, std::memory_order_release); }

bool Client::BelongsHere() const {
  if (fork_generation_ == ForkGeneration()) return true;
  SetLastError("this client belongs to the process that forked this one");
  return false;
}

char* Client::Reserve(bw_status* status) {
  if (header_->sender_end.load(std::memory_order_relaxed) == SenderEnd::kFailed) {
    ring_.CountDrop();
    char why[SharedText::kBytes];
    header_->error.Get(why);
    SetLastError("the link failed for good: %s", why);
    *status = BW_UNAVAILABLE;
    return nullptr;
  }
  char* slot = ring_.Reserve();
  *status = slot == nullptr ? BW_DROPPED : BW_OK;
  return slot;
}

bw_status Client::Commit() {
  ring_.Commit();
  if (started_) return BW_OK;
  started_ = true;
  header_->link.store(BW_LINK_STARTING, std::memory_order_relaxed);
  if (const int error = StartWatchdog(memory_, sender_path_); error != 0) {
    started_ = false;  // The next push tries again.
    SetLastError("cannot start the watchdog thread: %s", std::strerror(error));
    return BW_UNAVAILABLE;
  }
  return BW_OK;
}

bw_status Client::Push(const bw_frame& given) {
  uint64_t value_count = 0;
  bw_frame frame;
  if (!CopyFrame(given, &frame) || !ValidateFrame(frame, limits_, &value_count)) return BW_INVALID_ARGUMENT;
  OwnHeader own[BW_OWN_MAX];  // A trainer's heap is not ours.
  uint64_t own_bytes = 0;
  for (uint32_t i = 0; i < frame.own_count; ++i) {
    if (!ValidateOwn(frame.own[i], i, limits_, &own[i])) return BW_INVALID_ARGUMENT;
    own_bytes += OwnBytes(own[i]);
  }
  const uint64_t own_offset = SlotOwnOffset(frame.block_count, value_count);
  if (own_offset + own_bytes > header_->slot_bytes) {
    SetLastError("frame has %llu bytes of own values, must have at most %llu beside its blocks",
                 static_cast<unsigned long long>(own_bytes),
                 static_cast<unsigned long long>(header_->slot_bytes - std::min(own_offset, header_->slot_bytes)));
    return BW_INVALID_ARGUMENT;
  }
  bw_status status;
  char* slot = Reserve(&status);
  if (slot == nullptr) return status;
  auto* header = reinterpret_cast<SlotHeader*>(slot);
  header->kind = SlotKind::kFrame;
  header->block_count = frame.block_count;
  header->step = frame.step;
  header->time_unix_ns = frame.time_unix_ns != 0 ? frame.time_unix_ns : NowUnixNs();
  header->partial_rows = frame.partial_rows;
  header->n = frame.own_count;
  header->text_bytes[0] = static_cast<uint32_t>(own_bytes);
  char* to = slot + own_offset;
  for (uint32_t i = 0; i < frame.own_count; ++i) {
    const OwnHeader& o = own[i];
    const char* const texts[] = {frame.own[i].name, frame.own[i].unit, frame.own[i].help};
    std::memcpy(to, &o, sizeof(o));
    char* at = to + sizeof(o);
    std::memcpy(at, frame.own[i].values, o.count * sizeof(float));
    at += o.count * sizeof(float);
    for (size_t text = 0; text < 3; ++text) {
      if (o.text_bytes[text] > 0) std::memcpy(at, texts[text], o.text_bytes[text]);
      at += o.text_bytes[text];
    }
    to += OwnBytes(o);
  }
  BlockHeader* blocks = SlotBlocks(slot);
  char* values = slot + SlotValuesOffset(frame.block_count);
  // Blocks that lie behind one another in the caller's memory are one copy: a
  // copy of 4 KiB costs a quarter more than its share of one of 16 KiB.
  const float* from = frame.blocks[0].values;
  size_t run = 0;
  for (uint32_t i = 0; i < frame.block_count; ++i) {
    const bw_block& b = frame.blocks[i];
    blocks[i] = {b.signal, b.layer_begin, b.layer_count, b.head_begin, b.head_count, 0};
    if (b.values != from + run) {
      std::memcpy(values, from, run * sizeof(float));
      values += run * sizeof(float);
      from = b.values;
      run = 0;
    }
    run += size_t{b.layer_count} * b.head_count;
  }
  std::memcpy(values, from, run * sizeof(float));
  return Commit();
}

bw_status Client::PushNames(uint32_t granularity, uint32_t first, uint32_t count, const char* const* names) {
  uint32_t bytes = 0;
  if (!ValidateNames(granularity, first, count, names, limits_, &bytes)) return BW_INVALID_ARGUMENT;
  bw_status status;
  char* slot = Reserve(&status);
  if (slot == nullptr) return status;
  auto* header = new (slot) SlotHeader{};
  header->kind = SlotKind::kNames;
  header->event_kind = granularity;
  header->layer = first;
  header->n = count;
  header->text_bytes[0] = bytes;
  char* to = slot + sizeof(SlotHeader);
  for (uint32_t i = 0; i < count; ++i) {
    const size_t size = std::strlen(names[i]) + 1;
    std::memcpy(to, names[i], size);
    to += size;
  }
  uint32_t& named = limits_.named(granularity);
  named = std::max(named, first + count);
  return Commit();
}

bw_status Client::PushEvent(int64_t step, uint32_t kind, double value, const char* text) {
  uint32_t text_bytes = 0;
  if (!ValidateStep("step", step) || !ValidateText("text", text, BW_EVENT_TEXT_MAX, &text_bytes))
    return BW_INVALID_ARGUMENT;
  if (kind < 1 || kind > kEventKindMax) {
    SetLastError("kind is %u, must be an EventKind, 1..%u", kind, kEventKindMax);
    return BW_INVALID_ARGUMENT;
  }
  bw_status status;
  char* slot = Reserve(&status);
  if (slot == nullptr) return status;
  auto* header = new (slot) SlotHeader{};
  header->kind = SlotKind::kEvent;
  header->step = step;
  header->time_unix_ns = NowUnixNs();
  header->event_kind = kind;
  header->text_bytes[0] = text_bytes;
  std::memcpy(slot + sizeof(SlotHeader), &value, sizeof(value));
  if (text_bytes > 0) std::memcpy(slot + sizeof(SlotHeader) + sizeof(value), text, text_bytes);
  return Commit();
}

bw_status Client::PushSpectrum(const SpectrumArgs& s) {
  if (!ValidateStep("step", s.step)) return BW_INVALID_ARGUMENT;
  const char* field = nullptr;
  uint32_t value = 0, min = 0, max = 0;
  const auto check = [&](const char* name, uint32_t v, uint32_t low, uint32_t high) {
    if (field == nullptr && (v < low || v > high)) field = name, value = v, min = low, max = high;
  };
  check("kind", s.kind, 1, kSpectrumKindMax);
  check("layer", s.layer, 0, limits_.layers - 1);
  check("head", s.head, 0, limits_.heads - 1);
  check("n", s.n, 1, BW_SPECTRUM_ROWS_MAX);
  if (field != nullptr) {
    SetLastError("%s is %u, must be %u..%u", field, value, min, max);
    return BW_INVALID_ARGUMENT;
  }
  if (s.upper == nullptr || !std::isfinite(s.scale) || s.scale < 0) {
    SetLastError(s.upper == nullptr ? "upper is NULL" : "scale is %g, must be finite and >= 0",
                 static_cast<double>(s.scale));
    return BW_INVALID_ARGUMENT;
  }
  bw_status status;
  char* slot = Reserve(&status);
  if (slot == nullptr) return status;
  auto* header = new (slot) SlotHeader{};
  header->kind = SlotKind::kSpectrum;
  header->step = s.step;
  header->event_kind = s.kind;
  header->layer = s.layer;
  header->head = s.head;
  header->n = s.n;
  header->scale = s.scale;
  std::memcpy(slot + SlotValuesOffset(0), s.upper, size_t{s.n} * (s.n + 1) / 2 * sizeof(float));
  return Commit();
}

bw_status Client::PushActionResult(const char* id, int64_t step, uint32_t applied, const char* reason) {
  uint32_t id_bytes = 0, reason_bytes = 0;
  if (!ValidateStep("step", step) || !ValidateText("id", id, kActionIdMax, &id_bytes) ||
      !ValidateText("reason", reason, kReasonMax, &reason_bytes)) {
    return BW_INVALID_ARGUMENT;
  }
  if (id_bytes == 0 || applied > 1) {
    if (id_bytes == 0) {
      SetLastError("id is empty, must be that of an action");
    } else {
      SetLastError("applied is %u, must be 0..1", applied);
    }
    return BW_INVALID_ARGUMENT;
  }
  bw_status status;
  char* slot = Reserve(&status);
  if (slot == nullptr) return status;
  auto* header = new (slot) SlotHeader{};
  header->kind = SlotKind::kActionResult;
  header->step = step;
  header->event_kind = applied;
  header->text_bytes[0] = id_bytes;
  header->text_bytes[1] = reason_bytes;
  std::memcpy(slot + sizeof(SlotHeader), id, id_bytes);
  if (reason_bytes > 0) std::memcpy(slot + sizeof(SlotHeader) + id_bytes, reason, reason_bytes);
  return Commit();
}

bw_status Client::Poll(bw_command* command) {
  const uint32_t struct_size = command->struct_size;
  const uint64_t tail = header_->command_tail.load(std::memory_order_relaxed);
  command->payload_bytes = 0;
  command->value = 0;
  command->type = BW_COMMAND_NONE;
  command->struct_size = struct_size;
  if (tail == header_->command_head.load(std::memory_order_acquire)) return BW_OK;
  const CommandSlot& slot = memory_->commands()[tail % kCommandSlots];
  command->type = slot.type;
  command->value = slot.value;
  command->payload_bytes = std::min(slot.payload_bytes, kCommandPayloadMax);
  std::memcpy(command->payload, slot.payload, command->payload_bytes);
  header_->command_tail.store(tail + 1, std::memory_order_release);
  return BW_OK;
}

void Client::GetCounters(bw_counters* counters) const {
  const auto order = std::memory_order_relaxed;
  counters->link = header_->link.load(order);
  counters->frames_queued = header_->head.load(order);
  counters->frames_dropped_ring = header_->dropped_ring.load(order);
  counters->frames_dropped_window = header_->frames_dropped_window.load(order);
  counters->frames_sent = header_->frames_sent.load(order);
  counters->frames_acked = header_->frames_acked.load(order);
  counters->reconnects = header_->reconnects.load(order);
  counters->sender_restarts = header_->sender_restarts.load(order);
  counters->sender_pid = header_->sender_pid.load(order);
  counters->sampling_period_steps = header_->sampling_period_steps.load(order);
  header_->error.Get(counters->error);
  header_->page_url.Get(counters->page_url);
  counters->frames_spooled = header_->frames_spooled.load(order);
  counters->spool_bytes = header_->spool_bytes.load(order);
  counters->frames_stripped = header_->frames_stripped.load(order);
}

bw_status Client::Flush(uint32_t timeout_ms) {
  constexpr struct timespec kPoll = {0, 500'000};
  const uint64_t want = header_->head.load(std::memory_order_relaxed);
  header_->flush_position.store(want, std::memory_order_release);
  struct timespec start {
  }, now{};
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (;;) {
    if (header_->settled.load(std::memory_order_acquire) >= want) return BW_OK;
    if (header_->sender_end.load(std::memory_order_acquire) == SenderEnd::kFailed) {
      char why[SharedText::kBytes];
      header_->error.Get(why);
      SetLastError("the link failed for good: %s", why);
      return BW_UNAVAILABLE;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t waited_ms = (int64_t{now.tv_sec} - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1'000'000;
    if (waited_ms >= int64_t{timeout_ms}) {
      SetLastError("not everything is durable after %u ms", timeout_ms);
      return BW_TIMEOUT;
    }
    nanosleep(&kPoll, nullptr);
  }
}

}  // namespace bellwether::client
