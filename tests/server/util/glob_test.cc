// Goal: a pattern fits whole texts, knows * and ? only, and takes no time that
// whoever chooses the text could make long.
// Method: pairs that fit and pairs that do not.
#include "server/util/glob.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace bellwether::server {
namespace {

TEST(GlobTest, GlobMatchesWholeTexts) {
  for (const auto& [glob, text] : {std::pair{"*", ""},
                                   {"*", "a"},
                                   {"a*c", "abbc"},
                                   {"a?c", "abc"},
                                   {"**", "x"},
                                   {"a*b*", "ab"},
                                   {"[a]", "[a]"},
                                   {"\\*", "\\x"}}) {
    EXPECT_TRUE(GlobMatches(glob, text)) << glob << " " << text;
  }
  for (const auto& [glob, text] :
       {std::pair{"", "a"}, {"a", ""}, {"a?c", "ac"}, {"a*c", "abcd"}, {"[a]", "a"}, {"A", "a"}, {"\\*", "*"}}) {
    EXPECT_FALSE(GlobMatches(glob, text)) << glob << " " << text;
  }
  EXPECT_FALSE(GlobMatches(std::string(60, '*') + "b", std::string(10'000, 'a'))) << "and at once";
}

}  // namespace
}  // namespace bellwether::server
