// Goal: all files that people write are read alike: one document of a plain file, strictly, each
// finding with its place; an address names a port that there is.
// Method: the same texts and the same odd files for all readers.

#include "server/app/config.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/access/access_file.h"
#include "server/access/token_file.h"
#include "server/act/policy.h"
#include "server/detect/rules_file.h"
#include "server/offline/rule_test_file.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

struct Reader {
  const char* name;
  std::function<absl::Status(const std::string& path)> read;
  std::string good;         // One line.
  std::string number = {};  // What stands before a number; "" where the file is not YAML.
};

void PrintTo(const Reader& reader, std::ostream* to) { *to << reader.name; }

class ReadersTest : public ::testing::TestWithParam<Reader> {
 protected:
  std::string path() const { return folder_.path() + "/f.yml"; }
  // What is wrong with a file of that text; "" if nothing is.
  std::string FindingOf(const std::string& text) {
    std::ofstream(path(), std::ios::binary) << text;
    EXPECT_EQ(chmod(path().c_str(), 0644), 0);
    return Finding(path());
  }
  static std::string Finding(const std::string& path) {
    const absl::Status read = GetParam().read(path);
    EXPECT_NE(read.ok(), !read.message().empty());
    return std::string(read.message());
  }
  TempDirectory folder_;
};

TEST_P(ReadersTest, OnlyAPlainFileIsRead) {
  EXPECT_EQ(FindingOf(GetParam().good), "");
  EXPECT_THAT(Finding(folder_.path()), HasSubstr("is a directory, is no plain file"));
  EXPECT_THAT(Finding("/dev/null"), HasSubstr("is no plain file"));
  EXPECT_THAT(Finding("/dev/zero"), HasSubstr("is no plain file"));
  EXPECT_THAT(Finding(folder_.path() + "/none"), HasSubstr("none: cannot be read: No such file"));
  const std::string pipe = folder_.path() + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(Finding(pipe), HasSubstr("is no plain file")) << "and nobody waits for a writer";
  std::filesystem::create_symlink(path(), folder_.path() + "/link");
  EXPECT_EQ(Finding(folder_.path() + "/link"), "");
  std::filesystem::create_symlink("loop", folder_.path() + "/loop");
  EXPECT_THAT(Finding(folder_.path() + "/loop"), HasSubstr("cannot be read"));
}

TEST_P(ReadersTest, TextThatNoReaderTakesIsRefused) {
  const std::string good = GetParam().good;
  for (const std::string& bad : {
           good + "\n---\nnonsense: 1\n",
           good + "\n---\n" + good,
           "---\n---\n" + good,
           ",\n" + good,
           ", " + good,
           std::string(",,,"),
           good + "\n" + good,
       }) {
    EXPECT_NE(FindingOf(bad), "") << bad;
  }
  EXPECT_EQ(FindingOf(good), "");
  EXPECT_THAT(FindingOf(std::string(2 << 20, ' ')), HasSubstr("bytes long: at most"));
}

TEST_P(ReadersTest, TextThatIsNotUtf8IsRefused) {
  const std::string good = GetParam().good;
  for (const std::string& bad : {"\xff\xfe" + good, good + "\n# b\xe4r\n", good + "\n\xc3", good + "\n\xed\xa0\x80"}) {
    EXPECT_THAT(FindingOf(bad), ::testing::AnyOf(HasSubstr("is no UTF-8"), HasSubstr("is no JSON"))) << bad;
  }
}

// Those of YAML.
class YamlReadersTest : public ReadersTest {};

