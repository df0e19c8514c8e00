#include "server/util/strict_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/util/clean_text.h"
#include "server/util/regular_file.h"

namespace bellwether::server {
namespace {

constexpr size_t kFindingsMax = 100;
constexpr size_t kScalarBytesShown = 60;
constexpr size_t kFindingBytesMax = 1000;

// A value as a finding quotes it.
std::string Shown(const YAML::Node& node) {
  if (node.IsMap()) return "a map";
  if (node.IsSequence()) return "a list";
  if (!node.IsScalar()) return "nothing";
  std::string text = CleanText(node.Scalar(), kScalarBytesShown);
  if (node.Scalar().size() > kScalarBytesShown) text += "...";
  // The parser tells a quoted scalar by this tag.
  return node.Tag() == "!" ? absl::StrCat("\"", text, "\"") : text;
}

// What to write instead of a number that some readers of YAML take for octal or
// hexadecimal; "" for all else.
std::string InDecimal(std::string_view text) {
  std::string sign;
  if (text.starts_with('-') || text.starts_with('+')) {
    if (text[0] == '-') sign = "-";
    text.remove_prefix(1);
  }
  const auto is_digit = [&text](size_t i) {
    return i < text.size() && absl::ascii_isdigit(static_cast<unsigned char>(text[i]));
  };
  if (text.starts_with("0x") || text.starts_with("0X") || text.starts_with("0o")) {
    const int base = text[1] == 'o' ? 8 : 16;
    text.remove_prefix(2);
    uint64_t value = 0;
    const auto [stopped, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    return error == std::errc() && stopped == text.data() + text.size() ? absl::StrCat(sign, value) : "";
  }
  if (!text.starts_with('0') || !is_digit(1) || text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) {
    return "";
  }
  while (text[0] == '0' && is_digit(1)) text.remove_prefix(1);
  return absl::StrCat(sign, std::string(text));
}

// Decimal only: absl::SimpleAtod takes hexadecimal, and skips spaces.
bool ReadNumber(std::string_view text, double* value) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stopped == end;
}

bool IsPlain(const YAML::Node& node) { return node.IsScalar() && node.Tag() != "!" && !node.Scalar().empty(); }

// Behind a legal range.
std::string WriteInDecimal(const YAML::Node& node) {
  const std::string decimal = IsPlain(node) ? InDecimal(node.Scalar()) : "";
  return decimal.empty() ? "" : absl::StrCat(", decimal: write ", decimal);
}

}  // namespace

namespace {

// Counts documents, and remembers where the last one begins.
class DocumentCounter final : public YAML::EventHandler {
 public:
  int count() const { return count_; }
  const YAML::Mark& last() const { return last_; }
  // Of what begins no document the parser takes nothing, for ever.
  bool stuck() const { return stuck_; }

