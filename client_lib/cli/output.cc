#include "cli/output.h"

#include <google/protobuf/util/json_util.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>

#include "bellwether/signal_title.h"
#include "bellwether/time_text.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::cli {
namespace {

using Json = nlohmann::ordered_json;

bool for_people = false;

void PrintTable(const Table& table, bool headers) {
  std::vector<std::string> left_out;
  const size_t width = ForPeople() && table.fit ? TerminalWidth() : 0;
  for (const std::string& line : Lines(table, headers, width, Colours(), &left_out)) std::cout << line << '\n';
  if (ForPeople() && table.rows.empty()) std::cout << "(none)\n";
  if (left_out.empty()) return;
  std::string names;
  for (const std::string& name : left_out) names += (names.empty() ? "" : ", ") + name;
  Complain("no room for " + names + " (see --wide)");
}

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

void PrintCsv(const Table& table, bool headers) {
  const auto line = [](const auto& fields, const auto& text) {
    for (size_t i = 0; i < fields.size(); ++i) std::cout << (i == 0 ? "" : ",") << CsvField(text(fields[i]));
    std::cout << "\n";
  };
  if (headers) line(table.columns, [](const std::string& name) { return name; });
  for (const auto& row : table.rows) line(row, [](const Cell& cell) { return cell.text; });
}

// Strings are written as JSON writes them, which is legal YAML and leaves no
// doubt about types.
void EmitYaml(const Json& value, int indent, std::string* out) {
  const std::string margin(static_cast<size_t>(indent), ' ');
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, item] : value.items()) {
      const bool plain =
          !key.empty() &&
          key.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_") == std::string::npos;
      *out += margin + (plain ? key : Json(key).dump()) + ":";
      const bool nested = item.is_structured() && !item.empty();
      *out += nested ? "\n" : " ";
      EmitYaml(item, indent + 2, out);
    }
  } else if (value.is_array() && !value.empty()) {
    for (const Json& item : value) {
      if (item.is_structured() && !item.empty()) {
        std::string inner;
        EmitYaml(item, indent + 2, &inner);
        inner[static_cast<size_t>(indent)] = '-';
        *out += inner;
      } else {
        *out += margin + "- " + item.dump() + "\n";
      }
    }
  } else {
    *out += value.dump() + "\n";
  }
}

// Whether what is first written as `file`.part may take the name `file`.
bool CanReplace(const std::string& file) {
  for (const std::string& path : {file, file + ".part"}) {
    std::string why;
    if (client::CanBeRegularFile(path, &why)) continue;
    Complain(path + ": " + why);
    return false;
  }
  return true;
}

}  // namespace

bool ForPeople() { return for_people; }

void SetForPeople(const OutputOptions& options) {
  for_people = options.format == Format::kTable && !options.wide && isatty(STDOUT_FILENO) == 1;
}

bool Colours() {
  static const bool colours = [] {
    const char* const refused = std::getenv("NO_COLOR");
    const char* const term = std::getenv("TERM");
    return isatty(STDOUT_FILENO) == 1 && (refused == nullptr || *refused == '\0') &&
           (term == nullptr || std::string_view(term) != "dumb");
  }();
  return colours;
}

