// decode_limits.h: the largest that a client's messages may be.

#ifndef BELLWETHER_SERVER_INGEST_DECODE_LIMITS_H_
#define BELLWETHER_SERVER_INGEST_DECODE_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace bellwether::server {

struct DecodeLimits {
  int32_t layers_max = 512;
  int32_t heads_max = 1024;
  int32_t head_dim_max = 1024;
  int32_t experts_max = 4096;
  int32_t blocks_max = 128;
  int32_t parts_max = 1024;
  int32_t own_max = 512;          // OwnValues of a frame,
  int32_t own_values_max = 1024;  // and values of one.
  uint32_t world_max = 4096;
  int32_t spectrum_rows_max = 512;
  size_t labels_max = 16;
  size_t label_bytes_max = 128;
  size_t text_bytes_max = 256;
  bool own_low_at_most_high = true;         // Of the limits of own signals.
  uint64_t losses_max = uint64_t{1} << 53;  // Frames that a client says were dropped, or sent without heads.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_DECODE_LIMITS_H_
