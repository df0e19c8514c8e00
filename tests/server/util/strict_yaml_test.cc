// Goal: what people write wrongly is found with its place, all of it at once,
// and nothing is guessed.
// Method: texts with one fault each, and the finding that names it.

#include "server/util/strict_yaml.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;

std::string FindingOf(const std::string& text, const std::function<void(StrictYaml*, const YAML::Node&)>& read) {
  StrictYaml yaml("f.yml");
  const auto root = yaml.Load(text, 1000);
  if (root)
    yaml.ForEach(*root, "",
                 [&](const std::string&, const YAML::Node&, const YAML::Node& value) { read(&yaml, value); });
  return std::string(yaml.status().message());
}

TEST(StrictYamlTest, NumbersAreInTheirRangeAndNotInQuotes) {
  const auto read = [](StrictYaml* yaml, const YAML::Node& value) {
    double number = 0;
    yaml->Number(value, "x", 1, 5, &number);
  };
  for (const char* good : {"x: 1", "x: 5", "x: 2.5", "x: 4e0"}) EXPECT_EQ(FindingOf(good, read), "") << good;
  for (const char* bad : {"x: 0.999", "x: 5.001", "x: .nan", "x: nan", "x: inf", "x: '2'", "x: \"2\"", "x: two",
                          "x: ", "x: ~", "x: [2]", "x: {a: 2}", "x: 0x2", "x: true"}) {
    EXPECT_THAT(FindingOf(bad, read), HasSubstr("must be a number in [1, 5]")) << bad;
  }
  for (const char* good : {"x: 010.5", "x: 00.5e1", "x: 02"}) {
    EXPECT_THAT(FindingOf(good, read), HasSubstr("must be a number in [1, 5], decimal: write ")) << good;
  }
  EXPECT_EQ(FindingOf("\n  x:   7", read), "f.yml:2:8: x = 7: must be a number in [1, 5]");
}

TEST(StrictYamlTest, IntegersAreWholeAndDecimal) {
  const auto read = [](StrictYaml* yaml, const YAML::Node& value) {
    int64_t number = 0;
    yaml->Integer(value, "n", 1, 10, &number);
    EXPECT_TRUE(!yaml->clean() || number == 10) << number;
  };
  EXPECT_EQ(FindingOf("n: 10", read), "");
  for (const auto& [bad, good] : {std::pair("010", "10"), std::pair("00", "0"), std::pair("08", "8"),
                                  std::pair("0777", "777"), std::pair("0x10", "16"), std::pair("-0x1F", "-31"),
                                  std::pair("0o10", "8"), std::pair("-007", "-7"), std::pair("+010", "10")}) {
    EXPECT_EQ(FindingOf(absl::StrCat("n: ", bad), read),
              absl::StrCat("f.yml:1:4: n = ", bad, ": must be a whole number in [1, 10], decimal: write ", good));
  }
  for (const char* bad : {"n: 0", "n: 11", "n: 1.5", "n: 0x5", "n: '5'", "n: 1e1", "n: 99999999999999999999"}) {
    EXPECT_THAT(FindingOf(bad, read), HasSubstr("must be a whole number in [1, 10]")) << bad;
  }
}

TEST(StrictYamlTest, TextsFlagsAndChoicesAreChecked) {
  const auto text = [](StrictYaml* yaml, const YAML::Node& value) {
    std::string out;
    yaml->Text(value, "t", 4, &out);
  };
  EXPECT_EQ(FindingOf("t: abcd", text), "");
  EXPECT_THAT(FindingOf("t: abcde", text), HasSubstr("t is 5 bytes long: must be 1 to 4"));
  EXPECT_THAT(FindingOf("t: ''", text), HasSubstr("0 bytes"));
  EXPECT_THAT(FindingOf("t: \"a\\nb\"", text), HasSubstr("control character 10"));
  const auto flag = [](StrictYaml* yaml, const YAML::Node& value) {
    bool out = false;
    yaml->Flag(value, "b", &out);
  };
  EXPECT_EQ(FindingOf("b: true", flag), "");
  for (const char* bad : {"b: yes", "b: 'true'", "b: 1"})
    EXPECT_THAT(FindingOf(bad, flag), HasSubstr("must be true or false"));
  const auto choice = [](StrictYaml* yaml, const YAML::Node& value) {
    constexpr const char* kWords[] = {"up", "down"};
    size_t out = 0;
    yaml->Choice(value, "c", kWords, &out);
  };
  EXPECT_EQ(FindingOf("c: down", choice), "");
  EXPECT_THAT(FindingOf("c: left", choice), HasSubstr("c = left: must be one of up, down"));
}

TEST(StrictYamlTest, RefusesWhatIsNoDocument) {
  const auto ignore = [](StrictYaml*, const YAML::Node&) {};
  EXPECT_EQ(FindingOf("", ignore), "");
  EXPECT_EQ(FindingOf("# only a comment\n", ignore), "");
  EXPECT_THAT(FindingOf("a: 1\n---\nb: 2\n", ignore), HasSubstr("second document"));
  EXPECT_EQ(FindingOf("\n , a: 1", ignore), "f.yml:2:2: , begins no document of YAML");
  EXPECT_EQ(FindingOf("a: 1\nb: \xe4", ignore), "f.yml:2:4: byte 228 is no UTF-8: the file must be text in UTF-8");
  EXPECT_THAT(FindingOf("a: 1\na: 2\n", ignore), HasSubstr("f.yml:2:1: a stands twice"));
  EXPECT_THAT(FindingOf("[1]", ignore), HasSubstr("the file = a list: must be a map"));
  EXPECT_THAT(FindingOf("{[1]: 2}", ignore), HasSubstr("a key must be a word"));
  EXPECT_THAT(FindingOf("a: [1\nb: 2", ignore), HasSubstr("f.yml:"));
  EXPECT_EQ(FindingOf(std::string(1000, ' '), ignore), "");
  EXPECT_THAT(FindingOf(std::string(1001, ' '), ignore), HasSubstr("1001 bytes long: at most 1000"));
  EXPECT_NE(FindingOf(std::string(900, '['), ignore), "") << "nesting ends before the stack does";
}

TEST(StrictYamlTest, AHundredFindingsAreEnough) {
  StrictYaml yaml("f.yml");
  for (int i = 0; i < 105; ++i) yaml.Report(YAML::Mark(), "wrong");
  EXPECT_THAT(std::string(yaml.status().message()), HasSubstr("f.yml: and 5 more"));
}

}  // namespace
}  // namespace bellwether::server
