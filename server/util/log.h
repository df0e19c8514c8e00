// log.h: the server's log, structured, on stderr.
//
// Thread-safe.  A cause that can repeat per message goes through EveryN or
// a counter, never straight here.

#ifndef BELLWETHER_SERVER_UTIL_LOG_H_
#define BELLWETHER_SERVER_UTIL_LOG_H_

#include <spdlog/spdlog.h>

#include <string>

namespace bellwether::server {

// level: debug, info, warn, error.  format: logfmt, json.  Returns false,
// changing nothing, on other words.
bool SetUpLog(const std::string& level, const std::string& format);

template <typename... Args>
void LogDebug(spdlog::format_string_t<Args...> text, Args&&... args) {
  spdlog::debug(text, std::forward<Args>(args)...);
}
template <typename... Args>
void LogInfo(spdlog::format_string_t<Args...> text, Args&&... args) {
  spdlog::info(text, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarning(spdlog::format_string_t<Args...> text, Args&&... args) {
  spdlog::warn(text, std::forward<Args>(args)...);
}
template <typename... Args>
void LogError(spdlog::format_string_t<Args...> text, Args&&... args) {
  spdlog::error(text, std::forward<Args>(args)...);
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_LOG_H_
