// validate.h: the rules of client.h, checked before anything happens.
//
// Every function returns true, or false with SetLastError() naming the field,
// the value and the legal range.  No allocation, no system call.

#ifndef BELLWETHER_CLIENT_LIB_SRC_VALIDATE_H_
#define BELLWETHER_CLIENT_LIB_SRC_VALIDATE_H_

#include <cstddef>
#include <cstdint>

#include "bellwether/client.h"
#include "bellwether/signal_table.h"
#include "client_lib/src/frame_ring.h"

namespace bellwether::client {

// As the server takes them (server/ingest/decode.cc): what is recorded can be
// replayed.
inline constexpr int64_t kStepMax = int64_t{1} << 53;
inline constexpr uint32_t kAttemptMax = 1 << 30;
inline constexpr uint32_t kSeqLenMax = 1 << 30;

// What a frame is checked against.
struct FrameLimits {
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t kv_heads = 0;
  uint32_t experts = 0;
  uint32_t world = 0;
  uint32_t tensors = 0, modules = 0;  // Named so far.
  // REQUIRES: OfNamedRows(granularity).
  uint32_t& named(uint32_t granularity) {
    return granularity == static_cast<uint32_t>(Granularity::kTensor) ? tensors : modules;
  }
  uint64_t frame_values_max = 0;
};

// Copies as much as the caller's header has; what came later stays 0.  False:
// struct_size is smaller than that of 1.0.
bool CopyOptions(const bw_client_options* given, bw_client_options* options);

// REQUIRES: CopyOptions() made `options`.
bool ValidateOptions(const bw_client_options& options);

// Copies as much as the caller's header has.  False: struct_size is smaller than that of 1.0.
bool CopyFrame(const bw_frame& given, bw_frame* frame);

// Also says how many floats the blocks hold together.  REQUIRES: CopyFrame() made `frame`.
bool ValidateFrame(const bw_frame& frame, const FrameLimits& limits, uint64_t* values);

// One of a frame's; fills `header`.
bool ValidateOwn(const bw_own_values& own, uint32_t index, const FrameLimits& limits, OwnHeader* header);

// Also says how many bytes the names are together, each with its closing zero.
bool ValidateNames(uint32_t granularity, uint32_t first, uint32_t count, const char* const* names, FrameLimits limits,
                   uint32_t* bytes);

bool ValidateStep(const char* what, int64_t step);

// At most `bytes_max` bytes of UTF-8 without control characters; NULL = empty.
// Writes the length to `*bytes`.
bool ValidateText(const char* name, const char* text, size_t bytes_max, uint32_t* bytes);

// 32 hexadecimal digits into 16 bytes.  False, without a message, if not.
bool ParseUuid(const char* text, uint8_t (&uuid)[16]);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_VALIDATE_H_
