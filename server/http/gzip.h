// gzip.h: compression of answers.
//
// It is not left to cpp-httplib, which picks Brotli at its slowest level for a
// client that offers it: a second of CPU for a large answer.

#ifndef BELLWETHER_SERVER_HTTP_GZIP_H_
#define BELLWETHER_SERVER_HTTP_GZIP_H_

#include <string>
#include <string_view>

namespace bellwether::server {

// Fast level; empty on failure.
std::string Gzip(std::string_view data);
// Of what Gzip() or gzip(1) made; empty on failure or beyond `size_max` bytes.
std::string Gunzip(std::string_view data, size_t size_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_GZIP_H_
