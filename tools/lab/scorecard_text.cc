#include "tools/lab/scorecard_text.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/median.h"
#include "tools/lab/bars.h"

namespace bellwether::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// P(X <= count) of a Poisson variable.
double PoissonCdf(int64_t count, double mean) {
  double sum = 0;
  for (int64_t k = 0; k <= count; ++k) {
    sum += std::exp(static_cast<double>(k) * std::log(mean) - mean - std::lgamma(static_cast<double>(k) + 1));
  }
  return sum;
}

// The mean at which P(X <= count) is `share`; the probability falls with the mean.
double PoissonMean(int64_t count, double share) {
  double low = 1e-12, high = 2 * static_cast<double>(count) + 50;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (PoissonCdf(count, middle) > share ? low : high) = middle;
  }
  return (low + high) / 2;
}

// `alarms` of the run at `i`, rising.
template <typename Alarms>
RuleTotals AddUpRule(std::string rule, const std::vector<RunScore>& scores, const Alarms& alarms) {
  RuleTotals totals;
  totals.rule = std::move(rule);
  std::vector<double> leads;
  int64_t false_alarms = 0, quiet_steps = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const RunScore& score = scores[i];
    const std::vector<int64_t> steps = alarms(i);
    if (score.quiet()) {
      ++totals.quiet;
      if (!steps.empty()) ++totals.quiet_warned;
      false_alarms += static_cast<int64_t>(steps.size());
      quiet_steps += score.truth.steps;
    } else if (score.fails()) {
      ++totals.failing;
      if (!steps.empty() && steps.front() < score.failed_at()) {
        ++totals.warned_in_time;
        leads.push_back(static_cast<double>(score.failed_at() - steps.front()));
      }
    }
  }
  if (!leads.empty()) totals.median_lead = MedianOr(0, std::move(leads));
  totals.false_warnings = MakeRate(false_alarms, quiet_steps);
  return totals;
}

bool Contains(const std::vector<Head>& heads, Head head) {
  return std::find(heads.begin(), heads.end(), head) != heads.end();
}

std::string HeadText(Head head) { return absl::StrCat("L", head.layer, " H", head.head); }

Json StepJson(int64_t step) { return step < 0 ? Json(nullptr) : Json(step); }
Json HeadJson(Head head) { return Json::array({head.layer, head.head}); }
Json RateJson(const Rate& rate) {
  if (rate.steps == 0) return nullptr;
  return {{"count", rate.count},
          {"steps", rate.steps},
          {"per_1000_steps", rate.value},
          {"interval_95", {rate.lower, rate.upper}}};
}

Json ToJson(const RunScore& score) {
  Json json;
  json["run"] = score.run;
  json["family"] = score.family.empty() ? Json(nullptr) : Json(score.family);
  json["t_sigma"] = StepJson(score.truth.t_sigma);
  json["t_loss"] = StepJson(score.truth.t_loss);
  json["first_warning"] = StepJson(score.first_warning);
  json["first_critical"] = StepJson(score.first_critical);
  json["named_heads"] = Json::array();
  for (const Head head : score.named_heads) json["named_heads"].push_back(HeadJson(head));
  json["first_bad_head"] = score.truth.heads.empty() ? Json(nullptr) : HeadJson(score.truth.heads.front());
  json["eta_error"] = score.eta_error ? Json(*score.eta_error) : Json(nullptr);
  json["false_warnings"] = score.false_warnings();
  json["false_criticals"] = score.false_criticals();
  json["steps"] = score.truth.steps;
  for (const PeerScore& peer : score.peers) json["peers"][peer.rule] = peer.alarms;
  return json;
}

