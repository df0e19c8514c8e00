#include "server/util/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>

#include "server/util/clean_text.h"
#include "server/util/log_format.h"

namespace bellwether::server {
namespace {

constexpr size_t kMessageBytesMax = 16 << 10;

// A message as what stands between the quotes of a JSON string, which logfmt reads alike.
class EscapedMessage final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm& /*time*/, spdlog::memory_buf_t& to) override {
    const auto append = [&to](std::string_view text) { to.append(text.data(), text.data() + text.size()); };
    std::string_view left(message.payload.data(), message.payload.size());
    if (left.size() > kMessageBytesMax) left = left.substr(0, kMessageBytesMax);
    while (!left.empty()) {
      const size_t length = Utf8Length(left);
      const std::string_view character = left.substr(0, std::max<size_t>(length, 1));
      left.remove_prefix(character.size());
      if (length == 0) {
        append(R"(\ufffd)");
      } else if (character == "\"" || character == "\\") {
        append("\\");
        append(character);
      } else if (character == "\n") {
        append(R"(\n)");
      } else if (IsControl(character)) {
        append(fmt::format(R"(\u{:04x})", CodePoint(character)));
      } else {
        append(character);
      }
    }
    if (message.payload.size() > kMessageBytesMax) append("...");
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<EscapedMessage>(); }

 private:
  // Of a control, which has at most three bytes.
  static unsigned CodePoint(std::string_view character) {
    unsigned point = static_cast<unsigned char>(character[0]) & (character.size() == 1 ? 0x7fu : 0x1fu);
    if (character.size() == 3) point &= 0xfu;
    for (const char next : character.substr(1)) point = point << 6 | (static_cast<unsigned char>(next) & 0x3fu);
    return point;
  }
};

}  // namespace

std::unique_ptr<spdlog::formatter> LogFormatter(const std::string& format) {
  if (format != "logfmt" && format != "json") return nullptr;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<EscapedMessage>('*').set_pattern(
      format == "json" ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","msg":"%*"})"
                       : "ts=%Y-%m-%dT%H:%M:%S.%e%z level=%l msg=\"%*\"");
  return formatter;
}

bool SetUpLog(const std::string& level, const std::string& format) {
  const auto parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") return false;
  auto formatter = LogFormatter(format);
  if (formatter == nullptr) return false;
  auto logger = std::make_shared<spdlog::logger>("bellwetherd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(parsed);
  logger->set_formatter(std::move(formatter));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);
  return true;
}

}  // namespace bellwether::server