  void OnDocumentStart(const YAML::Mark& at) override {
    stuck_ = count_ > 0 && at.pos == last_.pos;
    ++count_;
    last_ = at;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  int count_ = 0;
  bool stuck_ = false;
  YAML::Mark last_;
};

}  // namespace

std::optional<YAML::Node> StrictYaml::Load(std::string_view text, size_t bytes_max) {
  if (text.size() > bytes_max) {
    findings_.push_back(absl::StrCat(file_, ":1:1: the file is ", text.size(), " bytes long: at most ", bytes_max));
    return std::nullopt;
  }
  if (const absl::Status utf8 = CheckUtf8(text, file_); !utf8.ok()) {
    findings_.push_back(std::string(utf8.message()));
    return std::nullopt;
  }
  try {
    const std::string whole(text);
    // Not LoadAll(): of a text that begins with a comma it never finds the end.
    std::istringstream stream(whole);
    YAML::Parser parser(stream);
    DocumentCounter documents;
    while (documents.count() < 2 && parser.HandleNextDocument(documents)) continue;
    if (documents.count() > 1) {
      const char at = whole[std::min(static_cast<size_t>(documents.last().pos), whole.size() - 1)];
      Report(documents.last(), documents.stuck() ? absl::StrCat(std::string(1, at), " begins no document of YAML")
                                                 : "a second document: the file must hold one");
      return std::nullopt;
    }
    const YAML::Node root = YAML::Load(whole);
    return root.IsNull() ? YAML::Node(YAML::NodeType::Map) : root;
  } catch (const YAML::Exception& error) {
    Report(error.mark, error.msg);
  }
  return std::nullopt;
}

void StrictYaml::Report(const YAML::Mark& at, std::string_view what) {
  if (findings_.size() >= kFindingsMax) {
    ++more_;
    return;
  }
  findings_.push_back(
      absl::StrCat(file_, ":", at.line + 1, ":", at.column + 1, ": ", CleanText(what, kFindingBytesMax)));
}

bool StrictYaml::ForEach(const YAML::Node& map, const std::string& path, const Visit& visit) {
  if (!map.IsMap()) {
    Report(map, absl::StrCat(path.empty() ? "the file" : path, " = ", Shown(map), ": must be a map"));
    return false;
  }
  std::set<std::string> seen;
  for (const auto& entry : map) {
    if (!entry.first.IsScalar()) {
      Report(entry.first, absl::StrCat(path.empty() ? "the file" : path, ": a key must be a word"));
      continue;
    }
    const std::string& key = entry.first.Scalar();
    if (!seen.insert(key).second) {
      Report(entry.first, absl::StrCat(path.empty() ? "" : path + ".", Shown(entry.first), " stands twice"));
      continue;
    }
    visit(key, entry.first, entry.second);
  }
  return true;
}

std::vector<YAML::Node> StrictYaml::List(const YAML::Node& node, const std::string& path, size_t count_max) {
  std::vector<YAML::Node> items;
  if (!node.IsSequence()) {
    Report(node, absl::StrCat(path, " = ", Shown(node), ": must be a list"));
    return items;
  }
  if (node.size() > count_max) {
    Report(node, absl::StrCat(path, " holds ", node.size(), " entries: at most ", count_max));
    return items;
  }
  for (const YAML::Node& item : node) items.push_back(item);
  return items;
}

bool StrictYaml::Number(const YAML::Node& node, const std::string& path, double low, double high, double* out) {
  double value = 0;
  const std::string decimal = WriteInDecimal(node);
  if (!IsPlain(node) || !decimal.empty() || !ReadNumber(node.Scalar(), &value) || !(value >= low && value <= high)) {
    Report(node, absl::StrCat(path, " = ", Shown(node), ": must be a number in [", low, ", ", high, "]", decimal));
    return false;
  }
  *out = value;
  return true;
}

bool StrictYaml::Integer(const YAML::Node& node, const std::string& path, int64_t low, int64_t high, int64_t* out) {
  int64_t value = 0;
  const std::string decimal = WriteInDecimal(node);
  if (!IsPlain(node) || !decimal.empty() || !absl::SimpleAtoi(node.Scalar(), &value) || value < low || value > high) {
    Report(node,
           absl::StrCat(path, " = ", Shown(node), ": must be a whole number in [", low, ", ", high, "]", decimal));
    return false;
  }
  *out = value;
  return true;
}

bool StrictYaml::Flag(const YAML::Node& node, const std::string& path, bool* out) {
  if (!IsPlain(node) || (node.Scalar() != "true" && node.Scalar() != "false")) {
    Report(node, absl::StrCat(path, " = ", Shown(node), ": must be true or false"));
    return false;
  }
  *out = node.Scalar() == "true";
  return true;
}

bool StrictYaml::Text(const YAML::Node& node, const std::string& path, size_t bytes_max, std::string* out) {
  if (!node.IsScalar()) {
    Report(node, absl::StrCat(path, " = ", Shown(node), ": must be a text"));
    return false;
  }
  const std::string& text = node.Scalar();
  if (text.empty() || text.size() > bytes_max) {
    Report(node, absl::StrCat(path, " is ", text.size(), " bytes long: must be 1 to ", bytes_max));
    return false;
  }
  for (const char c : text) {
    if (!absl::ascii_iscntrl(static_cast<unsigned char>(c))) continue;
    Report(node, absl::StrCat(path, " holds control character ", static_cast<int>(c), ": must be one line of text"));
    return false;
  }
  *out = text;
  return true;
}

bool StrictYaml::Choice(const YAML::Node& node, const std::string& path, std::span<const char* const> words,
                        size_t* out) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (!node.IsScalar() || node.Scalar() != words[i]) continue;
    *out = i;
    return true;
  }
  Report(node, absl::StrCat(path, " = ", Shown(node), ": must be one of ", absl::StrJoin(words, ", ")));
  return false;
}

absl::Status StrictYaml::status() const {
  if (clean()) return absl::OkStatus();
  std::string text = absl::StrJoin(findings_, "\n");
  if (more_ > 0) absl::StrAppend(&text, "\n", file_, ": and ", more_, " more");
  return absl::InvalidArgumentError(text);
}

}  // namespace bellwether::server