Json ToJson(const ScorecardTotals& totals, const Scorecard& card) {
  Json json;
  json["run"] = nullptr;
  json["runs"] = card.scores.size();
  json["failures"] = card.failures;
  json["mean_lead"] = totals.mean_lead;
  json["mean_critical_lead"] = totals.mean_critical_lead;
  json["critical_in_time"] = totals.critical_in_time;
  for (const RuleTotals& rule : totals.rules) {
    Json& entry = json["rules"].emplace_back();
    entry["rule"] = rule.rule;
    entry["failing"] = rule.failing;
    entry["warned_in_time"] = rule.warned_in_time;
    entry["median_lead"] = rule.median_lead ? Json(*rule.median_lead) : Json(nullptr);
    entry["quiet"] = rule.quiet;
    entry["quiet_warned"] = rule.quiet_warned;
    entry["false_warnings"] = RateJson(rule.false_warnings);
    entry["ns_per_step"] = rule.ns_per_step;
  }
  json["heads"] = {{"runs", totals.with_heads},
                   {"layer_right", totals.layer_right},
                   {"first_right", totals.first_right},
                   {"one_of_first_three_right", totals.first_three_right}};
  json["eta"] = {
      {"asked", totals.etas_asked}, {"known", totals.etas_known}, {"within_35_percent", totals.etas_within_35_percent}};
  json["false_criticals"] = RateJson(totals.false_criticals_rate);
  json["ns_per_value"] = totals.ns_per_value;
  json["bars"] = BarsJson(BarsOf(card.scores));
  return json;
}

}  // namespace

std::string StepText(int64_t step) { return step < 0 ? "-" : absl::StrCat(step); }

std::string RateText(const Rate& rate) {
  return absl::StrFormat("%.3f (%.3f to %.3f)", rate.value, rate.lower, rate.upper);
}

Rate MakeRate(int64_t count, int64_t steps) {
  Rate rate{.count = count, .steps = steps, .value = kNaN, .lower = kNaN, .upper = kNaN};
  if (steps <= 0) return rate;
  const double scale = 1000 / static_cast<double>(steps);
  rate.value = static_cast<double>(count) * scale;
  rate.lower = count == 0 ? 0 : PoissonMean(count - 1, 0.975) * scale;
  rate.upper = PoissonMean(count, 0.025) * scale;
  return rate;
}

ScorecardTotals AddUp(const std::vector<RunScore>& scores) {
  ScorecardTotals totals;
  totals.rules.push_back(AddUpRule("bellwether", scores, [&](size_t i) {
    // The steps of later warnings count for nothing but their number.
    const int64_t count = scores[i].quiet() ? scores[i].warnings : scores[i].first_warning < 0 ? 0 : 1;
    return std::vector<int64_t>(static_cast<size_t>(count), scores[i].first_warning);
  }));
  for (size_t peer = 0; !scores.empty() && peer < scores[0].peers.size(); ++peer) {
    totals.rules.push_back(
        AddUpRule(scores[0].peers[peer].rule, scores, [&](size_t i) { return scores[i].peers[peer].alarms; }));
  }
  double seconds = 0;
  int64_t values = 0, samples = 0, sober_steps = 0;
  for (const RunScore& score : scores) {
    seconds += score.judge_seconds;
    values += score.values;
    samples += score.samples;
    for (size_t peer = 0; peer < score.peers.size(); ++peer) {
      totals.rules[peer + 1].ns_per_step += score.peers[peer].seconds;  // Divided below.
    }
    totals.mean_lead += static_cast<double>(score.lead());
    totals.mean_critical_lead += static_cast<double>(score.critical_lead());
    if (score.critical_lead() > 0) ++totals.critical_in_time;
    totals.false_criticals += score.false_criticals();
    if (score.quiet() || score.family == "drifting") sober_steps += score.truth.steps;
    if (score.first_warning < 0 || !score.fails()) continue;
    if (score.first_warning < score.failed_at()) ++totals.etas_asked;
    if (score.eta_error) ++totals.etas_known;
    if (score.eta_error && std::fabs(*score.eta_error) <= 0.35) ++totals.etas_within_35_percent;
    if (score.truth.heads.empty()) continue;
    ++totals.with_heads;
    const auto named = static_cast<int64_t>(score.named_heads.size());
    for (int64_t i = 0; i < std::min<int64_t>(named, 3); ++i) {
      if (!Contains(score.truth.heads, score.named_heads[static_cast<size_t>(i)])) continue;
      ++totals.first_three_right;
      if (i == 0) ++totals.first_right;
      break;
    }
    if (named > 0 && std::any_of(score.truth.heads.begin(), score.truth.heads.end(),
                                 [&](Head head) { return head.layer == score.named_heads[0].layer; })) {
      ++totals.layer_right;
    }
  }
  totals.false_criticals_rate = MakeRate(totals.false_criticals, sober_steps);
  totals.ns_per_value = seconds * 1e9 / static_cast<double>(std::max<int64_t>(values, 1));
  totals.rules[0].ns_per_step = seconds;
  for (RuleTotals& rule : totals.rules) rule.ns_per_step *= 1e9 / static_cast<double>(std::max<int64_t>(samples, 1));
  const auto failing = static_cast<double>(std::max<int64_t>(totals.rules[0].failing, 1));
  totals.mean_lead /= failing;
  totals.mean_critical_lead /= failing;
  return totals;
}

