// Goal: whatever a stranger wrote becomes one bounded line of valid UTF-8 that moves no terminal.
// Method: by hand, and every pair of bytes.

#include "server/util/clean_text.h"

#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

TEST(CleanTextTest, ControlsBecomeSpacesAndBadBytesQuestionMarks) {
  EXPECT_EQ(CleanText("plain ä € 😀", 100), "plain ä € 😀");
  EXPECT_EQ(CleanText("a\x1b[31mred\nts=1\r\t\x7f", 100), "a [31mred ts=1   ");
  EXPECT_EQ(CleanText("\xc2\x9b"
                      "31m",
                      100),
            " 31m")
      << "the control sequence of one character";
  EXPECT_EQ(CleanText("a\xe2\x80\xa8"
                      "b\xe2\x80\xae"
                      "c\xe2\x81\xa6"
                      "d",
                      100),
            "a b c d");
  EXPECT_EQ(CleanText(std::string("\0x", 2), 100), " x");
  EXPECT_EQ(CleanText("\xff\xc0\xaf\xed\xa0\x80\xf5", 100), "???????");
}

TEST(CleanTextTest, IsCutBetweenCharacters) {
  EXPECT_EQ(CleanText("ab€", 4), "ab");
  EXPECT_EQ(CleanText("ab€", 5), "ab€");
  EXPECT_EQ(CleanText("", 0), "");
  EXPECT_EQ(CleanText(std::string(1000, '\n'), 10).size(), 10u);
}

TEST(CleanTextTest, CleanTextIsValidUtf8WithoutControls) {
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string clean = CleanText(std::string{static_cast<char>(first), static_cast<char>(second), 'x'}, 100);
      for (std::string_view left = clean; !left.empty();) {
        const size_t length = Utf8Length(left);
        ASSERT_GT(length, 0u) << first << " " << second;
        ASSERT_FALSE(IsControl(left.substr(0, length))) << first << " " << second;
        left.remove_prefix(length);
      }
    }
  }
}

}  // namespace
}  // namespace bellwether::server
