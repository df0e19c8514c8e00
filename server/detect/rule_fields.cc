#include "server/detect/rule_fields.h"

#include <cstddef>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "server/detect/thresholds.h"

namespace bellwether::server {
namespace {

constexpr const char* kScopes[] = {"head", "layer", "run", "row"};
constexpr const char* kAggregates[] = {"max", "min", "median", "mean"};
constexpr const char* kDetectors[] = {"level", "peers", "growth", "impulse", "cusum"};
constexpr const char* kDirections[] = {"up", "down", "both"};
constexpr const char* kScales[] = {"linear", "log"};
// In the order of Severity, whose first word nobody may write.
constexpr const char* kSeverities[] = {"", "info", "warning", "critical"};

constexpr uint8_t Bit(RuleDetector detector) { return static_cast<uint8_t>(1u << static_cast<uint8_t>(detector)); }
constexpr uint8_t kLevel = Bit(RuleDetector::kLevel);
constexpr uint8_t kPeers = Bit(RuleDetector::kPeers);
constexpr uint8_t kGrowth = Bit(RuleDetector::kGrowth);
constexpr uint8_t kImpulse = Bit(RuleDetector::kImpulse);
constexpr uint8_t kCusum = Bit(RuleDetector::kCusum);
constexpr uint8_t kAll = kLevel | kPeers | kGrowth | kImpulse | kCusum;
constexpr uint8_t kBanks = kImpulse | kCusum;

// Enums of one byte are read and written as such.
template <class T>
uint8_t* AsByte(T* value) {
  static_assert(sizeof(T) == 1);
  return reinterpret_cast<uint8_t*>(value);
}

#define BW_FIELD(name) [](UserRule* r) -> RuleSlot { return &r->name; }
#define BW_CHOICE(name) [](UserRule* r) -> RuleSlot { return AsByte(&r->name); }

constexpr RuleField kFields[] = {
    {"name",
     BW_FIELD(name),
     1,
     63,
     {},
     kAll,
     true,
     "",
     "",
     "small letters, digits and _, a letter first; alerts are called by it"},
    {"signal",
     BW_FIELD(signal),
     0,
     0,
     {},
     kAll,
     true,
     "",
     "",
     "a name of signals.md, measured or derived; or a name that the job has given a signal of its own"},
    {"scope", BW_CHOICE(scope), 0, 0, kScopes, kAll, false,
     "head, run for a signal of the run, of tensors, modules or the job's own", "",
     "what is judged: every head, every layer, the run, or every tensor, module or cell of an own signal (row)"},
    {"aggregate", BW_CHOICE(aggregate), 0, 0, kAggregates, kAll, false, "max, median for the heads of a run", "",
     "how heads, tensors, modules or cells become one value, where the scope is layer or run"},
    {"rows",
     BW_FIELD(rows),
     1,
     256,
     {},
     kAll,
     false,
     "",
     "",
     "which tensors, modules or cells are judged, by their names: * is any number of characters, ? one; of the scope "
     "row the "
     "first 1,024 of a run"},
    {"detector", BW_CHOICE(detector), 0, 0, kDetectors, kAll, true, "", "", "what is asked of the value"},
    {"stage",
     BW_FIELD(stage),
     1,
     5,
     {},
     kAll,
     true,
     "",
     "",
     "1 drift, 2 ties and bias, 3 norm, 4 logits, 5 loss: how far the run has gone while this fires"},
    {"severity", BW_CHOICE(severity), 0, 0, kSeverities, kAll, true, "", "", "of its alerts"},

    {"above",
     BW_FIELD(above),
     -1e12,
     1e12,
     {},
     kLevel | kGrowth,
     false,
     "",
     "the signal's",
     "level: fires above this (or give below); growth: and the value must be above this"},
    {"below", BW_FIELD(below), -1e12, 1e12, {}, kLevel, false, "", "the signal's", "fires below this"},
    {"factor",
     BW_FIELD(factor),
     1e-6,
     1e6,
     {},
     kPeers,
     true,
     "",
     "times the median",
     "fires above that for a factor above 1, below it for one below 1"},
    {"floor", BW_FIELD(floor), 0, 1e12, {}, kPeers, false, "", "the signal's", "the median counts as at least this"},
    {"z_min",
     BW_FIELD(z_min),
     1,
     20,
     {},
     kGrowth,
     false,
     "trend.mann_kendall_z_min",
     "",
     "z of Mann-Kendall from which a rise is monotone"},
    {"r2_min",
     BW_FIELD(r2_min),
     0,
     1,
     {},
     kGrowth,
     false,
     "trend.r2_min",
     "",
     "share of the variance of ln x that the line explains"},
    {"doubling_steps_max",
     BW_FIELD(doubling_steps_max),
     1,
     1e7,
     {},
     kGrowth,
     false,
     "trend.doubling_steps_max",
     "steps",
     "slower growth does not fire"},
    {"eta_level",
     BW_FIELD(eta_level),
     1e-12,
     1e12,
     {},
     kGrowth,
     false,
     "",
     "the signal's",
     "the level to which the time left counts"},
    {"sigmas",
     BW_FIELD(sigmas),
     1,
     100,
     {},
     kImpulse,
     false,
     "loss.impulse_sigma",
     "standard deviations",
     "from the mean of the window, which holds neither this value nor any that fired"},
    {"k",
     BW_FIELD(k),
     0,
     10,
     {},
     kCusum,
     false,
     "",
     "standard deviations",
     "that a batch must be off for the sum to grow"},
    {"h",
     BW_FIELD(h),
     1,
     1000,
     {},
     kCusum,
     false,
     "8, 12 for the scopes head and row",
     "standard deviations",
     "of the sum that fires"},
    {"window_batches",
     BW_FIELD(window_batches),
     8,
     256,
     {},
     kBanks,
     false,
     "64, 50 for cusum",
     "batches",
     "that a batch is held against; they hold neither it nor any that fired"},
    {"relearn_batches",
     BW_FIELD(relearn_batches),
     1,
     10000,
     {},
     kBanks,
     false,
     "",
     "batches",
     "in a row that fire and then are the new normal"},
    {"direction", BW_CHOICE(direction), 0, 0, kDirections, kBanks, false, "", "", "of the change that fires"},
    {"scale", BW_CHOICE(scale), 0, 0, kScales, kBanks, false, "", "",
     "log for what varies by factors: its logarithm is judged"},
    {"benjamini_hochberg",
     BW_FIELD(benjamini_hochberg),
     1e-9,
     0.5,
     {},
     static_cast<uint8_t>(kGrowth | kBanks),
     false,
     "",
     "",
     "share of false ones among the heads that fire at once, which this holds down in addition"},

    {"batch_steps",
     BW_FIELD(batch_steps),
     1,
     1000,
     {},
     kAll,
     false,
     "trend.batch_steps",
     "steps",
     "whose samples are averaged; 1 = every sample"},
    {"hold_batches",
     BW_FIELD(hold_batches),
     1,
     10000,
     {},
     kAll,
     false,
     "",
     "batches",
     "that it must fire in a row, and then not fire to end"},
    {"cooldown_steps",
     BW_FIELD(cooldown_steps),
     0,
     1e7,
     {},
     kAll,
     false,
     "alert.cooldown_steps",
     "steps",
     "of silence after an alert has resolved"},
    {"resolve_steps",
     BW_FIELD(resolve_steps),
     1,
     1e7,
     {},
     kAll,
     false,
     "alert.resolve_steps",
     "steps",
     "without evidence after which an alert resolves"},
    {"rounding_only",
     BW_FIELD(rounding_only),
     0,
     0,
     {},
     kAll,
     false,
     "true for signals of rounding",
     "",
     "judged only while scores are of low precision and keys not centred"},
    {"cause", BW_FIELD(cause), 1, 128, {}, kAll, false, "", "", "the suspected cause, as alerts say it"},
    {"advice", BW_FIELD(advice), 1, 1024, {}, kAll, false, "", "", "what to do, as alerts say it"},
};
#undef BW_FIELD
#undef BW_CHOICE

// What rounding does, and what is made of it.
constexpr SignalId kRoundingParts[] = {
    SignalId::kCommonModeSum,    SignalId::kKeyLeakSum,   SignalId::kTiedRowsBf16,   SignalId::kTiedRowsEps,
    SignalId::kTiedRowsEpsPaper, SignalId::kDeltaBiasSum, SignalId::kDeltaBiasSumsq, SignalId::kDeltaErrorAbsSum,
};

void SetDefault(const RuleField& field, const JudgeOptions& thresholds, UserRule* rule) {
  const Threshold* const threshold = FindThreshold(field.default_of);
  if (threshold == nullptr) return;
  const double value = threshold->Get(thresholds);
  const RuleSlot slot = field.slot(rule);
  if (const auto* number = std::get_if<double*>(&slot)) **number = value;
  if (const auto* number = std::get_if<int32_t*>(&slot)) **number = static_cast<int32_t>(value);
  if (const auto* number = std::get_if<int64_t*>(&slot)) **number = static_cast<int64_t>(value);
}

}  // namespace

std::span<const RuleField> RuleFields() { return kFields; }

const RuleField* FindRuleField(std::string_view name) {
  for (const RuleField& field : kFields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

std::string ValueText(const RuleField& field, const UserRule& rule) {
  // The slot is only read through.
  const RuleSlot slot = field.slot(const_cast<UserRule*>(&rule));
  if (std::holds_alternative<SignalId*>(slot) && !rule.own.empty()) return rule.own;
  struct Visitor {
    const RuleField& field;
    std::string operator()(const double* value) const { return NumberText(*value); }
    std::string operator()(const std::optional<double>* value) const { return *value ? NumberText(**value) : ""; }
    std::string operator()(const int32_t* value) const { return absl::StrCat(*value); }
    std::string operator()(const int64_t* value) const { return absl::StrCat(*value); }
    std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
    std::string operator()(const std::string* value) const { return *value; }
    std::string operator()(const SignalId* value) const {
      const SignalInfo* const signal = FindSignal(*value);
      return signal == nullptr ? "" : signal->name;
    }
    std::string operator()(const uint8_t* value) const { return field.words[*value]; }
  };
  return std::visit(Visitor{field}, slot);
}

UserRule DefaultRule(const JudgeOptions& thresholds, SignalId signal, RuleScope scope, RuleDetector detector) {
  UserRule rule;
  rule.signal = signal;
  rule.scope = scope;
  rule.detector = detector;
  for (const RuleField& field : kFields) SetDefault(field, thresholds, &rule);
  // One of many tensors or modules may be wrong; a run's heads are asked together.
  const bool of_rows = signal != SignalId::kNone && OfNamedRows(FindSignal(signal)->granularity);
  if (scope == RuleScope::kRun && !of_rows) rule.aggregate = RuleAggregate::kMedian;
  if (detector == RuleDetector::kCusum) rule.window_batches = 50;
  // The sum of one head in a thousand goes further by chance.
  if (scope == RuleScope::kHead || scope == RuleScope::kRow) rule.h = 12;
  rule.rounding_only = IsRoundingSignal(signal);
  return rule;
}

bool IsRoundingSignal(SignalId signal) {
  const SignalInfo* const info = FindSignal(signal);
  for (const SignalId part : kRoundingParts) {
    if (signal == part || (info != nullptr && info->derived && info->numerator == part)) return true;
  }
  return false;
}

const char* SignalNameOf(const UserRule& rule) {
  return rule.own.empty() ? FindSignal(rule.signal)->name : rule.own.c_str();
}

const char* NameOf(RuleScope scope) { return kScopes[static_cast<size_t>(scope)]; }
const char* NameOf(RuleAggregate aggregate) { return kAggregates[static_cast<size_t>(aggregate)]; }
const char* NameOf(RuleDetector detector) { return kDetectors[static_cast<size_t>(detector)]; }
const char* NameOf(Severity severity) { return kSeverities[static_cast<size_t>(severity)]; }

uint64_t Fingerprint(std::span<const UserRule> rules) {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  const auto add = [&hash](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    hash = (hash ^ 0xff) * 1099511628211ull;  // No text holds this byte.
  };
  for (const UserRule& rule : rules) {
    for (const RuleField& field : kFields) {
      // What every rule from before this field has: its memory goes on.
      if (field.name == std::string_view("rows") && rule.rows == UserRule().rows) continue;
      add(ValueText(field, rule));
    }
  }
  return hash;
}

}  // namespace bellwether::server
