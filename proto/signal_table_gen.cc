// signal_table_gen.cc: turns the options of signals.proto into a C++ table and
// the reference page.
//
//   signal_table_gen OUT_DIR TITLES
//
// writes OUT_DIR/bellwether/signal_id.h, OUT_DIR/bellwether/signal_table.cc, OUT_DIR/bellwether/signal_title.cc and
// OUT_DIR/signals.md.  TITLES is signal_titles.json.  Fails on a catalogue that contradicts itself: a name
// twice, a measured signal without a merge rule, a derived one without parts, a metric that shows another end than the
// worst, a title of a signal that there is not.

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "bellwether/v1/signals.pb.h"

namespace {

using bellwether::v1::SignalSpec;
namespace v1 = bellwether::v1;

struct Entry {
  int number = 0;
  std::string enumerator;  // kDriftRatio
  SignalSpec spec;
};

std::string CamelCase(const std::string& snake) {
  std::string camel = "k";
  bool up = true;
  for (const char c : snake) {
    if (c == '_') {
      up = true;
      continue;
    }
    camel += up ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    up = false;
  }
  return camel;
}

std::string Quote(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

[[noreturn]] void Fail(const std::string& why) {
  std::cerr << "signals.proto: " << why << "\n";
  std::exit(1);
}

bool IsDerived(int number) { return number >= 64 && number < 128; }

std::vector<Entry> ReadCatalogue() {
  std::vector<Entry> entries;
  std::map<std::string, std::string> by_name;
  const auto* descriptor = v1::Signal_descriptor();
  for (int i = 0; i < descriptor->value_count(); ++i) {
    const auto* value = descriptor->value(i);
    if (value->number() == 0) continue;
    Entry entry{value->number(), "", value->options().GetExtension(v1::signal)};
    if (entry.spec.name().empty()) Fail(value->name() + " has no (signal) option");
    entry.enumerator = CamelCase(entry.spec.name());
    if (!by_name.emplace(entry.spec.name(), entry.enumerator).second) Fail(entry.spec.name() + " stands twice");
    entries.push_back(entry);
  }
  for (const Entry& entry : entries) {
    const SignalSpec& spec = entry.spec;
    const bool derived = IsDerived(entry.number);
    if (spec.granularity() == v1::GRANULARITY_UNSPECIFIED) Fail(spec.name() + " has no granularity");
    if (derived != (spec.merge() == v1::MERGE_UNSPECIFIED))
      Fail(spec.name() + ": merge is for measured signals, below 64 or from 128 on");
    if (derived && (!by_name.count(spec.numerator()) || !by_name.count(spec.denominator())))
      Fail(spec.name() + " needs a numerator and a denominator of the catalogue");
    for (const auto& metric : spec.metric()) {
      const bool of_rows = spec.granularity() == v1::GRANULARITY_TENSOR ||
                           spec.granularity() == v1::GRANULARITY_MODULE || spec.granularity() == v1::GRANULARITY_RANK;
      if ((metric.level() == v1::METRIC_LEVEL_ROW) != of_rows) Fail(metric.name() + " has no level of its signal");
      if (metric.aggregate() == v1::AGGREGATE_MIN && spec.worst() != v1::WORST_SMALLEST)
        Fail(metric.name() + " is the smallest, which " + spec.name() + " does not say is worst");
      if (metric.aggregate() == v1::AGGREGATE_SIGNED_EXTREME && spec.worst() != v1::WORST_FURTHEST)
        Fail(metric.name() + " is the furthest from zero, which " + spec.name() + " does not say is worst");
    }
  }
  return entries;
}

std::string Id(const std::string& name) { return name.empty() ? "SignalId::kNone" : "SignalId::" + CamelCase(name); }

std::string Header(const std::vector<Entry>& entries) {
  std::ostringstream out;
  out << "// Generated from signals.proto; do not edit.\n#ifndef BELLWETHER_SIGNAL_ID_H_\n#define "
         "BELLWETHER_SIGNAL_ID_H_\n\n"
      << "#include <cstdint>\n\nnamespace bellwether {\n\nenum class SignalId : uint16_t {\n  kNone = 0,\n";
  int last = 0;
  for (const Entry& entry : entries) {
    out << "  " << entry.enumerator << " = " << entry.number << ",\n";
    last = std::max(last, entry.number);
  }
  out << "};\n\n// One more than the largest id: the size of a table indexed by id.\n"
      << "inline constexpr int kSignalIdEnd = " << last + 1 << ";\n\n}  // namespace bellwether\n\n#endif\n";
  return out.str();
}

// FindSignal() looks ids up in it by halves: their order in the catalogue need not be that of numbers.
std::string Table(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.number < b.number; });
  std::ostringstream out;
  out << "// Generated from signals.proto; do not edit.\n#include \"bellwether/signal_table.h\"\n\n#include "
         "<algorithm>\n#include <iterator>\n\n"
      << "namespace bellwether {\nnamespace {\n\n";
  for (const Entry& entry : entries) {
    if (entry.spec.metric_size() == 0) continue;
    out << "constexpr MetricInfo " << entry.enumerator << "Metrics[] = {\n";
    for (const auto& metric : entry.spec.metric()) {
      const size_t equals = metric.label().find('=');
      const std::string label = metric.label().substr(0, equals);
      const std::string value = equals == std::string::npos ? "" : metric.label().substr(equals + 1);
      out << "    {static_cast<MetricLevel>(" << metric.level() << "), static_cast<Aggregate>(" << metric.aggregate()
          << "), " << Quote(metric.name()) << ", " << Quote(metric.help()) << ", " << Quote(label) << ", "
          << Quote(value) << "},\n";
    }
    out << "};\n";
  }
  out << "\nconstexpr SignalInfo kTable[] = {\n";
  for (const Entry& entry : entries) {
    const SignalSpec& spec = entry.spec;
    out << "    {SignalId::" << entry.enumerator << ", " << Quote(spec.name()) << ", " << Quote(spec.unit())
        << ", static_cast<Granularity>(" << spec.granularity() << "), static_cast<Merge>(" << spec.merge() << "), "
        << (IsDerived(entry.number) ? "true" : "false") << ", " << Id(spec.numerator()) << ", "
        << Id(spec.denominator()) << ", " << (spec.denominator_root() ? "true" : "false") << ", "
        << (spec.root() ? "true" : "false") << ", static_cast<Worst>(" << spec.worst() << "), " << Quote(spec.help())
        << ", ";
    if (spec.metric_size() == 0) {
      out << "nullptr, 0},\n";
    } else {
      out << entry.enumerator << "Metrics, " << spec.metric_size() << "},\n";
    }
  }
  out << "};\n\n}  // namespace\n\nconst SignalInfo* SignalTable() { return kTable; }\n"
      << "size_t SignalCount() { return std::size(kTable); }\n\n"
      << "const SignalInfo* FindSignal(SignalId id) {\n"
      << "  const auto* end = std::end(kTable);\n"
      << "  const auto* found = std::lower_bound(std::begin(kTable), end, id,\n"
      << "      [](const SignalInfo& info, SignalId want) { return info.id < want; });\n"
      << "  return found != end && found->id == id ? found : nullptr;\n}\n\n"
      << "const SignalInfo* FindSignal(std::string_view name) {\n"
      << "  for (const SignalInfo& info : kTable) {\n    if (info.name == name) return &info;\n  }\n  return "
         "nullptr;\n}\n\n"
      << "}  // namespace bellwether\n";
  return out.str();
}

