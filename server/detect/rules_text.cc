#include "server/detect/rules_text.h"

#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "server/detect/rule_fields.h"
#include "server/detect/rules_file.h"
#include "server/detect/thresholds.h"

namespace bellwether::server {
namespace {

// {section.name} stands for the threshold's value.
constexpr const char* kBuiltinSentences[] = {
    "A head drifts: any of the four tests below. Stage 1; 2 with ties, 3 with norm, 4 with logits of "
    "{logits.logit_max_large}. "
    "A warning; critical with norm, or with ties above a common mode of {drift.common_mode_large} logits if a head of "
    "the layer leaked within the newest {leak.memory_steps} steps or the leak is not measured. The alert "
    "names at least "
    "{alert.suspects_min} heads. The time left counts to a ratio of {drift.ratio_critical} and a common mode of "
    "{drift.common_mode_critical} logits, the mean of both, from half that ratio on to the common mode alone; up to "
    "{drift.eta_steps_max} steps.",
    "A head's drift ratio is above {drift.grown_factor} times the median head (held at {drift.ratio_floor} or more) "
    "and grows "
    "exponentially: Mann-Kendall z >= {trend.mann_kendall_z_min}, r2 >= {trend.r2_min}, doubling within "
    "{trend.doubling_steps_max} steps. This holds over {trend.window_batches} or the newest "
    "{trend.window_batches_short} batches "
    "(at least "
    "{trend.window_batches_min}), for {drift.hold_batches} batches. With fewer than {drift.peers_min} heads in the run "
    "it is silent; with more than {drift.heads_usual} the factor grows with their number to the power of "
    "{drift.heads_exponent}.",
    "A head's drift ratio is above {drift.level_factor} times the median head and {drift.level_rise_min} times what it "
    "was at the "
    "window's start. This holds for {drift.level_batches} batches, twice as many where neither ties nor a leak in its "
    "layer holds. With more than {drift.heads_usual} heads in the run the first "
    "factor grows with their number to the power of {drift.heads_exponent}.",
    "A head's common mode is above {drift.common_mode_large} logits and {drift.common_mode_factor} times the median "
    "head, and grows as "
    "for drift.growth. The key-gradient leaks of its layer do not all show that the kernel is right. Where they are "
    "not measured, it must hold for twice as many batches.",
    "A head's key-gradient leak is above {leak.factor} times the median head (held at {leak.floor} or more), for "
    "{leak.hold_batches} batches.",
    "More than {ties.fraction_min} of a head's rows, and {ties.peer_factor} times the median head, have a repeated "
    "bf16 maximum, for "
    "{ties.hold_batches} batches. With more than {drift.heads_usual} heads in the run the share grows with their "
    "number "
    "to the power of {drift.heads_exponent}, to {ties.fraction_high} at most. A warning, stage 2; alone only where the "
    "leak is not measured, and after twice as many batches.",
    "A head's sigma(W_Q) is above {norm.peer_factor} times the median head and rises against it {norm.rise_min} times "
    "within the "
    "window, monotonically, for {norm.hold_batches} batches. A warning, stage 3. In a head that drifts, this or a "
    "sigma(W_Q) above {norm.far_factor} times the median head is stage 3, critical. Above "
    "{norm.rescue_sigma_max} an alert of the head advises to go back to a checkpoint.",
    "A head's largest score is above {logits.logit_max_large}, for {logits.hold_batches} batches, or above 4 "
    "times that for one: a warning, stage 4; "
    "in a layer that drifts critical. "
    "Or the median "
    "head's is above {logits.logit_median_large} with an entropy ratio below {logits.entropy_ratio_collapsed}: a "
    "warning; critical "
    "from {logits.logit_median_critical} on.",
    "The mean of {loss.mean_values} losses stays above its minimum by {loss.rise_of_minimum} of it, by "
    "{loss.rise_of_gain} of what "
    "was won, and by {loss.rise_sigma} standard errors, for {loss.persist_steps} steps: a warning, stage 5; critical "
    "after "
    "{loss.critical_steps}. An impulse of {loss.impulse_sigma} standard deviations above the {loss.window_values} "
    "values before "
    "it, {loss.impulse_values} times in a row, is information. Within {loss.change_steps} steps of an announced change "
    "or of a learning rate that went up or down by a factor of {context.rate_factor}, the loss is compared with its "
    "level before it. {loss.change_hold_steps} steps above that by {loss.change_rise_of_level} of it and by "
    "{loss.change_rise_of_gain} of what was won are a warning, also in the first steps. It is critical when "
    "{loss.change_lost_of_gain} of what was won is lost (in a run that began near its level: "
    "{loss.change_lost_of_level} times that level). After other data, another sequence "
    "length or a restore of unknown step only such a loss counts: a warning, critical after {loss.persist_steps} "
    "steps. A loss that turns is {loss.turn_values} times in a row above the lowest median of 16: by "
    "{loss.turn_rise_of_level} of it, by {loss.turn_rise_of_gain} of what was won and by {loss.turn_sigma} deviations "
    "of neighbouring losses. That is information, and after {loss.turn_lasting_values} a warning, or at once where the "
    "learning rate has just risen. If it has jumped within a step and stays, that is its cause. Then the 10 to 64 "
    "newest "
    "losses are above the 64 before by {loss.step_sigma} standard errors, and by {loss.step_rise_of_level} of the "
    "level. They do not rise any more. Of fewer than 20 up to 1.5 more are asked for. A loss that jumps so that 8 of "
    "the newest 10 are above all 64 before, and 1.5 times as far as any of them, is a warning at once. So is a loss "
    "that is above the first losses by {loss.start_rise} of them within 100 steps, while sigma(W_Q) of half of the "
    "heads has changed by {loss.start_moved} in ln.",
    "The gradient norm is {loss.gradient_factor} times its geometric mean and {loss.impulse_sigma} standard deviations "
    "of its "
    "logarithm above it: information; a warning when it lasts {loss.persist_steps} steps. It is a warning at once if "
    "it has doubled from one step on: 8 of the newest 10 are above all 64 before.",
    "Any NaN or infinity, any row with a non-finite score: critical, stage 5 (the gradient norm alone: a warning). It "
    "names the layer in which it arose: the lowest one of the forward pass, the highest one of the backward pass. With "
    "fp16, whose loss scaler skips such a step, information until it lasts.",
    "Replicas report different values of what must be equal: critical.",
    "Ranks have been silent past the deadline: a warning; critical if it is all of them. Or the loss, attention, or "
    "most "
    "signals of one layer no longer come while others do: a warning. Other signals and single tensors: information.",
    "The hook takes more than {alert.hook_overhead_max} of the step's time for {alert.hook_overhead_steps} steps: a "
    "warning.",
    "What a kernel of attention returned breaks a law that exact arithmetic keeps, or is further from its reference "
    "than rounding and chance explain: critical, from one sample on, at any step. All questions of a run, however "
    "long, "
    "share one probability of a false alarm, {kernel.chance}. A difference that roundings explain which are all alike "
    "is no alarm, and neither is A1 alone below twice of it. Such a bias is evidence in the alert of a drift.",
    "What another layer computed breaks a law that exact arithmetic keeps by more than rounding and chance explain, "
    "and "
    "by {arithmetic.z_min} standard deviations at least. Or it is not finite where all that the layer was given is. "
    "Critical, from one sample on, at any step. All questions of a run share one probability of a false alarm, "
    "{arithmetic.chance}. It ends where the named layers have been asked again and found right.",
    "A number that the job logs by a name of its own (mon.log) is not finite, after {own.finite_values} finite ones in "
    "a row. Or it is beyond a limit that the job has declared for it. A warning, from one value on, at any step. So is "
    "one that compares the policy that is trained with the one that samples, as rollout_probs_diff, if it was exactly "
    "0 "
    "in 32 values in a row and is not in two. The alert names the numbers, and is told again for another one.",
    "A number that the job logs by a name that the field has leaves its own past to the bad side. A reward, an "
    "entropy or an effective sample size falls; a KL divergence, a share of clipped tokens or a loss of a router "
    "rises. Means of {own.batch_values} values are held "
    "against 64 of them, each at least 12 old. They lie beyond all of these by {own.range_factor} times their range "
    "(where all are positive and rising is bad, also of their logarithms). "
    "And they have risen to {own.rise_factor} times their median, or fallen by {own.fall_share} of it. "
    "{own.hold_batches} in a row are information, {own.persist_batches} a warning; {own.relearn_batches} are the new "
    "normal.",
    "A parameter has a gradient, at least {frozen.gradient_share} of the median parameter's, and does not move in "
    "{frozen.samples} samples in a row while others do; or none moves. A warning, at any step. Where its change may be "
    "too small for 16 bits it is information, and none while the learning rate rises. One that has stood still before "
    "must do so for four times as long.",
    "An expert that had tokens in {experts.seen} samples has had none in {experts.samples} in a row, and in "
    "{experts.samples} times as many as ever before: a warning. Two samples are enough for one that was never idle and "
    "always had {experts.steady_share} of the mean expert's tokens, if by its lowest share it should have had "
    "{experts.steady_tokens} in them. One that had some in fewer, or "
    "never, and has none in {experts.start_samples} samples is information. Or the breadth of a layer is below "
    "{experts.breadth}, and "
    "{experts.breadth_fall} times below all of its best 64 samples, for {experts.samples} samples: a warning. Two are "
    "enough where it is below them by that factor squared. The breadth is "
    "how many experts share the load, beyond those that each token is sent to: 1 is balanced, 0 always the same. "
    "Samples of which the mean expert has fewer than {experts.tokens} tokens say nothing of it.",
    "Of the labels that count, {sequences.repeated_share} or more are the same as the one before, where they were "
    "{sequences.usual_share} in no step of the past; steps of fewer than {sequences.labels} labels say nothing. Or the "
    "largest loss of a sequence lies beyond all of its past by {sequences.range_factor} times its range, also of the "
    "logarithms, and is {sequences.rise_factor} times the largest of it. The past are the last 256 to 384 steps. "
    "Information; {sequences.hold_values} steps in a row are a warning, {sequences.relearn_values} the new normal. Of "
    "the newest batches two that are far odd within 4 steps, or three that are odd within 6, are a warning at once: "
    "bad "
    "data. They stand apart from the last 96 by mean, largest loss or repeated labels. So is a run with nothing to "
    "learn: no label counts, for 2 steps; or for 8 steps nearly all are the same as the one before, or the batch is "
    "the "
    "same again.",
    "The gradient norm, the update ratio or the second-moment lag of a parameter leaves its own past, when what all "
    "parameters share is taken off. As a logarithm it lies beyond all of the past by {parameters.range_factor} times "
    "its range, and by a factor of {parameters.rise_factor} at least. Gradients that fall do so by "
    "{parameters.fall_factor}; the others may fall. What all of them share is judged in the same way, by a factor of "
    "{parameters.shared_factor}. The past are 64 "
    "to 96 samples that cover it. {parameters.hold_samples} in a row are information, {parameters.persist_samples} a "
    "warning, {parameters.relearn_samples} the new normal. Or the largest second-moment lag of a step is above "
    "{parameters.lag_level}, and beyond its past of 128 to 192 samples by the same range: information. "
    "{parameters.lag_samples} samples "
    "in a row are a warning. Or the root mean square of a weight has grown to {parameters.growth_factor} times what it "
    "was, in {parameters.growth_samples} samples in a row. In each of them it grows {parameters.growth_rate_factor} "
    "times as fast as in any of its last 8 to 16, and as weights of other layers. And it would double in fewer than "
    "{parameters.growth_doubling_steps} steps. Two samples are enough where it is 1.5 times as far beyond its past. A "
    "warning, also in the first steps if the learning rate is told. Or a tensor in 8 bits has a scale that does not "
    "fit. Of its elements more than {parameters.saturated_share} are at the largest number, or of those that were not "
    "0 "
    "more than {parameters.flushed_share} are 0. It is so in {parameters.scale_samples} samples in a row that cover "
    "it, "
    "and they are 4 times as many as usual, or 10 times this limit. A warning, at any step.",
    "A weight has jumped at one place alone. From one sample to the next sigma(W_Q) or sigma(W_K) of a head, or the "
    "root "
    "mean square of a parameter, has risen to {corruption.weight_factor} times what it was. For each 100 steps in "
    "between it must be e times more. The median place has not doubled. Critical, at any step, until it is back or "
    "{corruption.relearn_samples} samples have passed. Or the largest element of a parameter's gradient is "
    "{corruption.gradient_factor} times the largest of its past, and 100 times that of all other parameters: a "
    "warning. "
    "Fewer than 8 places have no median, and need the factor squared.",
    "The run does not learn, by numbers that every job has. The loss is the same to the last bit, or the gradient norm "
    "or the learning rate is 0, in {learning.equal_values} values in a row. Or sigma of W_Q and W_K is the same in all "
    "heads for 3 samples, after it has always changed. Or the gradient norm rises in {learning.rising_values} values, "
    "nearly each above the one before and by no more each time, to {learning.rising_factor} times all of its past: "
    "gradients are not set to zero. Or it has risen so far and no longer scatters. Or it jumps by "
    "{learning.scale_factor}, up or down, for {learning.scale_values} "
    "values in which the loss is as before: a loss scale. The past are the last 64 to 96 values. Or a step "
    "of the optimizer changes most parameters by more than {learning.change_share} of their size. Or one of Adam is "
    "longer than {learning.update_factor} learning rates. Or second moments lag by {learning.lag_level} in two samples "
    "in a row. Or the learning rate rises at once to {learning.jump_factor} times all before, or falls to "
    "1/{learning.fall_factor}, and nothing has announced it. A warning, at any step.",
};
static_assert(std::size(kBuiltinSentences) == kBuiltins);

constexpr char kCommon[] =
    "Samples of {trend.batch_steps} steps are averaged to a batch, and a full batch is judged once. Trends of heads "
    "and parameters are not judged in the first {context.warmup_steps} steps, nor experts but by what two samples "
    "show, and no trend in {context.settle_steps} steps after an announced change. Where the learning rate is told, "
    "experts "
    "and parameters are judged from {context.warmed_steps} steps behind its last rise on, if that is earlier. So "
    "are trends of heads where less than {context.forming_fall} of the loss is lost by then. States are: values that "
    "are not finite, a loss far above its level before the change, scores and weights out of bounds. What a head had "
    "in its first sample is information, and counts from {context.found_factor} times that on. Where the median step "
    "takes "
    "{context.slow_step_seconds} s or longer, spans in steps are shorter in the first {context.young_steps} steps, "
    "from a sixteenth on. An alert resolves after "
    "{alert.resolve_steps} steps without evidence; its kind then stays quiet for {alert.cooldown_steps}, unless it is "
    "worse. It "
    "names at most {alert.heads_max} heads and {alert.evidence_max} pieces of evidence. A trend is fitted to what "
    "rises by "
    "{trend.gate_share} of the slowest growth that counts, and one that has long held only every {trend.refit_batches} "
    "batches.";

// The value, and beside it the default where it is another.
std::string WithDefault(const Threshold& row, const JudgeOptions& options) {
  const double value = row.Get(options);
  const double built_in = row.Get(JudgeOptions());
  return value == built_in ? NumberText(value)
                           : absl::StrCat(NumberText(value), " (built in: ", NumberText(built_in), ")");
}

std::string FillIn(const char* sentence, const JudgeOptions& options) {
  std::vector<std::pair<std::string, std::string>> values;
  for (const Threshold& row : Thresholds()) {
    values.emplace_back(absl::StrCat("{", row.path(), "}"), WithDefault(row, options));
  }
  return absl::StrReplaceAll(sentence, values);
}

std::string ExplainBuiltin(Builtin rule, const JudgeOptions& options) {
  const bool off = !options.is_on(rule);
  return absl::StrCat(NameOf(rule), off ? " (off)" : "", "\n  ",
                      FillIn(kBuiltinSentences[static_cast<size_t>(rule)], options), "\n");
}

std::string SubjectOf(const UserRule& rule) {
  const SignalInfo& signal = *FindSignal(rule.signal);
  if (rule.scope == RuleScope::kHead) return absl::StrCat("A head's ", signal.name);
  if (signal.granularity == Granularity::kRun) return absl::StrCat("The run's ", signal.name);
  if (OfNamedRows(signal.granularity)) {
    const std::string rows = signal.granularity == Granularity::kTensor   ? "tensor"
                             : signal.granularity == Granularity::kModule ? "module"
                                                                          : "cell";
    const std::string what =
        rule.own.empty() ? std::string(signal.name) : absl::StrCat("the job's own signal ", rule.own);
    const std::string named = rule.rows == UserRule().rows ? "" : absl::StrCat(" named ", rule.rows);
    if (rule.scope == RuleScope::kRow) {
      return absl::StrCat("A ", rows, rule.own.empty() ? "'s " : " of ", what,
                          named.empty() ? "" : absl::StrCat(" (of those", named, ")"));
    }
    return absl::StrCat("The ", NameOf(rule.aggregate), " over the ", rows, "s", named, " of the run of ", what);
  }
  if (signal.granularity == Granularity::kLayer) {
    if (rule.scope == RuleScope::kLayer) return absl::StrCat("A layer's ", signal.name);
    return absl::StrCat("The ", NameOf(rule.aggregate), " over the layers of the run of ", signal.name);
  }
  const bool experts = signal.granularity == Granularity::kExpert;
  return absl::StrCat("The ", NameOf(rule.aggregate), " over the ", experts ? "experts" : "heads", " of ",
                      rule.scope == RuleScope::kLayer ? "a layer" : "the run", " of ", signal.name);
}

std::string SideOf(RuleDirection direction) {
  return direction == RuleDirection::kUp ? "above" : direction == RuleDirection::kDown ? "below" : "off";
}

std::string ConditionOf(const UserRule& rule, const TrendOptions& trend) {
  const auto number = [](double value) { return NumberText(value); };
  const std::string logarithm = rule.scale == RuleScale::kLog ? " (of its logarithm)" : "";
  switch (rule.detector) {
    case RuleDetector::kLevel:
      return rule.above ? absl::StrCat("is above ", number(*rule.above))
                        : absl::StrCat("is below ", number(*rule.below));
    case RuleDetector::kPeers:
      return absl::StrCat("is ", rule.factor > 1 ? "above " : "below ", number(rule.factor), " times the median ",
                          NameOf(rule.scope), " (held at ", number(rule.floor), " or more)");
    case RuleDetector::kGrowth:
      return absl::StrCat(rule.above ? absl::StrCat("is above ", number(*rule.above), " and ") : "",
                          "grows exponentially: Mann-Kendall z >= ", number(rule.z_min),
                          ", r2 >= ", number(rule.r2_min), ", doubling within ", number(rule.doubling_steps_max),
                          " steps, over ", trend.window_batches, " or the newest ", trend.window_batches_short,
                          " batches");
    case RuleDetector::kImpulse:
      return absl::StrCat("is ", number(rule.sigmas), " standard deviations", logarithm, " ", SideOf(rule.direction),
                          " the mean of the ", rule.window_batches, " batches before it");
    case RuleDetector::kCusum:
      break;
  }
  return absl::StrCat("has been ", SideOf(rule.direction), " the mean of the ", rule.window_batches,
                      " batches before it by sums of ", number(rule.h), " standard deviations", logarithm, " beyond ",
                      number(rule.k), " a batch");
}

// What was said and need not have been.
std::string ChangesOf(const UserRule& rule, const JudgeOptions& options) {
  const UserRule plain = DefaultRule(options, rule.signal, rule.scope, rule.detector);
  std::vector<std::string> changes;
  for (const RuleField& field : RuleFields()) {
    const bool text = field.high > 63 && std::holds_alternative<std::string*>(field.slot(const_cast<UserRule*>(&rule)));
    if (field.required || text || !field.taken_by(rule.detector)) continue;
    const std::string value = ValueText(field, rule);
    const std::string built_in = ValueText(field, plain);
    if (value == built_in) continue;
    changes.push_back(absl::StrCat(field.name, " ", value, built_in.empty() ? "" : " (default: " + built_in + ")"));
  }
  return absl::StrJoin(changes, ", ");
}

std::string RangeOf(double low, double high) { return absl::StrCat(NumberText(low), " to ", NumberText(high)); }

std::string DetectorsOf(const RuleField& field) {
  std::vector<const char*> names;
  for (uint8_t i = 0; i <= static_cast<uint8_t>(RuleDetector::kCusum); ++i) {
    if (field.taken_by(static_cast<RuleDetector>(i))) names.push_back(NameOf(static_cast<RuleDetector>(i)));
  }
  return names.size() == 5 ? "all" : absl::StrJoin(names, ", ");
}

std::string LegalOf(const RuleField& field) {
  struct Visitor {
    const RuleField& field;
    std::string operator()(const bool*) const { return "true, false"; }
    std::string operator()(const std::string*) const { return absl::StrCat(RangeOf(field.low, field.high), " bytes"); }
    std::string operator()(const SignalId*) const { return "a signal"; }
    std::string operator()(const uint8_t*) const {
      const size_t hidden = *field.words.front() == '\0' ? 1 : 0;
      return absl::StrJoin(field.words.subspan(hidden), ", ");
    }
    std::string operator()(const void*) const { return RangeOf(field.low, field.high); }
  };
  UserRule any;
  return std::visit(Visitor{field}, field.slot(&any));
}

}  // namespace

std::string ExplainRule(const UserRule& rule, const JudgeOptions& options) {
  std::string text = absl::StrCat(rule.name, "\n  ", SubjectOf(rule), " ", ConditionOf(rule, options.trend), ", for ",
                                  rule.hold_batches, rule.hold_batches == 1 ? " batch" : " batches", " of ",
                                  rule.batch_steps, rule.batch_steps == 1 ? " step" : " steps", ": ",
                                  rule.severity == Severity::kInfo      ? "information"
                                  : rule.severity == Severity::kWarning ? "a warning"
                                                                        : "critical",
                                  ", stage ", rule.stage, ".");
  if (rule.benjamini_hochberg) {
    absl::StrAppend(&text, " Of what fires at once at most ", NumberText(*rule.benjamini_hochberg),
                    " is expected to be chance (Benjamini-Hochberg).");
  }
  if (rule.detector == RuleDetector::kImpulse || rule.detector == RuleDetector::kCusum) {
    absl::StrAppend(&text, " After ", rule.relearn_batches, " such batches in a row it is the new normal.");
  }
  if (rule.eta_level) absl::StrAppend(&text, " The time left counts to ", NumberText(*rule.eta_level), ".");
  if (rule.rounding_only) absl::StrAppend(&text, " Not while keys are centred or scores are computed in fp32.");
  absl::StrAppend(&text, " It resolves after ", rule.resolve_steps, " steps without evidence and then stays quiet for ",
                  rule.cooldown_steps, ".\n");
  if (const std::string changes = ChangesOf(rule, options); !changes.empty()) {
    absl::StrAppend(&text, "  Other than by default: ", changes, ".\n");
  }
  absl::StrAppend(&text, "  Cause: ", rule.cause, ".\n");
  if (!rule.advice.empty()) absl::StrAppend(&text, "  Advice: ", rule.advice, "\n");
  return text;
}

absl::StatusOr<std::string> ExplainRules(const JudgeOptions& options, std::string_view name) {
  std::string text;
  std::vector<std::string> names;
  const auto wants = [&](std::string_view rule) {
    names.emplace_back(rule);
    return name.empty() || name == rule;
  };
  for (int i = 0; i < kBuiltins; ++i) {
    if (wants(NameOf(static_cast<Builtin>(i))))
      absl::StrAppend(&text, ExplainBuiltin(static_cast<Builtin>(i), options));
  }
  if (options.rules != nullptr) {
    for (const UserRule& rule : *options.rules) {
      if (wants(rule.name)) absl::StrAppend(&text, ExplainRule(rule, options));
    }
  }
  if (text.empty()) {
    return absl::NotFoundError(absl::StrCat("no rule \"", absl::string_view(name.data(), name.size()), "\"; there are ",
                                            absl::StrJoin(names, ", ")));
  }
  if (name.empty()) absl::StrAppend(&text, "all rules\n  ", FillIn(kCommon, options), "\n");
  return text;
}

std::string RulesReference() {
  const JudgeOptions defaults;
  std::string page =
      "# The rules file\n\nGenerated by `bellwetherd rules reference`; do not edit. How to write, check, test and "
      "back-test one: "
      "[detection.md](../concepts/detection.md).\n\n";
  absl::StrAppend(
      &page, "A YAML file of at most ", kRulesBytesMax / 1024, " KiB with three parts, each of which may be missing. ",
      "What it does not say is as built in; what it says wrongly is refused with file, line and column.\n\n",
      "## `thresholds`\n\nA map of sections: `thresholds: {drift: {grown_factor: 4}}`.\n\n",
      "| section | name | built in | legal | unit | meaning |\n| --- | --- | --- | --- | --- | --- |\n");
  for (const Threshold& row : Thresholds()) {
    absl::StrAppend(&page, "| ", row.section, " | `", row.name, "` | ", NumberText(row.Get(defaults)), " | ",
                    RangeOf(row.low, row.high), row.whole() ? ", whole" : "", " | ", row.unit, " | ", row.help, " |\n");
  }
  absl::StrAppend(&page, "\nAlso: ");
  std::vector<std::string> orders;
  for (const ThresholdOrder& order : ThresholdOrders()) {
    orders.push_back(absl::StrCat("`", order.smaller, "` <= `", order.larger, "`"));
  }
  absl::StrAppend(&page, absl::StrJoin(orders, ", "),
                  ".\n\n## `off`\n\nA list of built-in rules, or tests of one, that are off.\n\n",
                  "| name | when it fires, as built in |\n| --- | --- |\n");
  for (int i = 0; i < kBuiltins; ++i) {
    absl::StrAppend(&page, "| `", NameOf(static_cast<Builtin>(i)), "` | ", FillIn(kBuiltinSentences[i], defaults),
                    " |\n");
  }
  absl::StrAppend(&page, "\n", FillIn(kCommon, defaults), "\n\n## `rules`\n\nA list of at most ", kUserRulesMax,
                  " own rules, beside the built-in ones.\n\n",
                  "| key | of detectors | legal | default | unit | meaning |\n| --- | --- | --- | --- | --- | --- |\n");
  const UserRule plain;
  for (const RuleField& field : RuleFields()) {
    std::string built_in = field.default_of;
    if (FindThreshold(field.default_of) != nullptr) {
      built_in = absl::StrCat("`", field.default_of, "`");
    } else if (built_in.empty()) {
      built_in = field.required ? "must be said" : ValueText(field, plain);
      if (built_in.empty()) built_in = "none";
    }
    absl::StrAppend(&page, "| `", field.name, "` | ", DetectorsOf(field), " | ", LegalOf(field), " | ", built_in, " | ",
                    field.unit, " | ", field.help, " |\n");
  }
  return page;
}

std::string BuiltinRulesFile() {
  const JudgeOptions defaults;
  std::string file =
      "# What is built in, as a rules file: say only what you change.  Generated by\n"
      "# `bellwetherd rules defaults`; do not edit.\n"
      "thresholds:\n";
  std::string section;
  for (const Threshold& row : Thresholds()) {
    if (section != row.section) absl::StrAppend(&file, "  ", row.section, ":\n");
    section = row.section;
    absl::StrAppend(&file, "    ", row.name, ": ", NumberText(row.Get(defaults)), "  # ", row.unit,
                    *row.unit == '\0' ? "" : ": ", row.help, "\n");
  }
  std::vector<std::string> names;
  for (int i = 0; i < kBuiltins; ++i) names.emplace_back(NameOf(static_cast<Builtin>(i)));
  absl::StrAppend(&file, "# Of ", absl::StrJoin(names, ", "), ".\noff: []\nrules: []  # example.yml has some\n");
  return file;
}

}  // namespace bellwether::server