TEST_P(YamlReadersTest, AcceptsOneDocumentAndNamesPlacesOfFindings) {
  const std::string good = GetParam().good;
  for (const std::string& fine :
       {"---\n" + good, "\xef\xbb\xbf" + good, good + "\n# a comm\xc3\xa9nt\n", good + "\n...\n"}) {
    EXPECT_EQ(FindingOf(fine), "") << fine;
  }
  const std::string places = "f\\.yml:[0-9]+:[0-9]+: ";
  for (const std::string& bad : {
           good + "\n---\nnonsense: 1\n",
           good + "\n---\n" + good,
           "---\n---\n" + good,
           ",\n" + good,
           ", " + good,
           std::string(",,,"),
           good + "\n\xff: 1",
           std::string("no_such_key: 1"),
           std::string("x"),
           std::string("[1, 2]"),
           std::string("{"),
           std::string("]"),
           std::string("a: b: c"),
           std::string("\t"
                       "a: 1"),
           std::string("a: 'x"),
           std::string("a: &x"),
           std::string("a: *none"),
           std::string("&x {<<: *x}"),
           std::string("? [1]\n: 2"),
           std::string("? {a: 1}\n: 2"),
           std::string("!!binary x: 1"),
           std::string("%YAML 1.2\nno_such_key: 1"),
           std::string("\x01: 1"),
           std::string("\xff\xfe: 1"),
           std::string("a\0b: 1", 7),
           std::string("no_such_key: |\n  text\n"),
           std::string(500, '['),
           std::string(500, '{'),
           "no_such_key: " + std::string(2000, '-'),
       }) {
    const std::string finding = FindingOf(bad);
    EXPECT_THAT(finding, ::testing::ContainsRegex(places)) << bad;
    for (const char c : finding) EXPECT_FALSE(c != '\n' && absl::ascii_iscntrl(static_cast<unsigned char>(c))) << bad;
  }
  EXPECT_THAT(FindingOf(good + "\n" + good), HasSubstr("f.yml:2:1: ")) << "a key twice";
  EXPECT_THAT(FindingOf(",\n" + good), HasSubstr("f.yml:1:1: , begins no document of YAML"));
}

TEST_P(YamlReadersTest, NumbersAreDecimal) {
  EXPECT_EQ(FindingOf(GetParam().number + "12"), "");
  for (const auto& [bad, good] : {std::pair("010", "10"), std::pair("0010", "10"), std::pair("0x10", "16"),
                                  std::pair("0X1f", "31"), std::pair("0o17", "15"), std::pair("-010", "-10")}) {
    EXPECT_THAT(FindingOf(GetParam().number + bad), EndsWith(absl::StrCat("], decimal: write ", good))) << bad;
  }
  for (const char* bad : {"0x10", "0o17", "1_0", "'12'", "\"12\"", "+-1", "1e400", "nan", ".inf", "twelve", "[12]",
                          "{a: 12}", "~", "", "99999999999999999999999", "-99999999999999999999999"}) {
    EXPECT_THAT(FindingOf(GetParam().number + bad), HasSubstr("must be a")) << bad;
  }
}

absl::Status ReadConfigAt(const std::string& path) {
  ServerOptions options;
  return ReadConfig(path, &options).status();
}

// As the template of a configuration's webhook.
absl::Status ReadTemplateAt(const std::string& path) {
  TempDirectory folder;
  const std::string config = folder.path() + "/c.yml";
  std::ofstream(config) << "alerting: {webhooks: [{url: 'http://a/', template_file: '" << path << "'}]}";
  return ReadConfigAt(config);
}

const std::vector<Reader>& YamlReaders() {
  static const auto* const readers =
      new std::vector<Reader>{{"config", ReadConfigAt, "limits: {runs_live_max: 12}", "limits:\n  runs_live_max: "},
                              {"rules", [](const std::string& path) { return ReadRules(path).status(); },
                               "thresholds: {drift: {grown_factor: 12}}", "thresholds:\n  drift:\n    grown_factor: "},
                              {"rule_tests", [](const std::string& path) { return ReadRuleTests(path).status(); },
                               "tests: [{name: a, series: [], expect: [], steps: 12}]",
                               "tests:\n- name: a\n  series: []\n  expect: []\n  steps: "},
                              {"policy", [](const std::string& path) { return ReadPolicy(path).status(); },
                               "mode: observe", "limits:\n  actions_per_run: "},
                              {"access", [](const std::string& path) { return ReadAccess(path).status(); },
                               "tenants: {a: {runs_max: 12}}", "tenants:\n  a:\n    runs_max: "}};
  return *readers;
}

std::vector<Reader> AllReaders() {
  std::vector<Reader> readers = YamlReaders();
  readers.push_back({"tokens", [](const std::string& path) { return ReadTokens(path).status(); },
                     "sha256:" + std::string(64, 'a') + " alice never never"});
  readers.push_back({"webhook_template", ReadTemplateAt, "{\"text\": \"{{headline}}\"}"});
  return readers;
}

INSTANTIATE_TEST_SUITE_P(All, ReadersTest, ::testing::ValuesIn(AllReaders()),
                         [](const auto& of) { return std::string(of.param.name); });
INSTANTIATE_TEST_SUITE_P(All, YamlReadersTest, ::testing::ValuesIn(YamlReaders()),
                         [](const auto& of) { return std::string(of.param.name); });

