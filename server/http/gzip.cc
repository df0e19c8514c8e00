#include "server/http/gzip.h"

#include <zlib.h>

#include <algorithm>

namespace bellwether::server {
namespace {

constexpr int kGzipWindow = 15 + 16;  // The largest, with gzip's header.
constexpr int kFastLevel = 1;

Bytef* Input(std::string_view data) { return reinterpret_cast<Bytef*>(const_cast<char*>(data.data())); }

}  // namespace

std::string Gzip(std::string_view data) {
  z_stream stream{};
  if (deflateInit2(&stream, kFastLevel, Z_DEFLATED, kGzipWindow, 8, Z_DEFAULT_STRATEGY) != Z_OK) return {};
  std::string out(deflateBound(&stream, data.size()), '\0');
  stream.next_in = Input(data);
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const bool done = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  out.resize(done ? stream.total_out : 0);
  deflateEnd(&stream);
  return out;
}

std::string Gunzip(std::string_view data, size_t size_max) {
  z_stream stream{};
  if (inflateInit2(&stream, kGzipWindow) != Z_OK) return {};
  stream.next_in = Input(data);
  stream.avail_in = static_cast<uInt>(data.size());
  std::string out;
  int result = Z_OK;
  while (result == Z_OK && out.size() < size_max) {
    const size_t before = out.size();
    out.resize(std::min(size_max, before + std::max<size_t>(4096, 3 * data.size())));
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + before);
    stream.avail_out = static_cast<uInt>(out.size() - before);
    result = inflate(&stream, Z_NO_FLUSH);
    out.resize(out.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  return result == Z_STREAM_END ? out : std::string();
}

}  // namespace bellwether::server
