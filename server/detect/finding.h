// finding.h: what the rules say about a head or the run at one tick.

#ifndef BELLWETHER_SERVER_DETECT_FINDING_H_
#define BELLWETHER_SERVER_DETECT_FINDING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "server/model/alert_transition.h"

namespace bellwether::server {

enum class Rule : uint8_t {
  kDrift,
  kTies,
  kNorm,
  kLogits,
  kLoss,
  kGradient,
  kNonfinite,
  kDisagreement,
  kSilent,
  kOverhead,
  kKernel,
  kArithmetic,
  kOwn,
  kFrozen,
  kExperts,
  kSequences,
  kParameters,
  kCorruption,
  kLearning,
  kUser,  // A rule that people wrote; its name is in user_rule.h.
};

// What a family finds is one sign of an illness (alert_engine.h): drift, ties and norm are
// stages of one, and grow together.
enum class Family : uint8_t {
  kRounding,
  kLogits,
  kLoss,
  kGradient,
  kNonfinite,
  kDisagreement,
  kSilent,
  kOverhead,
  kKernel,
  kArithmetic,
  kOwn,
  kFrozen,
  kExperts,
  kSequences,
  kParameters,
  kCorruption,
  kLearning,
};
inline constexpr int kFamilies = 17;
static_assert(kFamilies == static_cast<int>(Family::kLearning) + 1);

const char* NameOf(Rule rule);

// A piece of evidence before it is worth its strings.
struct Fact {
  const char* signal = "";  // Static, or of a rule in force or the run's rows: outlives the finding.
  Head where;
  double value = 0;
  double threshold = 0;
  double baseline = std::numeric_limits<double>::quiet_NaN();
  int64_t first_step = 0;
  const char* detector = "";
};

inline constexpr char kExactDetector[] = "shadow";
inline constexpr char kRankDetector[] = "rank";  // rank_jump.h
// The state was there in the first sample: information.
inline constexpr char kFoundDetector[] = "as found";

struct Finding {
  Rule rule = Rule::kDrift;
  Severity severity = Severity::kNone;
  int32_t stage = 0;
  Head where;        // -1 / -1: the run.
  double score = 0;  // Orders the heads of an alert; larger is worse.
  // It says exactly what is wrong, where others leave a set: it comes before them, and an alert that could
  // only name a set is told again with it.  Its first fact has the detector kExactDetector.
  bool exact = false;
  // Its alert has not told of it: if it is the worst, the alert is told again.
  bool news = false;
  int64_t first_step = 0;
  Eta eta;
  const char* eta_words = "";  // What comes when the time left is over, if not the end of the run; static.
  double sigma = std::numeric_limits<double>::quiet_NaN();  // Of the head's W_Q now; NaN = not known.
  // No memory of its own: findings are made every tick, told once.
  std::array<Fact, 8> facts;
  int32_t fact_count = 0;
  std::string note;  // Of the first fact.
  // Instead of the words that its family has; empty = those.
  std::string summary, advice, cause;

  // Of the run, for one reason.
  static Finding OfRun(Rule rule, Severity severity, const Fact& fact) {
    Finding finding;
    finding.rule = rule;
    finding.severity = severity;
    finding.first_step = fact.first_step;
    finding.Add(fact);
    return finding;
  }

  void Add(const Fact& fact) {
    if (fact_count < static_cast<int32_t>(facts.size())) facts[static_cast<size_t>(fact_count++)] = fact;
  }
};

// Puts `first`, the worst first, before `others` of the same family, which say less.  The alert is told by its first
// finding, which has the words of the first of the others, too.
void PutBefore(std::vector<Finding> first, std::vector<Finding>* others);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_FINDING_H_
