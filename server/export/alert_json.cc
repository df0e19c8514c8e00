#include "server/export/alert_json.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
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

StringMap AlertLabels(const AlertTransition& transition) {
  StringMap labels = {{"alertname", AlertName(transition.rule)},
                      {"run", transition.run_name},
                      {"rule", transition.rule},
                      {"severity", SeverityName(transition.severity)}};
  if (transition.strongest.layer >= 0) labels["layer"] = absl::StrCat(transition.strongest.layer);
  if (transition.strongest.head >= 0) labels["head"] = absl::StrCat(transition.strongest.head);
  return labels;
}

StringMap AlertAnnotations(const AlertTransition& transition) {
  StringMap annotations = {{"alert", transition.key},
                           {"summary", transition.summary},
                           {"cause", transition.cause},
                           {"advice", transition.advice},
                           {"stage", absl::StrCat(transition.stage)},
                           {"step", absl::StrCat(transition.step)},
                           {"first_step", absl::StrCat(transition.first_step)}};
  if (transition.eta.known) {
    annotations["eta"] = EtaText(transition.eta);
  }
  std::string evidence;
  for (const Evidence& piece : transition.evidence) {
    absl::StrAppendFormat(&evidence, "%s%s %.4g (threshold %.4g, since step %d)", evidence.empty() ? "" : "; ",
                          piece.signal, piece.value, piece.threshold, piece.first_step);
  }
  if (!evidence.empty()) annotations["evidence"] = evidence;
  if (!transition.siblings.empty()) annotations["siblings"] = transition.siblings;
  return annotations;
}

std::string AlertUrl(const AlertTransition& transition, const std::string& external_url) {
  if (external_url.empty()) return {};
  std::string url = external_url;
  while (!url.empty() && url.back() == '/') url.pop_back();
  absl::StrAppend(&url, "/#/run/", Escape(transition.run_name), "?step=", transition.step);
  if (transition.strongest.layer >= 0) absl::StrAppend(&url, "&layer=", transition.strongest.layer);
  if (transition.strongest.head >= 0) absl::StrAppend(&url, "&head=", transition.strongest.head);
  absl::StrAppend(&url, "&alert=", Escape(transition.key));
  return url;
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