// What people call signals, by name; those of evidence alone as well.
std::map<std::string, std::string> ReadTitles(const std::string& path, const std::vector<Entry>& entries) {
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  google::protobuf::Struct read;
  if (!file || !google::protobuf::util::JsonStringToMessage(text, &read).ok()) Fail("cannot read " + path);
  std::map<std::string, std::string> titles;
  for (const char* const part : {"signals", "evidence"}) {
    const bool known = part == std::string("signals");
    for (const auto& [name, title] : read.fields().at(part).struct_value().fields()) {
      const bool found =
          std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) { return entry.spec.name() == name; });
      if (found != known) Fail(path + ": " + name + (known ? " is no signal" : " is a signal"));
      if (title.string_value().empty()) Fail(path + ": " + name + " has no title");
      titles[name] = title.string_value();
    }
  }
  return titles;
}

std::string TitleTable(const std::map<std::string, std::string>& titles) {
  std::ostringstream out;
  out << "// Generated from signal_titles.json; do not edit.\n#include \"bellwether/signal_title.h\"\n\n#include "
         "<algorithm>\n#include <iterator>\n#include <utility>\n\nnamespace bellwether {\nnamespace {\n\n"
      << "// By name.\nconstexpr std::pair<std::string_view, std::string_view> kTitles[] = {\n";
  for (const auto& [name, title] : titles) out << "    {" << Quote(name) << ", " << Quote(title) << "},\n";
  out << "};\n\n}  // namespace\n\nstd::string_view SignalTitle(std::string_view name) {\n"
      << "  const auto* found = std::lower_bound(std::begin(kTitles), std::end(kTitles), name,\n"
      << "      [](const auto& entry, std::string_view want) { return entry.first < want; });\n"
      << "  return found != std::end(kTitles) && found->first == name ? found->second : name;\n}\n\n"
      << "}  // namespace bellwether\n";
  return out.str();
}

