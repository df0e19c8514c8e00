// log_format.h: how a line of the server's log is written.
//
// A message is one value on one line, whatever texts of strangers are in it:
// quotes, controls and bytes that are no UTF-8 are escaped as JSON does it.

#ifndef BELLWETHER_SERVER_UTIL_LOG_FORMAT_H_
#define BELLWETHER_SERVER_UTIL_LOG_FORMAT_H_

#include <spdlog/formatter.h>

#include <memory>
#include <string>

namespace bellwether::server {

// format: logfmt, json; null: it is another word.
std::unique_ptr<spdlog::formatter> LogFormatter(const std::string& format);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_LOG_FORMAT_H_
