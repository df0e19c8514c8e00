#include "server/offline/rule_test_file.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"
#include "server/util/strict_yaml.h"

namespace bellwether::server {
namespace {

constexpr size_t kBytesMax = 1 << 20;
constexpr size_t kTestsMax = 256;
constexpr size_t kEntriesMax = 256;  // Of any list in a test.
constexpr int64_t kStepsMax = 200'000;
constexpr int64_t kSideMax = 128;  // Layers, heads.

// In the order of EventKind.
constexpr const char* kEvents[] = {"learning_rate", "restore",         "checkpoint_saved", "evaluation",     "attach",
                                   "detach",        "centring_on",     "centring_off",     "attention_mode", "data",
                                   "batch_size",    "sequence_length", "annotation"};
constexpr const char* kSeverities[] = {"info", "warning", "critical"};
constexpr const char* kFormulas[] = {"constant", "ramp", "exponential"};

// A key of a map and what reads its value.
struct Key {
  const char* name;
  bool required;
  std::function<void(const YAML::Node& value, const std::string& path)> read;
};

class RuleTestReader {
 public:
  explicit RuleTestReader(StrictYaml* yaml) : yaml_(*yaml) {}

  void ReadFile(const YAML::Node& root, RuleTestFile* file) {
    Read(root, "",
         {{"rules_file", false,
           [&](const auto& value, const auto& path) { yaml_.Text(value, path, 1024, &file->rules_file); }},
          {"tests", true, [&](const auto& value, const auto& path) {
             const auto items = yaml_.List(value, path, kTestsMax);
             for (size_t i = 0; i < items.size(); ++i)
               ReadTest(items[i], absl::StrCat(path, "[", i, "]"), &file->tests.emplace_back());
           }}});
  }

 private:
  void Read(const YAML::Node& map, const std::string& path, const std::vector<Key>& keys) {
    std::set<std::string> seen;
    const std::string prefix = path.empty() ? "" : path + ".";
    const bool is_map =
        yaml_.ForEach(map, path, [&](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
          const auto key = std::find_if(keys.begin(), keys.end(), [&](const Key& k) { return k.name == name; });
          if (key == keys.end()) {
            std::vector<const char*> known;
            for (const Key& k : keys) known.push_back(k.name);
            return yaml_.Report(at, absl::StrCat(prefix, name, " is unknown; known: ", absl::StrJoin(known, ", ")));
          }
          seen.insert(name);
          key->read(value, prefix + name);
        });
    for (const Key& key : keys) {
      if (is_map && key.required && !seen.contains(key.name))
        yaml_.Report(map, absl::StrCat(prefix, key.name, " is missing"));
    }
  }

  Key Whole(const char* name, bool required, int64_t low, int64_t high, int64_t* to) {
    return {name, required,
            [=, this](const auto& value, const auto& path) { yaml_.Integer(value, path, low, high, to); }};
  }
  Key Real(const char* name, bool required, double low, double high, double* to) {
    return {name, required,
            [=, this](const auto& value, const auto& path) { yaml_.Number(value, path, low, high, to); }};
  }
  Key Word(const char* name, bool required, std::string* to) {
    return {name, required, [=, this](const auto& value, const auto& path) { yaml_.Text(value, path, 256, to); }};
  }
  Key Flag(const char* name, bool* to) {
    return {name, false, [=, this](const auto& value, const auto& path) { yaml_.Flag(value, path, to); }};
  }
  template <class ReadItem>
  Key List(const char* name, bool required, const ReadItem& read) {
    return {name, required, [=, this](const auto& value, const auto& path) {
              const auto items = yaml_.List(value, path, kEntriesMax);
              for (size_t i = 0; i < items.size(); ++i) read(items[i], absl::StrCat(path, "[", i, "]"));
            }};
  }

  void ReadTest(const YAML::Node& node, const std::string& path, RuleTest* test) {
    YAML::Node series;
    std::string series_path;
    int64_t every = 20;
    test->run.name = "test";
    test->run.layout = {.layers = 4, .heads = 4, .kv_heads = 4};
    test->run.attention.score_dtype = "bf16";
    Read(node, path,
         {Word("name", true, &test->name),
          {"layout", false, [&](const auto& value, const auto& at) { ReadLayout(value, at, &test->run.layout); }},
          {"attention", false,
           [&](const auto& value, const auto& at) {
             AttentionTraits* traits = &test->run.attention;
             Read(value, at,
                  {Word("score_dtype", false, &traits->score_dtype), Word("kernel", false, &traits->kernel),
                   Flag("centred", &traits->centred), Flag("qk_norm", &traits->qk_norm)});
           }},
          Whole("steps", true, 1, kStepsMax, &test->steps),
          Whole("every", false, 1, 10000, &every),
          // Read last: it needs the layout, wherever that stands.
          {"series", true, [&](const auto& value, const auto& at) { series.reset(value), series_path = at; }},
          List("events", false,
               [&](const auto& value, const auto& at) { ReadEvent(value, at, &test->events.emplace_back()); }),
          List("only", false,
               [&](const auto& value, const auto& at) { yaml_.Text(value, at, 64, &test->only.emplace_back()); }),
          List("expect", true,
               [&](const auto& value, const auto& at) { ReadExpectation(value, at, &test->expect.emplace_back()); })});
    if (series_path.empty()) return;
    const auto items = yaml_.List(series, series_path, kEntriesMax);
    for (size_t i = 0; i < items.size(); ++i) {
      ReadSeries(items[i], absl::StrCat(series_path, "[", i, "]"), test->run.layout, every,
                 &test->series.emplace_back());
    }
    CheckParts(*test, series, series_path);
    const auto by_step = [](const auto& a, const auto& b) { return a.step < b.step; };
    std::stable_sort(test->events.begin(), test->events.end(), by_step);
    std::stable_sort(test->expect.begin(), test->expect.end(), by_step);
    if (!test->expect.empty() && test->expect.back().step > test->steps) {
      yaml_.Report(node, absl::StrCat(path, ".expect = step ", test->expect.back().step,
                                      ": must be at most steps = ", test->steps));
    }
  }