std::string Page(const std::vector<Entry>& entries, const std::map<std::string, std::string>& titles) {
  const std::map<int, std::string> granularity = {{1, "run"},    {2, "head"},   {3, "key head"},
                                                  {4, "layer"},  {5, "expert"}, {6, "rank"},
                                                  {7, "tensor"}, {8, "module"}, {9, "cell of an own signal"}};
  const std::map<int, std::string> merge = {{0, "-"}, {1, "sum"}, {2, "max"}, {3, "mean"}, {4, "equal"}};
  const std::map<int, std::string> worst = {
      {0, ""}, {1, ". The smallest are the worst"}, {2, ". The furthest from 0 are the worst"}};
  std::ostringstream out;
  out << "# Signals\n\nGenerated from `proto/bellwether/v1/signals.proto`; do not edit. S = scale Q K^T, T = a sampled "
         "query row, "
         "m_T its largest score, P its probabilities, l_T = sum exp(S - m_T), n_T its number of allowed keys.\n\n"
         "| number | name | people call it | of a | unit | merge | definition |\n| --- | --- | --- | --- | --- | --- | "
         "--- |\n";
  for (const Entry& entry : entries) {
    const SignalSpec& spec = entry.spec;
    const auto title = titles.find(spec.name());
    out << "| " << entry.number << " | `" << spec.name() << "` | " << (title == titles.end() ? "" : title->second)
        << " | " << granularity.at(spec.granularity()) << " | " << spec.unit() << " | " << merge.at(spec.merge())
        << " | " << spec.help();
    if (!spec.numerator().empty()) {
      out << "; " << (spec.root() ? "sqrt(`" : "`") << spec.numerator() << "` / "
          << (spec.denominator_root() ? "sqrt(`" : "`") << spec.denominator()
          << (spec.denominator_root() || spec.root() ? "`)" : "`");
    }
    out << worst.at(spec.worst()) << " |\n";
  }
  out << "\n## Exported to Prometheus\n\n| metric | from | labels | help |\n| --- | --- | --- | --- |\n";
  const std::map<int, std::string> labels = {{1, "run"}, {2, "run, layer"}, {3, "run, layer, head"}, {4, "run, "}};
  for (const Entry& entry : entries) {
    for (const auto& metric : entry.spec.metric()) {
      out << "| `" << metric.name() << "` | `" << entry.spec.name() << "` | " << labels.at(metric.level())
          << (metric.level() == v1::METRIC_LEVEL_ROW ? granularity.at(entry.spec.granularity()) : "")
          << (metric.label().empty() ? "" : ", " + metric.label()) << " | " << metric.help() << " |\n";
    }
  }
  return out.str();
}

// A file that is as it was keeps its time, so that nothing is compiled for it.
void Write(const std::string& path, const std::string& text) {
  std::ifstream before(path);
  if (before && std::string(std::istreambuf_iterator<char>(before), {}) == text) return;
  before.close();
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) Fail("cannot write " + path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: signal_table_gen OUT_DIR TITLES\n";
    return 2;
  }
  const std::string out = argv[1];
  const std::vector<Entry> entries = ReadCatalogue();
  const std::map<std::string, std::string> titles = ReadTitles(argv[2], entries);
  Write(out + "/bellwether/signal_id.h", Header(entries));
  Write(out + "/bellwether/signal_table.cc", Table(entries));
  Write(out + "/bellwether/signal_title.cc", TitleTable(titles));
  Write(out + "/signals.md", Page(entries, titles));
  return 0;
}
