// Goal: a message is one value on one line in both formats, whatever it holds.
// Method: formats messages of strangers; a JSON parser reads them back.

#include "server/util/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "server/util/log_format.h"

namespace bellwether::server {
namespace {

std::string Line(const std::string& format, const std::string& message) {
  spdlog::memory_buf_t line;
  const spdlog::details::log_msg told("bellwetherd", spdlog::level::warn, message);
  LogFormatter(format)->format(told, line);
  return std::string(line.data(), line.size());
}

// The value of msg, as either format has it.
std::string Value(const std::string& format, const std::string& message) {
  const std::string line = Line(format, message);
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
  if (format == "json") return nlohmann::json::parse(line).at("msg");
  const size_t begin = line.find(" msg=\"") + 5;
  return nlohmann::json::parse(line.substr(begin));
}

TEST(LogTest, AnyMessageIsOneValueOnOneLine) {
  for (const char* format : {"logfmt", "json"}) {
    for (const std::string& message :
         {std::string("plain ä 😀"), std::string("a\nts=2026 level=error msg=\"forged log line\""),
          std::string("quote \" and backslash \\ and \\\" both"), std::string("\x1b[31mred\x1b[0m\r\t\x7f"),
          std::string("\0x", 2),
          std::string("\xc2\x9b"
                      "31m \xe2\x80\xa8 \xe2\x80\xae")}) {
      EXPECT_EQ(Value(format, message), message) << format;
      const std::string line = Line(format, message);
      EXPECT_EQ(std::count(line.begin(), line.end(), '\x1b'), 0);
    }
    EXPECT_EQ(Value(format, "a\xff\xc0z"), "a\ufffd\ufffdz");
    EXPECT_LE(Line(format, std::string(1 << 20, 'x')).size(), 20'000u);
  }
}

TEST(LogTest, UnknownLogFormatsAreRefused) {
  EXPECT_EQ(LogFormatter("xml"), nullptr);
  EXPECT_FALSE(SetUpLog("info", "xml"));
  EXPECT_FALSE(SetUpLog("loud", "json"));
}

}  // namespace
}  // namespace bellwether::server
