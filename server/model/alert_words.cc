#include "server/model/alert_words.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "bellwether/signal_title.h"
#include "bellwether/time_text.h"

namespace bellwether::server {
namespace {

struct RuleWords {
  const char* rule;
  const char* noun;
  const char* happens;  // As a warning, and where the others are empty.
  const char* critical;
  const char* info;
};

constexpr char kPlace[] = "{place}";

constexpr RuleWords kWords[] = {
    {"drift", "drift", "{place} is drifting", "", ""},
    {"ties", "biased rounding", "rounding errors of {place} all push the same way", "", ""},
    {"norm", "growth of W_Q", "the weights W_Q of {place} are growing", "", ""},
    {"logits", "large scores", "the scores of {place} are far too large", "", ""},
    {"loss", "loss off its course", "the loss has left its course", "", "the loss has a spike"},
    {"gradient", "large gradient norm", "the gradient norm stays far above its past", "",
     "the gradient norm has a spike"},
    {"nonfinite", "values not finite", "values of a step are not finite", "values are not finite", ""},
    {"disagreement", "ranks that disagree", "ranks disagree on weights that must be equal", "", ""},
    {"silent", "silence", "a part of the run is silent", "all ranks are silent", ""},
    {"overhead", "watching takes too long", "watching takes more of a step than it may", "", ""},
    {"kernel", "wrong attention kernel", "the attention kernel of {place} returns wrong numbers", "", ""},
    {"arithmetic", "wrong arithmetic", "a layer computes wrong numbers", "", ""},
    {"own", "number of the job", "a number that the job logs is wrong", "", ""},
    {"frozen", "frozen parameters", "parameters with a gradient do not move", "", ""},
    {"experts", "dead experts", "experts get no tokens", "", ""},
    {"sequences", "odd batches", "a batch is not what batches were", "", ""},
    {"parameters", "parameters out of their past", "parameters have left their own past", "", ""},
    {"corruption", "jump of a weight", "a weight has jumped", "", ""},
    {"learning", "no learning", "the run does not learn", "", ""},
};

const RuleWords* WordsFor(std::string_view rule) {
  const auto* const found =
      std::find_if(std::begin(kWords), std::end(kWords), [&](const RuleWords& words) { return words.rule == rule; });
  return found == std::end(kWords) ? nullptr : found;
}

// "layer 1 head 3"; "" of the run.
std::string NameOfPlace(const Head& where) {
  if (where.layer < 0) return {};
  return where.head < 0 ? absl::StrCat("layer ", where.layer)
                        : absl::StrCat("layer ", where.layer, " head ", where.head);
}

bool IsShare(std::string_view signal) {
  return signal.find("fraction") != std::string_view::npos || signal.ends_with("_share") || signal == "hook_overhead";
}

// Titles begin a line; in a sentence only names keep their capitals.
std::string InSentence(std::string_view title) {
  std::string text(title);
  if (text.size() > 1 && absl::ascii_isupper(static_cast<unsigned char>(text[0])) &&
      absl::ascii_islower(static_cast<unsigned char>(text[1]))) {
    text[0] = absl::ascii_tolower(static_cast<unsigned char>(text[0]));
  }
  return text;
}

// Up to where the next sentence begins.
std::string FirstSentence(const std::string& text) {
  for (size_t at = text.find(". "); at != std::string::npos; at = text.find(". ", at + 1)) {
    const bool begins = at + 2 < text.size() && absl::ascii_isupper(static_cast<unsigned char>(text[at + 2]));
    if (begins) return text.substr(0, at + 1);
  }
  return text;
}

// "attention.center_k of layer 1" -> "centre the keys": as the page calls what it has a button for.
std::string ActionWords(const std::string& action) {
  constexpr std::pair<const char*, const char*> kActions[] = {
      {"attention.mode", "switch the attention mode"},
      {"attention.center_k", "centre the keys"},
      {"qk.clip", "clip W_Q and W_K"},
      {"lr.scale", "scale the learning rate"},
      {"checkpoint.now", "save a checkpoint"},
      {"batch.skip", "skip batches"},
      {"sampling.deepen", "sample more often"},
      {"stop", "stop the training"},
      {"rollback.suggest", "go back to a checkpoint"},
  };
  for (const auto& [kind, words] : kActions) {
    if (action.starts_with(kind)) return absl::StrCat("\"", words, "\" (", action, ")");
  }
  return absl::StrCat("\"", action, "\"");
}

}  // namespace

std::string CountText(int64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string ValueText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "infinite" : "-infinite";
  const double size = std::fabs(value);
  if (size < 999.5 || size >= 1e9) return absl::StrFormat("%.3g", value);
  const double unit = std::pow(10, std::floor(std::log10(size)) - 2);
  return CountText(std::llround(value / unit) * std::llround(unit));
}

std::string SignalValueText(std::string_view signal, double value) {
  if (!IsShare(signal) || !std::isfinite(value)) return ValueText(value);
  const double percent = 100 * value;
  return absl::StrCat(std::fabs(percent) >= 9.95 ? absl::StrFormat("%.0f", percent) : absl::StrFormat("%.2g", percent),
                      " %");
}

std::string WithStepsGrouped(std::string_view text) {
  constexpr std::string_view kStep = "step ";
  std::string grouped;
  size_t from = 0;
  for (size_t at = text.find(kStep); at != std::string_view::npos; at = text.find(kStep, from)) {
    const size_t begin = at + kStep.size();
    size_t end = begin;
    while (end < text.size() && end - begin < 18 && absl::ascii_isdigit(static_cast<unsigned char>(text[end]))) ++end;
    grouped.append(text.substr(from, begin - from));
    int64_t step = 0;
    for (size_t i = begin; i < end; ++i) step = 10 * step + (text[i] - '0');
    if (end > begin) grouped += CountText(step);
    from = end;
  }
  return grouped.append(text.substr(from));
}

std::string TimeLeftText(const Eta& eta) {
  if (!eta.known) return {};
  const std::string steps = absl::StrCat("~", CountText(std::llround(std::max(eta.steps, 0.0))), " steps");
  if (eta.step_seconds <= 0) return steps;
  return absl::StrCat(steps, " (~", TimeText(eta.steps * eta.step_seconds), ")");
}

std::string PlaceText(const AlertTransition& alert) {
  std::string place = NameOfPlace(alert.strongest);
  if (!place.empty() && alert.heads_total > 1) absl::StrAppend(&place, " (and ", alert.heads_total - 1, " more)");
  return place;
}

std::string HappensText(const AlertTransition& alert) {
  const RuleWords* const words = WordsFor(alert.rule);
  if (words == nullptr) return absl::StrCat("the rule ", alert.rule, " holds");
  // What has no finite value is the evidence itself.
  if (alert.rule == "nonfinite" && !alert.evidence.empty() && !std::isfinite(alert.evidence.front().value)) {
    return absl::StrCat("the ", InSentence(SignalTitle(alert.evidence.front().signal)), " is not finite");
  }
  const char* happens = words->happens;
  if (alert.severity >= Severity::kCritical && *words->critical != '\0') happens = words->critical;
  if (alert.severity <= Severity::kInfo && *words->info != '\0') happens = words->info;
  const std::string place = PlaceText(alert);
  std::string text = absl::StrReplaceAll(happens, {{kPlace, place.empty() ? "the model" : place}});
  if (text == happens && !place.empty()) absl::StrAppend(&text, " in ", place);
  return text;
}

bool IsBuiltin(std::string_view rule) { return WordsFor(rule) != nullptr; }

std::string NounOf(std::string_view rule, Severity severity) {
  const RuleWords* const words = WordsFor(rule);
  if (severity <= Severity::kInfo && rule == "loss") return "a spike of the loss";
  if (severity <= Severity::kInfo && rule == "gradient") return "a spike of the gradient norm";
  return words == nullptr ? std::string(rule) : words->noun;
}

std::string EvidenceText(const Evidence& piece, const Head& known) {
  std::string text =
      absl::StrCat(InSentence(SignalTitle(piece.signal)), " ", SignalValueText(piece.signal, piece.value));
  // What must be 0 or finite has a limit that says nothing.
  if (std::isfinite(piece.value) && std::isfinite(piece.threshold) && piece.threshold != 0) {
    absl::StrAppend(&text, " (limit ", SignalValueText(piece.signal, piece.threshold), ")");
  }
  if (piece.where.layer >= 0 && !(piece.where == known)) absl::StrAppend(&text, " of ", NameOfPlace(piece.where));
  return text;
}

namespace {

std::string PiecesText(const AlertTransition& alert, size_t pieces_max, bool beyond_limits) {
  // Of many heads of one signal the named one, or the worst, says as much as all: other signals come before the rest.
  std::vector<const Evidence*> pieces, rest;
  for (const Evidence& piece : alert.evidence) {
    if (beyond_limits && piece.detector == kNextInLine) continue;
    const auto same = std::find_if(pieces.begin(), pieces.end(),
                                   [&piece](const Evidence* other) { return other->signal == piece.signal; });
    if (same == pieces.end()) {
      pieces.push_back(&piece);
    } else if (piece.where == alert.strongest && (*same)->where != alert.strongest) {
      rest.push_back(std::exchange(*same, &piece));
    } else {
      rest.push_back(&piece);
    }
  }
  pieces.insert(pieces.end(), rest.begin(), rest.end());
  std::set<std::pair<std::string, Head>> said;
  std::string text;
  int64_t since = -1;
  size_t more = 0;
  for (const Evidence* const piece : pieces) {
    if (!said.emplace(piece->signal, piece->where).second) continue;
    if (said.size() > pieces_max) {
      ++more;
      continue;
    }
    absl::StrAppend(&text, text.empty() ? "" : "; ", EvidenceText(*piece, alert.strongest));
    if (piece->first_step != since) absl::StrAppend(&text, " since step ", CountText(piece->first_step));
    since = piece->first_step;
  }
  if (more > 0) absl::StrAppend(&text, "; and ", more, " more");
  return text;
}

}  // namespace

std::string WhyText(const AlertTransition& alert, size_t pieces_max) {
  return PiecesText(alert, pieces_max, /*beyond_limits=*/true);
}

std::string AllEvidenceText(const AlertTransition& alert) {
  return PiecesText(alert, alert.evidence.size(), /*beyond_limits=*/false);
}

namespace {

std::string FirstThingIn(const std::string& advice) {
  std::string first = FirstSentence(advice);
  if (!first.empty() && first.back() != '.') first += '.';
  return first;
}

}  // namespace

std::string DoText(const AlertTransition& alert, const std::string& link) {
  if (alert.state == AlertState::kResolved) return "Nothing: it is over.";
  const std::string& advice = alert.advice;
  if (absl::StartsWith(advice, kOnTrialWords)) return kOnTrialWords;
  const std::string on = link.empty() ? "" : absl::StrCat(": ", link, " or");
  if (const size_t at = advice.find(kProposedWords); at != std::string::npos) {
    const size_t begin = at + std::string_view(kProposedWords).size();
    const size_t what_end = advice.find("; `", begin);
    const size_t command_end = what_end == std::string::npos ? what_end : advice.find('`', what_end + 3);
    if (command_end != std::string::npos) {
      const std::string what = ActionWords(advice.substr(begin, what_end - begin));
      const std::string command = advice.substr(what_end + 2, command_end - what_end - 1);
      // What is proposed stops the push; where the advice is to stop, it is too late for that alone.
      if (absl::StartsWith(advice, "Stop")) {
        return absl::StrCat(FirstThingIn(advice), " Proposed as well: ", what, ", by ", command, ".");
      }
      return absl::StrCat("Approve ", what, on.empty() ? " by" : on, " ", command, ".");
    }
  }
  if (const size_t at = advice.find(kOnItsWayWords); at != std::string::npos) {
    const size_t begin = at + std::string_view(kOnItsWayWords).size();
    const size_t end = advice.find(" (action ", begin);
    if (end != std::string::npos) {
      return absl::StrCat("Wait: the policy applies ", ActionWords(advice.substr(begin, end - begin)), ".");
    }
  }
  if (const size_t at = advice.find(kNotAllowedWords); at != std::string::npos) {
    const size_t begin = at + std::string_view(kNotAllowedWords).size();
    const size_t end = advice.find(" (action ", begin);
    const size_t why = end == std::string::npos ? end : advice.find("): ", end);
    if (why != std::string::npos) {
      const std::string first = at == 0 ? "" : absl::StrCat(FirstThingIn(advice), " ");
      return absl::StrCat(first, kNotAllowedWords, ActionWords(advice.substr(begin, end - begin)), ", since ",
                          FirstSentence(advice.substr(why + 3)));
    }
  }
  return FirstThingIn(advice);
}

std::string Clipped(std::string text, size_t bytes_max) {
  constexpr std::string_view kCut = "...";
  if (text.size() <= bytes_max) return text;
  size_t end = bytes_max - kCut.size();
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // In a character of UTF-8.
  text.resize(end);
  return text.append(kCut);
}

}  // namespace bellwether::server