TEST(EmptyFileTest, NothingIsSaidByAFileWithoutText) {
  TempDirectory folder;
  const std::string path = folder.path() + "/f.yml";
  for (const Reader& reader : YamlReaders()) {
    if (std::string(reader.name) == "rule_tests") continue;  // Which must have tests.
    for (const char* fine : {"", "\n", "# a comment\n", "{}"}) {
      std::ofstream(path) << fine;
      EXPECT_EQ(reader.read(path), absl::OkStatus()) << reader.name << fine;
    }
  }
}

// What only the configuration has.
class ConfigTest : public ::testing::Test {
 protected:
  absl::StatusOr<size_t> Read(const std::string& text) {
    const std::string path = folder_.path() + "/c.yml";
    std::ofstream(path, std::ios::binary) << text;
    return ReadConfig(path, &options_);
  }
  std::string FindingOf(const std::string& text) { return std::string(Read(text).status().message()); }
  TempDirectory folder_;
  ServerOptions options_;
};

TEST_F(ConfigTest, KeysAreCounted) {
  EXPECT_EQ(*Read(""), 0u);
  EXPECT_EQ(*Read("limits: {runs_live_max: 5}\nrules_file: r.yml\nweb: {hosts: [a, b], listen_address: ''}"), 4u);
  EXPECT_EQ(options_.engine.admission.runs_live_max, 5u);
  EXPECT_EQ(options_.web_address, "");
  EXPECT_EQ(options_.rules_file, folder_.path() + "/r.yml");
}

TEST_F(ConfigTest, AnAddressNamesAPortThatThereIs) {
  for (const char* key : {"grpc: {listen_address: ", "web: {listen_address: ", "cluster: {address: "}) {
    for (const char* bad :
         {"'127.0.0.1:65536'", "'127.0.0.1:99999'", "localhost", "'a:-1'", "'a:0x50'", "'a:010'", "[1]"}) {
      EXPECT_THAT(FindingOf(absl::StrCat(key, bad, "}")), HasSubstr("c.yml:1:")) << key << bad;
    }
    EXPECT_EQ(FindingOf(absl::StrCat(key, "'[::1]:65535'}")), "");
  }
  EXPECT_EQ(FindingOf("grpc: {listen_address: 'unix:/tmp/x'}"), "");
}

TEST_F(ConfigTest, EveryFieldOfAReceiverIsChecked) {
  const auto finding = [&](const std::string& fields) {
    return FindingOf("alerting:\n  webhooks:\n  - {url: 'http://a/'}\n  - {" + fields + "}\n");
  };
  EXPECT_EQ(finding("url: 'https://b:1/x', name: n, severity: info, send_resolved: false"), "");
  EXPECT_EQ(options_.webhooks.at(1).severity_min, Severity::kInfo);
  EXPECT_FALSE(options_.webhooks.at(1).send_resolved);
  EXPECT_THAT(finding("name: n"), HasSubstr("c.yml:4:5: alerting.webhooks[1] has no url"));
  EXPECT_THAT(finding("url: 'http://a:99999/'"), HasSubstr("c.yml:4:11: alerting.webhooks[1].url: "));
  EXPECT_THAT(finding("url: 'file:///etc/passwd'"), HasSubstr("must be http://"));
  EXPECT_THAT(finding("url: 'http://a/', url: 'http://b/'"), HasSubstr("stands twice"));
  EXPECT_THAT(finding("url: 'http://a/', severity: loud"), HasSubstr("must be one of info, warning, critical"));
  EXPECT_THAT(finding("url: 'http://a/', send_resolved: 1"), HasSubstr("must be true or false"));
  EXPECT_THAT(finding("url: 'http://a/', resend_seconds: 1"),
              HasSubstr("unknown key alerting.webhooks[1].resend_seconds"));
  EXPECT_THAT(FindingOf("alerting: {alertmanagers: [{url: 'http://a/', resend_seconds: 3601}]}"),
              HasSubstr("must be a whole number in [1, 3600]"));
  EXPECT_THAT(FindingOf("alerting: {webhooks: 1}"), HasSubstr("must be a list"));
  EXPECT_THAT(FindingOf("alerting: {webhooks: [1]}"), HasSubstr("alerting.webhooks[0] = 1: must be a map"));
}

