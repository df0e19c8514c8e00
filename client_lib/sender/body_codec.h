// body_codec.h: the bodies of a spool's records, compressed where that gains anything.
//
// zstd at level 1, each body by itself, so that any record can be read alone.
// Frames of our recordings (249 to 399 bytes) shrink by 33 to 46 %.
//
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_BODY_CODEC_H_
#define BELLWETHER_CLIENT_LIB_SENDER_BODY_CODEC_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace bellwether::client {

class BodyCodec {
 public:
  BodyCodec();
  ~BodyCodec();

  // Valid until the next call; empty if it would not be smaller.
  std::string_view Pack(std::string_view body);
  // False: not what Pack() gives, or more than `bytes_max`, which is seen before
  // any of it is unpacked.
  bool Unpack(std::string_view packed, size_t bytes_max, std::string* body);

 private:
  const std::unique_ptr<ZSTD_CCtx_s, size_t (*)(ZSTD_CCtx_s*)> packer_;
  const std::unique_ptr<ZSTD_DCtx_s, size_t (*)(ZSTD_DCtx_s*)> unpacker_;
  std::string packed_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_BODY_CODEC_H_
