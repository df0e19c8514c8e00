#include "server/util/log.h"

#include <spdlog/sinks/stdout_sinks.h>

namespace bellwether::server {

bool SetUpLog(const std::string& level, const std::string& format) {
  const auto parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") return false;
  if (format != "logfmt" && format != "json") return false;
  auto logger = std::make_shared<spdlog::logger>("bellwetherd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(parsed);
  logger->set_pattern(format == "json" ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","msg":"%v"})"
                                       : "ts=%Y-%m-%dT%H:%M:%S.%e%z level=%l msg=\"%v\"");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);
  return true;
}

}  // namespace bellwether::server
