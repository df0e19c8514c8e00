// Goal: what a text stands for that was in force once is found, and parsed once for all runs that ask for it.
// Method: texts of policies and rules, asked for again and again.

#include "server/engine/reloadable_config.h"

#include <gtest/gtest.h>

#include <string>

#include "server/engine/reloadable_policy.h"
#include "server/engine/reloadable_rules.h"

namespace bellwether::server {
namespace {

TEST(ReloadableConfigTest, ATextIsParsedOnce) {
  ReloadablePolicy policies;
  const std::string own = DefaultPolicy()->text + "\n# Ours.\n";
  const auto first = policies.Find(own), second = policies.Find(own);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->text, own);
  EXPECT_EQ(*first, *second) << "the same object";
}

TEST(ReloadableConfigTest, BuiltInAndCurrentTextsNeedNoParsing) {
  ReloadablePolicy policies;
  EXPECT_EQ(*policies.Find(""), DefaultPolicy());
  EXPECT_EQ(*policies.Find(DefaultPolicy()->text), DefaultPolicy());
  ReloadableRules rules{JudgeOptions()};
  const auto set = ParseRules("off: [nonfinite]", "r.yml");
  ASSERT_TRUE(set.ok()) << set.status();
  rules.Set(*set);
  EXPECT_EQ(*rules.Find("off: [nonfinite]"), *set);
  EXPECT_EQ(*rules.Find(""), rules.built_in());
}

TEST(ReloadableConfigTest, ManyTextsAreFoundAndARefusedOneIsSaid) {
  ReloadableRules rules{JudgeOptions()};
  for (int i = 0; i < 100; ++i) {
    const std::string text = "off: [nonfinite]  # " + std::to_string(i % 20);
    const auto found = rules.Find(text);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ((*found)->text, text);
  }
  EXPECT_EQ(rules.Find("off: [nothing]").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bellwether::server