std::string ToTable(const Scorecard& card, const ScorecardTotals& totals) {
  std::string text =
      "| run | family | t_sigma | t_loss | first warning | lead | first critical | named first | ETA error | false "
      "warnings, criticals |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const RunScore& score : card.scores) {
    const bool in_time = score.first_warning >= 0 && score.failed_at() >= 0;
    absl::StrAppend(
        &text, "| ", score.run, " | ", score.family.empty() ? "-" : score.family, " | ", StepText(score.truth.t_sigma),
        " | ", StepText(score.truth.t_loss), " | ", StepText(score.first_warning), " | ",
        in_time ? absl::StrCat(score.failed_at() - score.first_warning) : "-", " | ", StepText(score.first_critical),
        " | ", score.named_heads.empty() ? "-" : HeadText(score.named_heads[0]), " | ",
        score.eta_error ? absl::StrFormat("%+.0f %%", 100 * *score.eta_error) : "-", " | ", score.false_warnings(),
        ", ", score.false_criticals(), " |\n");
  }
  absl::StrAppend(
      &text,
      "\n| rule | failing runs warned in time | median lead, steps | quiet runs warned | false warnings per 1,000 "
      "steps (95 %) | cost, ns a step |\n| --- | --- | --- | --- | --- | --- |\n");
  for (const RuleTotals& rule : totals.rules) {
    absl::StrAppend(&text, "| ", rule.rule, " | ", rule.warned_in_time, " of ", rule.failing, " | ",
                    rule.median_lead ? absl::StrFormat("%.0f", *rule.median_lead) : "-", " | ", rule.quiet_warned,
                    " of ", rule.quiet, " | ", RateText(rule.false_warnings), " | ",
                    absl::StrFormat("%.0f", rule.ns_per_step), " |\n");
  }
  absl::StrAppend(&text, "\nOver all failing runs: mean lead ", absl::StrFormat("%.0f", totals.mean_lead),
                  " steps, of the first critical ", absl::StrFormat("%.0f", totals.mean_critical_lead), " (in time in ",
                  totals.critical_in_time, " of ", totals.rules[0].failing, ").\nHeads: layer right in ",
                  totals.layer_right, " of ", totals.with_heads, " runs, the first named explodes in ",
                  totals.first_right, ", one of the first three in ", totals.first_three_right,
                  ".\nTime left, at mid-course: said in ", totals.etas_known, " of ", totals.etas_asked,
                  " runs, within 35 % in ", totals.etas_within_35_percent,
                  ".\nFalse criticals per 1,000 steps: ", RateText(totals.false_criticals_rate),
                  absl::StrFormat(".\nCost: %.1f ns a value.\n\n", totals.ns_per_value), BarTable(BarsOf(card.scores)));
  return text;
}

std::string ToJsonLines(const Scorecard& card, const ScorecardTotals& totals) {
  std::string text;
  for (const RunScore& score : card.scores) absl::StrAppend(&text, ToJson(score).dump(), "\n");
  return text + ToJson(totals, card).dump() + "\n";
}

}  // namespace bellwether::server