  void ReadLayout(const YAML::Node& node, const std::string& path, Layout* layout) {
    int64_t layers = layout->layers;
    int64_t heads = layout->heads;
    int64_t kv_heads = 0;
    Read(node, path,
         {Whole("layers", false, 1, kSideMax, &layers), Whole("heads", false, 1, kSideMax, &heads),
          Whole("kv_heads", false, 1, kSideMax, &kv_heads)});
    if (kv_heads == 0) kv_heads = heads;
    if (heads % kv_heads != 0) {
      yaml_.Report(node, absl::StrCat(path, ".kv_heads = ", kv_heads, ": must divide heads = ", heads));
      return;
    }
    layout->layers = static_cast<int32_t>(layers);
    layout->heads = static_cast<int32_t>(heads);
    layout->kv_heads = static_cast<int32_t>(kv_heads);
  }

  void ReadEvent(const YAML::Node& node, const std::string& path, RunEvent* event) {
    Read(node, path,
         {Whole("step", true, 0, kStepsMax, &event->step),
          {"kind", true,
           [&](const auto& value, const auto& at) {
             size_t chosen = 0;
             if (yaml_.Choice(value, at, kEvents, &chosen)) event->kind = static_cast<EventKind>(chosen + 1);
           }},
          Real("value", false, -1e12, 1e12, &event->value),
          Word("text", false, &event->text)});
  }

  void ReadExpectation(const YAML::Node& node, const std::string& path, Expectation* expectation) {
    Read(node, path,
         {Whole("step", true, 0, kStepsMax, &expectation->step),
          List("alerts", true,
               [&](const auto& value, const auto& at) { ReadAlert(value, at, &expectation->alerts.emplace_back()); })});
  }

  void ReadAlert(const YAML::Node& node, const std::string& path, ExpectedAlert* alert) {
    const auto optional = [this](const char* name, int64_t low, int64_t high, std::optional<int64_t>* to) -> Key {
      return {name, false, [=, this](const auto& value, const auto& at) {
                int64_t number = 0;
                if (yaml_.Integer(value, at, low, high, &number)) *to = number;
              }};
    };
    Read(node, path,
         {Word("rule", true, &alert->rule),
          {"severity", false,
           [&](const auto& value, const auto& at) {
             size_t chosen = 0;
             if (yaml_.Choice(value, at, kSeverities, &chosen)) alert->severity = static_cast<Severity>(chosen + 1);
           }},
          optional("stage", 0, 5, &alert->stage),
          optional("layer", -1, kSideMax, &alert->layer),
          optional("head", -1, kSideMax, &alert->head)});
  }

  void ReadSeries(const YAML::Node& node, const std::string& path, const Layout& layout, int64_t every,
                  TestSeries* series) {
    YAML::Node heads;
    std::string heads_path;
    series->every = 0;
    Read(node, path,
         {{"signal", true,
           [&](const auto& value, const auto& at) {
             std::string name;
             if (!yaml_.Text(value, at, 128, &name)) return;
             series->signal = FindSignal(name);
             if (series->signal == nullptr)
               yaml_.Report(value, absl::StrCat(at, " = ", name, ": must be a signal of signals.md"));
           }},
          {"heads", false, [&](const auto& value, const auto& at) { heads.reset(value), heads_path = at; }},
          Whole("every", false, 1, 10000, &series->every),
          {"values", true, [&](const auto& value, const auto& at) { ReadValues(value, at, series); }},
          {"noise", false, [&](const auto& value, const auto& at) {
             Read(value, at,
                  {Real("deviation", true, 0, 1e12, &series->noise_deviation),
                   Whole("seed", false, 0, int64_t{1} << 53, &series->noise_seed),
                   Flag("by_factors", &series->noise_by_factors)});
           }}});
    if (series->signal == nullptr) return;
    const bool of_run = series->signal->granularity == Granularity::kRun;
    if (series->every == 0) series->every = of_run ? 1 : every;
    const MatrixShape shape = ShapeOf(*series->signal, layout);
    if (heads_path.empty()) {
      for (int32_t i = 0; i < shape.size(); ++i) series->heads.push_back({i / shape.heads, i % shape.heads});
      return;
    }
    const auto pairs = yaml_.List(heads, heads_path, kEntriesMax);
    for (size_t i = 0; i < pairs.size(); ++i) {
      const std::string at = absl::StrCat(heads_path, "[", i, "]");
      const auto pair = yaml_.List(pairs[i], at, 2);
      int64_t layer = 0;
      int64_t head = 0;
      if (pair.size() != 2) {
        yaml_.Report(pairs[i], absl::StrCat(at, ": must be [layer, head]"));
      } else if (yaml_.Integer(pair[0], at + "[0]", 0, shape.layers - 1, &layer) &&
                 yaml_.Integer(pair[1], at + "[1]", 0, shape.heads - 1, &head)) {
        series->heads.push_back({static_cast<int32_t>(layer), static_cast<int32_t>(head)});
      }
    }
  }