size_t TerminalWidth() {
  winsize size{};
  if (isatty(STDOUT_FILENO) != 1 || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col;
}

std::string ToJson(const google::protobuf::Message& message, bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string compact;
  if (!google::protobuf::util::MessageToJsonString(message, &compact, options).ok()) return "{}";
  // Protobuf's own whitespace puts a blank before each newline.
  return pretty ? Json::parse(compact).dump(2) : compact;
}

std::string ToYaml(const std::string& json) {
  std::string yaml;
  EmitYaml(Json::parse(json), 0, &yaml);
  return yaml;
}

void Print(const OutputOptions& options, const Table& table, const google::protobuf::Message& message) {
  switch (options.format) {
    case Format::kTable:
      return PrintTable(table, options.headers);
    case Format::kCsv:
      return PrintCsv(table, options.headers);
    case Format::kJson:
      std::cout << ToJson(message, true) << '\n';
      return;
    case Format::kYaml:
      std::cout << ToYaml(ToJson(message, false));
      return;
  }
}

void Print(const OutputOptions& options, const std::vector<Section>& sections,
           const google::protobuf::Message& message) {
  if (options.format == Format::kJson || options.format == Format::kYaml) return Print(options, Table(), message);
  for (size_t i = 0; i < sections.size(); ++i) {
    if (options.format == Format::kCsv) {
      // One header for sections that are one table cut into parts.
      const bool same = i > 0 && sections[i].table.columns == sections[i - 1].table.columns;
      PrintCsv(sections[i].table, options.headers && !same);
      continue;
    }
    if (i > 0) std::cout << '\n';
    if (!sections[i].title.empty()) std::cout << sections[i].title << '\n';
    PrintTable(sections[i].table, options.headers);
  }
}

bool PrintItem(const OutputOptions& options, const Table& table, const google::protobuf::Message& message, bool first) {
  switch (options.format) {
    case Format::kTable: {
      static std::vector<size_t> widths;  // Of all lines so far.
      Table aligned = table;
      if (ForPeople())
        aligned.widths = widths =
            ColumnWidths({.columns = table.columns, .rows = table.rows, .widths = first ? table.widths : widths}, true);
      PrintTable(aligned, options.headers && first);
      break;
    }
    case Format::kCsv:
      PrintCsv(table, options.headers && first);
      break;
    case Format::kJson:
      std::cout << ToJson(message, false) << '\n';
      break;
    case Format::kYaml:
      std::cout << "---\n" << ToYaml(ToJson(message, false));
      break;
  }
  return static_cast<bool>(std::cout.flush());
}

std::string Number(double value, int digits) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Inf" : "-Inf";
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string Integer(int64_t value) { return value < 0 ? "-" : std::to_string(value); }

std::string Date(int64_t unix_ns) {
  if (unix_ns == 0) return "-";
  const time_t seconds = unix_ns / 1'000'000'000;
  tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

int64_t NowUnixNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string Time(int64_t unix_ns) {
  constexpr double kDays = 30;  // What is longer ago, or still to come, has a date.
  const double seconds = 1e-9 * static_cast<double>(NowUnixNs() - unix_ns);
  if (unix_ns == 0 || !ForPeople() || std::abs(seconds) > kDays * 86400) return Date(unix_ns);
  return seconds >= 0 ? TimeText(seconds) + " ago" : "in " + TimeText(-seconds);
}

std::string Stage(uint32_t stage) {
  static constexpr const char* kNames[] = {"healthy", "drift", "ties", "norm", "logits", "loss"};
  return stage < std::size(kNames) ? std::to_string(stage) + " " + kNames[stage] : std::to_string(stage);
}

std::string Stage(const v1::Run& run) {
  if (run.stage() > 0 || !run.has_judged()) return Stage(run.stage());
  return "0 " + run.judged().text();
}

std::string LossText(const v1::Run& run, int digits, const char* none) {
  const auto& reported = run.signals();
  const bool known = !std::isnan(run.loss()) || std::find(reported.begin(), reported.end(), "loss") != reported.end();
  return known ? Number(run.loss(), digits) : none;
}

std::string JudgedText(const v1::Run& run) {
  std::string text;
  for (const v1::Judged::Family& family : run.judged().families()) {
    const bool of_run = family.name() == "loss";
    text += (text.empty() ? "" : ", ") + family.name() + " " +
            (of_run ? family.layers() > 0 ? "yes" : "no"
                    : std::to_string(family.layers()) + " of " + std::to_string(family.of()) + " layers");
  }
  return text.empty() ? "-" : text;
}

std::string EtaText(const v1::Eta& eta) {
  if (!eta.known()) return "-";
  const auto whole = [](double steps) { return Integer(std::llround(steps)); };
  std::string text =
      ForPeople()
          ? "~" + whole(eta.steps()) + " (" + whole(eta.lower_steps()) + "-" + whole(eta.upper_steps()) + ")"
          : Number(eta.steps(), 4) + " (" + Number(eta.lower_steps(), 4) + ".." + Number(eta.upper_steps(), 4) + ")";
  if (eta.step_seconds() > 0) text += ", " + TimeText(eta.steps() * eta.step_seconds());
  return text;
}

std::string DoText(const v1::Transition& transition) {
  return transition.do_first().empty() ? transition.advice() : transition.do_first();
}

std::string SummaryText(const v1::Transition& transition) {
  const std::string name = transition.run() + ": ";
  const bool repeats = ForPeople() && transition.summary().rfind(name, 0) == 0;
  return repeats ? transition.summary().substr(name.size()) : transition.summary();
}

std::string BandText(const v1::SiblingBand& band) {
  if (band.runs() == 0) return "-";
  return Number(band.p01(), 3) + ".." + Number(band.p99(), 3) + " in " + std::to_string(band.runs()) +
         (band.runs() == 1 ? " run" : " runs");
}

std::string SignalText(const std::string& name) { return ForPeople() ? std::string(SignalTitle(name)) : name; }

std::string HeadText(int32_t layer, int32_t head) {
  if (layer < 0) return "-";
  char text[32];
  std::snprintf(text, sizeof text, head < 0 ? "L%d" : "L%d H%d", layer, head);
  return text;
}

const char* SeverityName(v1::Severity severity) {
  switch (severity) {
    case v1::SEVERITY_INFO:
      return "info";
    case v1::SEVERITY_WARNING:
      return "warning";
    case v1::SEVERITY_CRITICAL:
      return "critical";
    default:
      return "-";
  }
}

const char* StateName(v1::AlertState state) {
  switch (state) {
    case v1::ALERT_STATE_FIRING:
      return "firing";
    case v1::ALERT_STATE_RESOLVED:
      return "resolved";
    default:
      return "-";
  }
}

std::string Hex(std::string_view bytes) {
  std::string hex;
  for (const char c : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
    hex += digits;
  }
  return hex;
}

void Complain(const std::string& text) { std::cerr << "bellwether: " << Clean(text) << '\n'; }

bool WriteWhole(const std::string& file, const std::function<bool(std::ostream*)>& write) {
  if (!CanReplace(file)) return false;
  const std::string part = file + ".part";
  std::ofstream out(part, std::ios::binary | std::ios::trunc);
  if (!out) {
    Complain(part + ": cannot be written");
    return false;
  }
  bool whole = write(&out);
  out.close();
  if (whole && !out) {
    Complain(part + ": cannot be written");
    whole = false;
  }
  std::error_code error;
  if (whole) {
    std::filesystem::rename(part, file, error);
    if (!error) return true;
    Complain(file + ": " + error.message());
  }
  std::filesystem::remove(part, error);
  return false;
}

void ComplainOf(const google::protobuf::RepeatedPtrField<std::string>& unanswered, const std::string& theirs) {
  if (unanswered.empty()) return;
  std::string names;
  for (const std::string& server : unanswered) names += (names.empty() ? "" : ", ") + server;
  Complain(std::to_string(unanswered.size()) +
           (unanswered.size() == 1 ? " server of the cluster did not answer: its "
                                   : " servers of the cluster did not answer: their ") +
           theirs + " (" + names + ")");
}

}  // namespace bellwether::cli
