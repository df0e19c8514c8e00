// The C ABI: pointers, forks and exceptions stop here.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

#include "bellwether/client.h"
#include "bellwether/signal_table.h"
#include "client_lib/src/client.h"
#include "client_lib/src/last_error.h"
#include "client_lib/src/shared_memory.h"

namespace client = bellwether::client;

static_assert(BW_BLOCKS_MAX == client::kBlocksMax);
static_assert(sizeof(bw_command::payload) == client::kCommandPayloadMax);
static_assert(sizeof(bw_counters::error) == client::SharedText::kBytes);

struct bw_client {
  std::unique_ptr<client::Client> impl;
};

namespace {

// True if `pointer` may be used; else says which argument is NULL.
template <typename T>
bool IsGiven(const T* pointer, const char* name) {
  if (pointer != nullptr) return true;
  client::SetLastError("%s is NULL", name);
  return false;
}

// The checks that every call on a client begins with.
bw_status Check(const bw_client* handle) {
  if (!IsGiven(handle, "client")) return BW_INVALID_ARGUMENT;
  return handle->impl->BelongsHere() ? BW_OK : BW_UNAVAILABLE;
}

// std::string and std::vector appear only on the paths that may allocate.
template <typename Call>
bw_status Guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    client::SetLastError("out of memory");
    return BW_UNAVAILABLE;
  } catch (...) {
    client::SetLastError("unexpected exception");
    return BW_INTERNAL;
  }
}

}  // namespace

extern "C" {

uint32_t bw_abi_version(void) { return (BW_API_VERSION_MAJOR << 16) | BW_API_VERSION_MINOR; }

const char* bw_last_error(void) { return client::LastError(); }

uint32_t bw_signal_by_name(const char* name) {
  if (name == nullptr) return 0;
  const bellwether::SignalInfo* info = bellwether::FindSignal(std::string_view(name));
  return info == nullptr || info->derived ? 0 : static_cast<uint32_t>(info->id);
}

bw_status bw_signal_at(uint32_t index, bw_signal_info* info) {
  if (!IsGiven(info, "info")) return BW_INVALID_ARGUMENT;
  if (info->struct_size < sizeof(bw_signal_info)) {
    client::SetLastError("info.struct_size is %u, must be at least %zu", info->struct_size, sizeof(bw_signal_info));
    return BW_INVALID_ARGUMENT;
  }
  if (index >= bellwether::SignalCount()) {
    client::SetLastError("index is %u, must be 0..%zu", index, bellwether::SignalCount() - 1);
    return BW_INVALID_ARGUMENT;
  }
  const bellwether::SignalInfo& signal = bellwether::SignalTable()[index];
  info->id = static_cast<uint32_t>(signal.id);
  info->granularity = static_cast<uint32_t>(signal.granularity);
  info->merge = static_cast<uint32_t>(signal.merge);
  info->name = signal.name;
  info->unit = signal.unit;
  return BW_OK;
}

bw_status bw_client_create(const bw_client_options* options, bw_client** handle) {
  if (!IsGiven(handle, "client")) return BW_INVALID_ARGUMENT;
  *handle = nullptr;
  bw_client_options known;
  if (!IsGiven(options, "options") || !client::CopyOptions(options, &known) || !client::ValidateOptions(known)) {
    return BW_INVALID_ARGUMENT;
  }
  return Guarded([&] {
    auto created = std::make_unique<bw_client>();
    const bw_status status = client::Client::Create(known, &created->impl);
    if (status == BW_OK) *handle = created.release();
    return status;
  });
}

void bw_client_destroy(bw_client* handle) {
  // In a child the memory stays: the parent's threads may have been inside it.
  if (handle == nullptr || !handle->impl->BelongsHere()) return;
  delete handle;
}

bw_status bw_client_push(bw_client* handle, const bw_frame* frame) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  if (!IsGiven(frame, "frame")) return BW_INVALID_ARGUMENT;
  return Guarded([&] { return handle->impl->Push(*frame); });
}

bw_status bw_client_push_names(bw_client* handle, uint32_t granularity, uint32_t first, uint32_t count,
                               const char* const* names) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  if (!IsGiven(names, "names")) return BW_INVALID_ARGUMENT;
  return Guarded([&] { return handle->impl->PushNames(granularity, first, count, names); });
}

bw_status bw_client_push_event(bw_client* handle, int64_t step, uint32_t kind, double value, const char* text) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  return Guarded([&] { return handle->impl->PushEvent(step, kind, value, text); });
}

bw_status bw_client_push_spectrum(bw_client* handle, int64_t step, uint32_t layer, uint32_t head, uint32_t kind,
                                  uint32_t n, float scale, const float* upper) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  return Guarded([&] {
    return handle->impl->PushSpectrum(
        {.step = step, .layer = layer, .head = head, .kind = kind, .n = n, .scale = scale, .upper = upper});
  });
}

bw_status bw_client_push_action_result(bw_client* handle, const char* id, int64_t step, uint32_t applied,
                                       const char* reason) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  return Guarded([&] { return handle->impl->PushActionResult(id, step, applied, reason); });
}

bw_status bw_client_poll(bw_client* handle, bw_command* command) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  if (!IsGiven(command, "command")) return BW_INVALID_ARGUMENT;
  if (command->struct_size < sizeof(bw_command)) {
    client::SetLastError("command.struct_size is %u, must be at least %zu", command->struct_size, sizeof(bw_command));
    return BW_INVALID_ARGUMENT;
  }
  return handle->impl->Poll(command);
}

bw_status bw_client_get_counters(const bw_client* handle, bw_counters* counters) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  if (!IsGiven(counters, "counters")) return BW_INVALID_ARGUMENT;
  constexpr size_t kBytes1_0 = offsetof(bw_counters, frames_spooled);
  if (counters->struct_size < kBytes1_0) {
    client::SetLastError("counters.struct_size is %u, must be at least %zu", counters->struct_size, kBytes1_0);
    return BW_INVALID_ARGUMENT;
  }
  // As much as the caller's header has.
  bw_counters all{};
  all.struct_size = counters->struct_size;
  handle->impl->GetCounters(&all);
  std::memcpy(counters, &all, std::min<size_t>(counters->struct_size, sizeof(all)));
  return BW_OK;
}

bw_status bw_client_flush(bw_client* handle, uint32_t timeout_ms) {
  if (const bw_status status = Check(handle); status != BW_OK) return status;
  return handle->impl->Flush(timeout_ms);
}

}  // extern "C"