TEST_F(ConfigTest, AWebhooksTemplateIsReadAndCheckedWithTheFile) {
  const std::string with = "alerting: {webhooks: [{url: 'http://a/', template_file: t.json}]}";
  const std::string place = "c.yml:1:57: alerting.webhooks[0].template_file = t.json: ";
  EXPECT_THAT(FindingOf(with), AllOf(HasSubstr(place), HasSubstr("t.json: cannot be read: No such file")));
  const auto finding = [&](const std::string& text) {
    std::ofstream(folder_.path() + "/t.json") << text;
    return FindingOf(with);
  };
  EXPECT_THAT(finding("{\"text\": \"{{nope}}\"}"),
              HasSubstr(place + "text = {{nope}}: {{nope}} must be one of external_url"));
  EXPECT_THAT(finding(std::string(70'000, ' ')), HasSubstr("is 70000 bytes long: at most 65536"));
  EXPECT_EQ(finding("{\"text\": \"{{headline}}\"}"), "");
  EXPECT_TRUE(options_.webhooks.at(0).body.has_value());
}

TEST_F(ConfigTest, TheKeyFormatSaysWhatReplacesIt) {
  EXPECT_THAT(FindingOf("alerting:\n  webhooks:\n  - {url: 'http://a/', format: slack}\n"),
              AllOf(HasSubstr("c.yml:3:32: alerting.webhooks[0].format = slack: "),
                    HasSubstr("write template_file: /usr/share/bellwether/webhook/slack.json")));
}

TEST_F(ConfigTest, AMisspelledKeyComesWithTheOneThatWasMeant) {
  const auto finding = [&](const std::string& text) { return FindingOf(text); };
  EXPECT_THAT(finding("grpc: {listen_adress: 'a:1'}"),
              HasSubstr("c.yml:1:8: unknown key grpc.listen_adress: did you mean grpc.listen_address?"));
  EXPECT_THAT(finding("limit: {runs_live_max: 1}"), HasSubstr("unknown key limit: did you mean limits?"));
  EXPECT_THAT(finding("rule_file: r.yml"), HasSubstr("unknown key rule_file: did you mean rules_file?"));
  EXPECT_THAT(finding("alerting: {webhooks: [{url: 'http://a/', severty: info}]}"),
              HasSubstr("did you mean alerting.webhooks[0].severity?; known: url, proxy_url, name, severity"));
  EXPECT_THAT(finding("colour: red"), EndsWith("unknown key colour")) << "nothing is near it";
}

TEST_F(ConfigTest, AKeyInTheWrongMapComesWithItsPlace) {
  EXPECT_THAT(FindingOf("runs_live_max: 5"),
              HasSubstr("unknown key runs_live_max: did you mean limits.runs_live_max?"));
  EXPECT_THAT(FindingOf("web: {free_ratio_min: 0.1}"), HasSubstr("did you mean storage.free_ratio_min?"));
  EXPECT_THAT(FindingOf("listen_address: 'a:1'"), EndsWith("unknown key listen_address")) << "two maps have it";
}

TEST_F(ConfigTest, ThePageOfTheConfigurationIsTheGeneratedOne) {
  std::ifstream file(std::string(BELLWETHER_SOURCE) + "/docs/reference/configuration.md");
  const std::string committed{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(committed, ConfigReference()) << "bellwetherd config reference > docs/reference/configuration.md";
}

TEST_F(ConfigTest, EveryKeyIsOnThePageWithItsMeaning) {
  const std::string page = ConfigReference();
  for (const auto& [key, value] : DescribeOptions(options_)) {
    const size_t at = page.find("| `" + key + "` | ");
    ASSERT_NE(at, std::string::npos) << key;
    const std::vector<std::string> cells = absl::StrSplit(page.substr(at, page.find('\n', at) - at), " | ");
    ASSERT_EQ(cells.size(), 6u) << key << " has a bar in a cell";
    EXPECT_NE(cells[1], "") << key << " has no default";
    EXPECT_NE(cells[2], "") << key << " has no range";
    EXPECT_THAT(cells[4], EndsWith(".")) << key << " says nothing, or no sentence";
  }
}

TEST_F(ConfigTest, FindingsLeaveTheOptionsUnchanged) {
  const auto before = DescribeOptions(options_);
  EXPECT_THAT(FindingOf("limits: {runs_live_max: 5}\nweb: {hosts: ['a:1']}\nnone: 1\n"),
              ::testing::AllOf(HasSubstr("c.yml:2:15: web.hosts[0] = a:1"), HasSubstr("c.yml:3:1: unknown key none")));
  EXPECT_EQ(DescribeOptions(options_), before);
}

}  // namespace
}  // namespace bellwether::server