  void ReadValues(const YAML::Node& node, const std::string& path, TestSeries* series) {
    if (!node.IsMap()) {
      std::string notation;
      if (!yaml_.Text(node, path, kBytesMax, &notation)) return;
      auto values = ExpandValues(notation);
      if (values.ok()) {
        series->values = *std::move(values);
      } else {
        yaml_.Report(node, absl::StrCat(path, ": ", values.status().message()));
      }
      return;
    }
    TestFormula formula;
    int found = 0;
    std::vector<Key> keys;
    for (const char* name : kFormulas) {
      keys.push_back({name, false, [&, name](const auto& value, const auto& at) {
                        ++found;
                        ReadFormula(name, value, at, &formula);
                      }});
    }
    Read(node, path, keys);
    if (found != 1)
      yaml_.Report(node, absl::StrCat(path, ": must be values or one of ", absl::StrJoin(kFormulas, ", ")));
    series->values = formula;
  }

  void ReadFormula(std::string_view name, const YAML::Node& node, const std::string& path, TestFormula* formula) {
    constexpr double kMost = 1e30;
    if (name == "constant") {
      formula->kind = TestFormula::Kind::kConstant;
      yaml_.Number(node, path, -kMost, kMost, &formula->from);
    } else if (name == "ramp") {
      formula->kind = TestFormula::Kind::kRamp;
      Read(node, path,
           {Real("from", true, -kMost, kMost, &formula->from), Real("to", true, -kMost, kMost, &formula->to),
            Whole("begin", false, 0, kStepsMax, &formula->begin), Whole("end", true, 1, kStepsMax, &formula->end)});
      if (formula->end <= formula->begin) {
        yaml_.Report(node, absl::StrCat(path, ".end = ", formula->end, ": must be above begin = ", formula->begin));
      }
    } else {
      formula->kind = TestFormula::Kind::kExponential;
      Read(node, path,
           {Real("from", true, -kMost, kMost, &formula->from),
            Real("doubling_steps", true, -1e9, 1e9, &formula->doubling_steps),
            Whole("begin", false, 0, kStepsMax, &formula->begin)});
      if (formula->doubling_steps == 0) yaml_.Report(node, absl::StrCat(path, ".doubling_steps = 0: must not be 0"));
    }
  }

  // A derived signal leaves one of its parts free at least.
  void CheckParts(const RuleTest& test, const YAML::Node& at, const std::string& path) {
    std::set<SignalId> known;
    for (const TestSeries& series : test.series) {
      if (series.signal != nullptr && !series.signal->derived) known.insert(series.signal->id);
    }
    std::set<SignalId> done;
    for (const TestSeries& series : test.series) {
      const SignalInfo* const signal = series.signal;
      if (signal == nullptr || !signal->derived || !done.insert(signal->id).second) continue;
      if (known.contains(signal->numerator) && known.contains(signal->denominator)) {
        yaml_.Report(
            at, absl::StrCat(path, ": ", signal->name, " follows from ", FindSignal(signal->numerator)->name, " and ",
                             FindSignal(signal->denominator)->name, ", which other series say: leave one of them out"));
      }
      known.insert(signal->numerator);
      known.insert(signal->denominator);
    }
  }

  StrictYaml& yaml_;
};

}  // namespace

absl::StatusOr<RuleTestFile> ParseRuleTests(std::string_view text, const std::string& name) {
  StrictYaml yaml(name);
  RuleTestFile file;
  if (const std::optional<YAML::Node> root = yaml.Load(text, kBytesMax)) RuleTestReader(&yaml).ReadFile(*root, &file);
  if (!yaml.clean()) return yaml.status();
  return file;
}

absl::StatusOr<RuleTestFile> ReadRuleTests(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const RegularFile file, ReadRegularFile(path, kBytesMax));
  return ParseRuleTests(file.text, path);
}

}  // namespace bellwether::server
