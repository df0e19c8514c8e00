#include "client_lib/sender/body_codec.h"

#include <zstd.h>

namespace bellwether::client {
namespace {

constexpr int kLevel = 1;

}  // namespace

BodyCodec::BodyCodec() : packer_(ZSTD_createCCtx(), ZSTD_freeCCtx), unpacker_(ZSTD_createDCtx(), ZSTD_freeDCtx) {}

BodyCodec::~BodyCodec() = default;

std::string_view BodyCodec::Pack(std::string_view body) {
  packed_.resize(body.size());  // What needs more room gains nothing.
  const size_t bytes =
      ZSTD_compressCCtx(packer_.get(), packed_.data(), packed_.size(), body.data(), body.size(), kLevel);
  if (ZSTD_isError(bytes) != 0 || bytes >= body.size()) return {};
  return std::string_view(packed_).substr(0, bytes);
}

bool BodyCodec::Unpack(std::string_view packed, size_t bytes_max, std::string* body) {
  const unsigned long long bytes = ZSTD_getFrameContentSize(packed.data(), packed.size());
  // The two errors are larger than any size.
  if (bytes > bytes_max) return false;
  body->resize(static_cast<size_t>(bytes));
  return ZSTD_decompressDCtx(unpacker_.get(), body->data(), body->size(), packed.data(), packed.size()) == bytes;
}

}  // namespace bellwether::client
