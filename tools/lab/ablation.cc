#include "tools/lab/ablation.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/thresholds.h"

namespace bellwether::server {
namespace {

bool SameVerdict(const RunScore& a, const RunScore& b) {
  return a.first_warning == b.first_warning && a.first_critical == b.first_critical && a.warnings == b.warnings &&
         a.criticals == b.criticals && a.named_heads == b.named_heads;
}

}  // namespace

std::vector<Ablated> Ablate(const RunSet& runs, const JudgeOptions& options, const Progress& progress) {
  std::vector<std::optional<Builtin>> cases = {std::nullopt};
  for (int i = 0; i < kBuiltins; ++i) {
    if (const auto test = static_cast<Builtin>(i); options.is_on(test)) cases.emplace_back(test);
  }
  std::vector<Ablated> rows;
  std::vector<RunScore> whole;
  for (const auto& off : cases) {
    JudgeOptions without = options;
    if (off) without.off.Add(*off);
    Ablated& row = rows.emplace_back();
    row.off = off;
    std::vector<RunScore> scores;
    for (size_t run = 0; run < runs.size(); ++run) {
      scores.push_back(runs.Score(run, without));
      if (off && !SameVerdict(scores.back(), whole[run])) ++row.runs_changed;
    }
    row.totals = AddUp(scores);
    if (!off) whole = std::move(scores);
    if (progress) progress(rows.size(), cases.size());
  }
  return rows;
}

std::string ToTable(const std::vector<Ablated>& rows) {
  std::string text =
      "| switched off | runs that change | warned in time | mean lead, steps | critical in time | mean lead of it | "
      "one of the first three right | false warnings | false criticals |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  std::string without_effect;
  for (const Ablated& row : rows) {
    if (row.off && row.runs_changed == 0) {
      absl::StrAppend(&without_effect, without_effect.empty() ? "" : ", ", NameOf(*row.off));
      continue;
    }
    const RuleTotals& ours = row.totals.rules[0];
    absl::StrAppend(&text, "| ", row.off ? NameOf(*row.off) : "nothing", " | ", row.runs_changed, " | ",
                    ours.warned_in_time, " of ", ours.failing, " | ", absl::StrFormat("%.0f", row.totals.mean_lead),
                    " | ", row.totals.critical_in_time, " | ", absl::StrFormat("%.0f", row.totals.mean_critical_lead),
                    " | ", row.totals.first_three_right, " of ", row.totals.with_heads, " | ",
                    ours.false_warnings.count, " | ", row.totals.false_criticals, " |\n");
  }
  if (!without_effect.empty()) absl::StrAppend(&text, "\nNo run changes without: ", without_effect, ".\n");
  return text;
}

}  // namespace bellwether::server
