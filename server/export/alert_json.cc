#include "server/export/alert_json.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "server/model/alert_words.h"
#include "server/model/eta_text.h"

namespace bellwether::server {
namespace {

// As the rules of dashboards/alerts name them (a test compares).
struct NamedRule {
  const char* rule;
  const char* alert;
};
constexpr NamedRule kNames[] = {
    {"drift", "BellwetherDriftGrowing"},
    {"ties", "BellwetherTiesAndBiasRising"},
    {"norm", "BellwetherSpectralNormGrowing"},
    {"logits", "BellwetherLogitsGrowing"},
    {"loss", "BellwetherDiverging"},
    {"gradient", "BellwetherGradientJump"},
    {"nonfinite", "BellwetherNonFinite"},
    {"disagreement", "BellwetherWeightsDisagree"},
    {"silent", "BellwetherRanksMissing"},
    {"overhead", "BellwetherHookOverBudget"},
    {"kernel", "BellwetherKernelWrong"},
    {"arithmetic", "BellwetherArithmeticWrong"},
    {"own", "BellwetherOwnSignal"},
    {"frozen", "BellwetherParametersFrozen"},
    {"experts", "BellwetherExpertsDead"},
    {"sequences", "BellwetherSequencesOdd"},
    {"parameters", "BellwetherParametersOutOfPast"},
    {"corruption", "BellwetherCorruption"},
    {"learning", "BellwetherNotLearning"},
};

// Of what a person reads: chats cut longer texts off, or refuse them (Slack: 3,000 characters).
constexpr size_t kSummaryBytesMax = 700, kDoBytesMax = 900, kWhyBytesMax = 900, kAdviceBytesMax = 2900,
                 kEvidenceBytesMax = 2900;
constexpr size_t kWhyPieces = 3;
constexpr char kNameInUrl[] = "{name}";

// For a fragment of an address: everything but unreserved characters.
std::string Escape(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '_' || c == '.' || c == '~';
    if (plain) {
      escaped += c;
    } else {
      absl::StrAppendFormat(&escaped, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return escaped;
}

}  // namespace

const char* SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kInfo:
      return "info";
    case Severity::kWarning:
      return "warning";
    case Severity::kCritical:
      return "critical";
    case Severity::kNone:
      break;
  }
  return "none";
}

std::string AlertName(const std::string& rule) {
  for (const NamedRule& named : kNames) {
    if (rule == named.rule) return named.alert;
  }
  return "BellwetherAlert";
}

StringMap AlertLabels(const AlertTransition& transition, bool imported) {
  StringMap labels = {{"alertname", AlertName(transition.rule)},
                      {"run", transition.run_name},
                      {"rule", transition.rule},
                      {"severity", SeverityName(transition.severity)}};
  if (transition.strongest.layer >= 0) labels["layer"] = absl::StrCat(transition.strongest.layer);
  if (transition.strongest.head >= 0) labels["head"] = absl::StrCat(transition.strongest.head);
  if (imported) labels["imported"] = "true";
  return labels;
}

StringMap AlertAnnotations(const AlertTransition& transition, const AlertLinks& links, bool imported) {
  const bool firing = transition.state == AlertState::kFiring;
  const std::string url = AlertUrl(transition, links.page);
  const std::string todo = Clipped(DoText(transition, url), kDoBytesMax);
  const std::string why = Clipped(WhyText(transition, kWhyPieces), kWhyBytesMax);
  const std::string word = firing ? absl::AsciiStrToUpper(SeverityName(transition.severity)) : "RESOLVED";
  std::string summary = absl::StrCat(word, " ", transition.summary);
  if (imported) {
    const std::string run = absl::StrCat(word, " ", transition.run_name, ": ");
    summary.insert(absl::StartsWith(summary, run) ? run.size() : word.size() + 1, kImportedMark);
  }
  StringMap annotations = {{"alert", transition.key},
                           {"summary", Clipped(summary, kSummaryBytesMax)},
                           {"description", absl::StrCat("Do: ", todo, why.empty() ? "" : "\nWhy: ", why)},
                           {"do", todo},
                           {"cause", transition.cause},
                           {"advice", Clipped(transition.advice, kAdviceBytesMax)},
                           {"stage", absl::StrCat(transition.stage)},
                           {"step", absl::StrCat(transition.step)},
                           {"first_step", absl::StrCat(transition.first_step)}};
  const auto add = [&annotations](const char* name, std::string text) {
    if (!text.empty()) annotations[name] = std::move(text);
  };
  add("why", why);
  add("eta", EtaText(transition.eta));
  add("evidence", Clipped(AllEvidenceText(transition), kEvidenceBytesMax));
  add("siblings", Clipped(transition.siblings, kWhyBytesMax));
  add("page_url", url);
  add("runbook_url", RunbookUrl(AlertName(transition.rule), links.runbooks));
  return annotations;
}

std::string AlertUrl(const AlertTransition& transition, const std::string& page) {
  if (page.empty()) return {};
  std::string url = page;
  while (!url.empty() && url.back() == '/') url.pop_back();
  absl::StrAppend(&url, "/#/run/", Escape(transition.run_name), "?step=", transition.step);
  if (transition.strongest.layer >= 0) absl::StrAppend(&url, "&layer=", transition.strongest.layer);
  if (transition.strongest.head >= 0) absl::StrAppend(&url, "&head=", transition.strongest.head);
  absl::StrAppend(&url, "&alert=", Escape(transition.key));
  return url;
}

std::string RunbookUrl(const std::string& alert_name, const std::string& base) {
  if (base.empty()) return {};
  const std::string name = absl::AsciiStrToLower(alert_name);
  if (absl::StrContains(base, kNameInUrl)) return absl::StrReplaceAll(base, {{kNameInUrl, name}});
  return absl::StrCat(absl::StripSuffix(base, "/"), "/", name);
}

std::string RunbooksOfPage(const std::string& page) {
  return page.empty() ? "" : absl::StrCat(absl::StripSuffix(page, "/"), "/#/runbook");
}

std::string AlertFingerprint(const AlertTransition& transition) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : absl::StrCat(transition.run, "\n", transition.key)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return absl::StrFormat("%016x", hash);
}

std::string FormatTime(int64_t unix_ns) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromUnixNanos(unix_ns), absl::UTCTimeZone());
}

}  // namespace bellwether::server
