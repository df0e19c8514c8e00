#include "server/detect/run_judge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/advice.h"
#include "server/detect/alert_engine.h"
#include "server/detect/alert_text.h"
#include "server/detect/announced_change.h"
#include "server/detect/archive.h"
#include "server/detect/arithmetic_watch.h"
#include "server/detect/change_watch.h"
#include "server/detect/corruption_watch.h"
#include "server/detect/detector_bank.h"
#include "server/detect/expert_watch.h"
#include "server/detect/growth_watch.h"
#include "server/detect/head_rules.h"
#include "server/detect/judge_options.h"
#include "server/detect/lag_watch.h"
#include "server/detect/law_watch.h"
#include "server/detect/learning_watch.h"
#include "server/detect/loss_start.h"
#include "server/detect/loss_step.h"
#include "server/detect/loss_turn.h"
#include "server/detect/loss_watch.h"
#include "server/detect/nonfinite_origin.h"
#include "server/detect/optimizer_watch.h"
#include "server/detect/own_watch.h"
#include "server/detect/parameter_role.h"
#include "server/detect/rule_fields.h"
#include "server/detect/scale_watch.h"
#include "server/detect/sequence_watch.h"
#include "server/detect/silence_watch.h"
#include "server/detect/step_pace.h"
#include "server/detect/tensor_pasts.h"
#include "server/detect/tensor_watch.h"
#include "server/detect/user_rules.h"
#include "server/model/alert_places.h"

namespace bellwether::server {
namespace {

// What is saved is of the last one; the others are read, too.
constexpr uint32_t kStateMagic = 0x314a5742;     // "BWJ1": no alert was numbered.
constexpr uint32_t kNumberedMagic = 0x324a5742;  // "BWJ2": nothing was kept across changes.
constexpr uint32_t kKeptMagic = 0x334a5742;      // "BWJ3": how much was excused was not counted.
constexpr uint32_t kExcusesMagic = 0x344a5742;   // "BWJ4": no kernel was judged.
constexpr uint32_t kLawsMagic = 0x354a5742;      // "BWJ5": no other layer was judged.
constexpr uint32_t kLayersMagic = 0x364a5742;    // "BWJ6": no own signal was judged.
constexpr uint32_t kOwnMagic = 0x374a5742;       // "BWJ7": no parameter was judged.
constexpr uint32_t kTensorsMagic = 0x384a5742;   // "BWJ8": no expert and no sequence was judged.
constexpr uint32_t kExpertsMagic = 0x394a5742;   // "BWJ9": no parameter was held against its past.
constexpr uint32_t kPastsMagic = 0x414a5742;     // "BWJA": no lag of each step was.
constexpr uint32_t kLagsMagic = 0x424a5742;      // "BWJB": no weight was held against its sample before.
constexpr uint32_t kCausesMagic = 0x434a5742;    // "BWJC": each family had an alert of its own.
constexpr uint32_t kSignsMagic = 0x444a5742;     // "BWJD": no step of the optimizer was judged.
constexpr uint32_t kStepsMagic = 0x454a5742;     // "BWJE": no growth of weights was judged.
constexpr uint32_t kGrowthMagic = 0x464a5742;    // "BWJF": no batch was held against those before.
constexpr uint32_t kBatchesMagic = 0x474a5742;   // "BWJG": no scale of 8 bits, and not how long steps take.
constexpr uint32_t kScalesMagic = 0x484a5742;    // "BWJH": no start was judged.
constexpr uint32_t kStartMagic = 0x494a5742;     // "BWJI": no silence of anything but ranks was judged.
constexpr uint32_t kSilenceMagic = 0x4a4a5742;   // "BWJJ"

// A loss scaler needs 16 steps in a row to find its factor, from its first one of 2^16 on.
constexpr int32_t kOverflowsMax = 32;
// A batch whose forward pass overflows is followed by another one.
constexpr int32_t kLostLossesMax = 2;

// So many excuses one after the other, and as much again after twice as many
// steps that were judged: what is announced all the time excuses nothing.
constexpr int64_t kExcusesMax = 5;
// As client_lib/python/bellwether begins its event of a learning rate that it has seen change.
constexpr std::string_view kSeenByHook = "learning rate is now ";
// Steps by which a jump of the loss may be placed early.
constexpr int64_t kJumpPlaced = 4;
// What the loss loses at once after the learning rate rose is lost by then.  Later it is lost over many steps.
constexpr int64_t kRateJumps = 50;
// Changes of steps that the run has not come to.
constexpr size_t kChangesAheadMax = 16;
// Behind a change, also where all of them come later than what settles.
constexpr int32_t kExcusedSamplesLeast = 4;

// Which of two ranks is wrong cannot be said; of more, the fewer differ.
std::vector<uint32_t> DifferingRanks(const StepSample::Disagreement& found) {
  const uint32_t same = found.reporters > found.ranks_total ? found.reporters - found.ranks_total : 1;
  std::vector<uint32_t> ranks = found.ranks;
  if (same > 1) return ranks;
  if (found.ranks_total > 1) ranks.clear();
  ranks.insert(ranks.begin(), found.first_rank);
  return ranks;
}

std::string RanksThatDiffer(const StepSample::Disagreement& found) {
  const uint32_t same = found.reporters > found.ranks_total ? found.reporters - found.ranks_total : 1;
  if (same == 1) {
    return absl::StrCat("rank ", found.first_rank, " differs from ",
                        found.ranks_total > 1 ? absl::StrCat("the ", found.ranks_total, " others")
                                              : absl::StrCat("rank ", absl::StrJoin(found.ranks, "")));
  }
  const bool more = found.ranks.size() < found.ranks_total;
  return absl::StrCat(found.ranks_total == 1 ? "rank " : "ranks ", absl::StrJoin(found.ranks, ", "),
                      more ? absl::StrCat(" and ", found.ranks_total - found.ranks.size(), " more differ")
                           : (found.ranks_total == 1 ? " differs" : " differ"),
                      " from ", same, " others");
}

}  // namespace

struct RunJudge::State {
  JudgeOptions given;    // As somebody has set them,
  JudgeOptions options;  // and as they are in force: spans are shorter in the first steps of a run of slow steps.
  RunDescription run;
  std::shared_ptr<const RunRows> rows;  // Null: none were named.
  DetectorBank* bank;
  HeadRules heads;
  LossWatch loss;
  LossTurn turn;
  LossStart start;
  LossStep jump;
  ChangeWatch changes;
  LawWatch laws;
  ArithmeticWatch arithmetic;
  OwnWatch own;
  TensorWatch frozen;
  ExpertWatch experts;
  SequenceWatch sequences;
  TensorPasts parameters;
  LagWatch lags;
  GrowthWatch growth;
  ScaleWatch scales;
  CorruptionWatch corruption;
  LearningWatch learning;
  OptimizerWatch optimizer;
  SilenceWatch silence;
  uint32_t silent_ranks = 0;
  UserRules user;
  AlertEngine alerts;
  int64_t first_step = -1;
  int64_t last_step = -1;
  int64_t excused_until = -1;
  uint32_t attempt = 0;
  int64_t overhead_since = -1;
  // The learning rate as last reported, and before it last jumped, at that step.
  double rate = 0, rate_before = 0;
  int64_t rate_step = -1;
  double rate_most = 0;  // The largest so far, and the last step that raised it.
  int64_t rate_rose_step = -1;
  int32_t bad_gradients = 0, bad_losses = 0;  // Reports in a row that were not finite.
  int64_t excused_halves = 0;                 // Of excused steps; each judged one takes one off.
  int64_t excused_from = -1;                  // The step of the last change that excuses.
  int32_t excused_samples = 0;                // So many more from there on are excused, however late they come.
  std::vector<AnnouncedChange> ahead;         // Of steps that the run has not come to.
  int64_t finite_step = -1;                   // The last one whose gradient norm was reported and finite.
  StepPace pace;
  int32_t shorter = 1;  // By what spans are, now.

  State(const JudgeOptions& from, const RunDescription& description, DetectorBank* on)
      : given(from),
        options(from),
        run(description),
        bank(on),
        heads(from, description.layout, on),
        loss(from.loss),
        turn(from.loss),
        start(from.loss),
        jump(from.loss),
        changes(from.loss),
        laws(from.kernel),
        arithmetic(from.arithmetic),
        own(from.own),
        frozen(from.frozen),
        experts(from.experts),
        sequences(from.sequences),
        parameters(from.parameters),
        lags(from.parameters),
        growth(from.parameters),
        scales(from.parameters),
        corruption(from.corruption),
        learning(from.learning),
        optimizer(from.learning),
        user(from, description.layout),
        alerts(from.alert),
        attempt(description.attempt) {
    alerts.SetRules(from.rules, {});
    alerts.SetRescueSigma(from.norm.rescue_sigma_max);
  }

  template <class A>
  void Visit(A& a) {
    a(attempt), a(first_step), a(last_step), a(excused_until), a(overhead_since);
    a(run.attention.kernel), a(run.attention.score_dtype), a(run.attention.centred), a(run.attention.qk_norm);
    a(run.attention.softcap), a(run.attempt);
    a(heads), a(loss), a(alerts);
  }
  // What is kept across announced changes.
  template <class A>
  void VisitKept(A& a) {
    a(changes), a(rate), a(rate_before), a(rate_step), a(bad_gradients), a(bad_losses);
  }
  template <class A>
  void VisitExcuses(A& a) {
    a(excused_halves), a(ahead), a(finite_step);
  }
  template <class A>
  void VisitLaws(A& a) {
    a(laws);
    alerts.VisitLater(Family::kKernel, a);
  }
  template <class A>
  void VisitArithmetic(A& a) {
    a(arithmetic);
    alerts.VisitLater(Family::kArithmetic, a);
  }
  template <class A>
  void VisitOwn(A& a) {
    a(own);
    alerts.VisitLater(Family::kOwn, a);
  }
  template <class A>
  void VisitTensors(A& a) {
    a(frozen);
    alerts.VisitLater(Family::kFrozen, a);
  }
  template <class A>
  void VisitExperts(A& a) {
    a(experts), a(sequences);
    alerts.VisitLater(Family::kExperts, a);
    alerts.VisitLater(Family::kSequences, a);
  }
  template <class A>
  void VisitPasts(A& a) {
    a(parameters);
    alerts.VisitLater(Family::kParameters, a);
  }
  template <class A>
  void VisitCauses(A& a) {
    a(corruption), a(learning);
    alerts.VisitLater(Family::kCorruption, a);
    alerts.VisitLater(Family::kLearning, a);
  }
  // What there was nothing of before, of whatever is above.
  template <class A>
  void VisitLater(A& a) {
    a(excused_from), a(excused_samples);
    experts.VisitLater(a);
    parameters.VisitLater(a);
  }
  template <class A>
  void VisitSteps(A& a) {
    a(optimizer), a(rate_most), a(rate_rose_step);
    learning.VisitLater(a);
  }
  // And what is held against pasts since then.
  template <class A>
  void VisitGrowth(A& a) {
    a(growth);
    experts.VisitLatest(a);
  }
  // And of batches, since then.
  template <class A>
  void VisitBatches(A& a) {
    a(jump);
    loss.VisitLater(a);
    own.VisitLater(a);
    sequences.VisitLater(a);
  }
  // And of how long steps take, and how heads were found.
  template <class A>
  void VisitPace(A& a) {
    a(pace);
    heads.VisitLater(a);
    own.VisitLatest(a);
    optimizer.VisitLater(a);
  }
  template <class A>
  void VisitSilence(A& a) {
    a(silence), a(silent_ranks);
  }
  // The part that belongs to the rules that people wrote.
  template <class A>
  void VisitUserRules(A& a) {
    a(user);
    alerts.VisitRules(a);
  }
  uint64_t user_rules_fingerprint() const { return options.rules == nullptr ? 0 : Fingerprint(*options.rules); }
  const RowNames* tensor_names() const { return rows == nullptr ? nullptr : &rows->tensors; }
  const RowNames* module_names() const { return rows == nullptr ? nullptr : &rows->modules; }
  bool on(Builtin rule) const { return options.is_on(rule); }
  // Whether heads, experts and parameters still take shape: while the learning rate warms up, where it is told.
  bool warms_up(int64_t step) const {
    if (step >= options.context.warmup_steps) return false;
    return rate_most <= 0 || step <= rate_rose_step + options.context.warmed_steps;
  }
  // Whether heads do, so that their trends mean nothing: not where most of the loss was won before the run began.
  bool forms(int64_t step) const {
    if (step >= options.context.warmup_steps) return false;
    const bool formed = loss.highest() > 0 && loss.minimum() > (1 - options.context.forming_fall) * loss.highest();
    return rate_most <= 0 || warms_up(step) || !formed;
  }
  // Of heads, experts and parameters, and behind an announced change.
  bool excuses_trends(int64_t step) const { return warms_up(step) || step < excused_until; }
  // Another way of attention may measure other things, and trends of before mean nothing.
  void ForgetTrends() {
    heads.ForgetTrends();
    silence.Forget();
    user.Forget();
  }
  LossCourse course() const {
    return {.off_since = loss.off_course_since(), .minimum = loss.minimum(), .scatter = loss.scatter()};
  }
  // Counts what was excused, and not, up to `step`.
  void CountExcused(int64_t step);
  // Whether trends may be excused until `until`.
  bool MayExcuse(int64_t until) const;
  // The drift of raw keys is not looked for from here on: what was found of it stays
  // until something else shows that it is over.
  void BeginRepairs(int64_t step, std::vector<AlertTransition>* out);
  // A family that HeadRules looks for.
  void CollectHeads(Family family, int64_t step, const std::vector<Finding>& findings);
  // That of the learning rate to which a loss that has risen since `step` may be put down.
  std::optional<AnnouncedChange> RiseOfRate(int64_t step, int64_t within) const;
  // Keeps what was before a jump of the learning rate, whether or not it was announced.
  void WatchRate(const StepSample& sample);
  // From the event's words to a change; false: it changes nothing.
  bool ReadChange(const RunEvent& event, AnnouncedChange* change);
  // `meant`: somebody has told of it; the hook tells of a learning rate that it sees change.
  void Announce(const AnnouncedChange& change, bool meant);

  // By what spans are shorter now.
  int32_t Shorter() const { return pace.Shorter(given.context, last_step - first_step); }
  // Makes spans as long as the pace of the run asks for.
  void SetSpans();
  // Hands all parts what is in force, but for the rules that people wrote.
  void HandOut();

  void JudgeKernel(const StepSample& sample);
  void JudgeArithmetic(const StepSample& sample);
  void JudgeOwn(const StepSample& sample);
  void JudgeFrozen(const StepSample& sample);
  void JudgeExperts(const StepSample& sample);
  void JudgeSequences(const StepSample& sample);
  void JudgeParameters(const StepSample& sample);
  void JudgeCorruption(const StepSample& sample);
  void JudgeLearning(const StepSample& sample);
  void JudgeSilence(const StepSample& sample, std::vector<AlertTransition>* out);
  void JudgeNonfinite(const StepSample& sample);
  void JudgeReplicas(const StepSample& sample, std::vector<Finding>* findings) const;
  void JudgeDisagreements(const StepSample& sample);
  void JudgeOverhead(const StepSample& sample);
  void ObserveJump(const StepSample& sample);
};

void RunJudge::State::SetSpans() {
  if (Shorter() == shorter) return;
  shorter = Shorter();
  options = WithShorterSpans(given, shorter);
  HandOut();
}

void RunJudge::State::HandOut() {
  alerts.SetOptions(options.alert);
  alerts.SetRescueSigma(options.norm.rescue_sigma_max);
  heads.SetOptions(options);
  loss.SetOptions(options.loss);
  turn.SetOptions(options.loss);
  start.SetOptions(options.loss);
  jump.SetOptions(options.loss);
  changes.SetOptions(options.loss);
  laws.SetOptions(options.kernel);
  arithmetic.SetOptions(options.arithmetic);
  own.SetOptions(options.own);
  frozen.SetOptions(options.frozen);
  experts.SetOptions(options.experts);
  sequences.SetOptions(options.sequences);
  parameters.SetOptions(options.parameters);
  lags.SetOptions(options.parameters);
  growth.SetOptions(options.parameters);
  scales.SetOptions(options.parameters);
  corruption.SetOptions(options.corruption);
  learning.SetOptions(options.learning);
  optimizer.SetOptions(options.learning);
}

void RunJudge::State::WatchRate(const StepSample& sample) {
  const double now = sample.scalar(SignalId::kLearningRate);
  if (!std::isfinite(now) || now <= 0) return;
  if (now > rate_most) {
    rate_most = now;
    rate_rose_step = sample.step;
  }
  const double factor = options.context.rate_factor;
  if (rate > 0 && (now >= rate * factor || now <= rate / factor)) {
    rate_before = rate;
    rate_step = sample.step;
    changes.Announce({.kind = EventKind::kLearningRate, .step = sample.step, .from = rate, .to = now}, loss.highest(),
                     course(), options.context.settle_steps);
  }
  rate = now;
}

std::optional<AnnouncedChange> RunJudge::State::RiseOfRate(int64_t step, int64_t within) const {
  if (rate_step < 0 || !(rate > rate_before) || step < rate_step || step > rate_step + within) {
    return std::nullopt;
  }
  return AnnouncedChange{.kind = EventKind::kLearningRate, .step = rate_step, .from = rate_before, .to = rate};
}

bool RunJudge::State::ReadChange(const RunEvent& event, AnnouncedChange* change) {
  *change = {.kind = event.kind, .step = event.step};
  if (std::isfinite(event.value) && event.value > 0) change->to = event.value;
  if (event.kind == EventKind::kRestore && !std::isfinite(change->to) && event.attempt > attempt) {
    change->to = static_cast<double>(event.step);
  }
  if (event.kind != EventKind::kLearningRate) return true;
  const auto differs = [&](double from) {
    const double factor = options.context.rate_factor;
    return change->to >= from * factor || change->to <= from / factor;
  };
  const bool known = std::isfinite(change->to);
  // The samples of the jump, or another rank's word, may have come before it.
  const bool lately = rate_step >= 0 && rate_step + options.context.settle_steps >= event.step;
  const bool jumps = known && rate > 0 && differs(rate);
  const bool told_again =
      !jumps && rate_before > 0 && (known ? lately && differs(rate_before) : rate_step >= event.step);
  const double from = told_again ? rate_before : rate;
  if (from > 0) change->from = from;
  // A schedule may tell each of its steps.
  if (known && rate > 0 && !jumps && !told_again) return false;
  if (jumps) {
    rate_before = rate;
    rate_step = event.step;
  }
  if (known) rate = change->to;
  return true;
}

void RunJudge::State::CountExcused(int64_t step) {
  if (last_step < 0) return;
  const int64_t excused = std::clamp<int64_t>(excused_until - last_step, 0, step - last_step);
  const int64_t judged = step - last_step - excused;
  excused_halves = std::max<int64_t>(0, excused_halves + 2 * excused - judged);
}

bool RunJudge::State::MayExcuse(int64_t until) const {
  const int64_t from = last_step < 0 ? until - options.context.settle_steps : last_step;
  const int64_t promised = std::max(until, excused_until) - from;
  return excused_halves + 2 * promised <= 2 * kExcusesMax * options.context.settle_steps;
}

void RunJudge::State::Announce(const AnnouncedChange& change, bool meant) {
  const int64_t step = std::max(change.step, last_step);
  const bool risen = changes.Announce(change, loss.highest(), course(), options.context.settle_steps);
  learning.Excuse();
  if (meant) optimizer.Excuse();
  if (change.kind == EventKind::kRestore) {
    corruption.Forget();
    growth.Rewind();
    start.End();
  }
  // A learning rate has no reason to move the level; what has risen before is not excused.
  if (change.kind == EventKind::kRestore || (change.kind != EventKind::kLearningRate && !turn.holds())) turn.Forget();
  if (change.kind == EventKind::kRestore || (change.kind != EventKind::kLearningRate && !jump.holds())) jump.Forget();
  const int64_t until = step + options.context.settle_steps;
  if (!MayExcuse(until)) return;
  excused_until = std::max(excused_until, until);
  excused_from = step;
  excused_samples = kExcusedSamplesLeast;
  loss.Excuse(risen || change.kind != EventKind::kRestore);
  user.Excuse();
  own.Forget();
  experts.Forget();
}

void RunJudge::State::BeginRepairs(int64_t step, std::vector<AlertTransition>* out) {
  alerts.BeginRepair(Family::kRounding, step, run, out);
  for (size_t i = 0; i < user.size(); ++i) {
    if (user.rule(i).rounding_only) alerts.BeginRepairOfRule(i, step, run, out);
  }
}

void RunJudge::State::CollectHeads(Family family, int64_t step, const std::vector<Finding>& findings) {
  if (findings.empty() && !heads.SeesGrowth()) return alerts.CouldNotLook(family, step);
  alerts.Collect(family, findings);
}

RunJudge::RunJudge(const JudgeOptions& options, const RunDescription& run, DetectorBank* bank)
    : state_(std::make_unique<State>(options, run, bank != nullptr ? bank : CpuDetectorBank())) {}
RunJudge::~RunJudge() = default;

void RunJudge::State::JudgeNonfinite(const StepSample& sample) {
  // What spoiled the weights in a step before shows everywhere.
  const bool weights_were_finite = finite_step >= 0 && finite_step == sample.step - 1;
  Nonfinite found = FindNonfinite(sample, weights_were_finite);
  if (std::isfinite(sample.scalar(SignalId::kGradNorm))) finite_step = sample.step;
  const auto count = [](bool bad, bool told, int32_t* in_a_row) {
    if (bad) {
      *in_a_row = std::min(*in_a_row + 1, kOverflowsMax + 1);
    } else if (told) {
      *in_a_row = 0;
    }
  };
  const bool gradients = found.backward || found.grad_norm;
  const bool told =
      sample.has(SignalId::kKeyGradientSum) || sample.has(SignalId::kDqNonfinite) || sample.has(SignalId::kGradNorm);
  count(gradients, told, &bad_gradients);
  count(found.forward || found.loss, sample.has(SignalId::kLoss), &bad_losses);
  // In fp16 a loss scaler skips a step that overflowed, and the weights stay as
  // they were.  Where nothing skips it the next losses are lost, too.
  const bool may_be_skipped = run.attention.score_dtype == "fp16" && !found.weights;
  const bool skipped = may_be_skipped && bad_losses <= kLostLossesMax && bad_gradients <= kOverflowsMax;
  for (Finding& finding : found.findings) {
    if (finding.severity == Severity::kInfo) continue;  // A measurement that overflows, whatever is skipped.
    const bool norm_alone = finding.where.layer < 0 && finding.facts[0].signal == FindSignal(SignalId::kGradNorm)->name;
    finding.severity = norm_alone ? Severity::kWarning : Severity::kCritical;
    if (skipped) {
      finding.severity = Severity::kInfo;
      finding.stage = 0;
    } else if (may_be_skipped && !found.forward && !found.loss) {
      finding.severity = Severity::kWarning;
    }
  }
  // What fp16 cannot hold overflows in a kernel that is right.
  if (found.kernel && run.attention.score_dtype != "fp16" && found.findings[0].severity == Severity::kCritical) {
    Finding& first = found.findings[0];
    if (!run.attention.kernel.empty()) absl::StrAppend(&first.summary, "; the kernel: ", run.attention.kernel);
    first.cause = CauseOf(Family::kKernel, found.findings);
    first.advice = absl::StrCat("Stop. ", AdviceText(Family::kKernel, run, {}, sample.step));
  }
  // The step was taken, so nothing has skipped it.
  if (std::optional<Finding> bad = FindNonfiniteTensors(sample, tensor_names())) {
    bad->severity = Severity::kCritical;
    // What follows from the scores, the loss or a head says less than they do.
    bad->score = found.forward || found.loss || found.backward ? -1 : 0.5;
    found.findings.push_back(std::move(*bad));
  }
  alerts.Collect(Family::kNonfinite, found.findings);
}

void RunJudge::State::JudgeKernel(const StepSample& sample) {
  // A sample without its sums shows nothing: no end of an alert either.
  if (!laws.Observe(sample, run.attention) || !on(Builtin::kKernel)) return;
  alerts.Collect(Family::kKernel, *laws.findings());
}

void RunJudge::State::JudgeArithmetic(const StepSample& sample) {
  if (!arithmetic.Observe(sample, rows == nullptr ? nullptr : &rows->modules) || !on(Builtin::kArithmetic)) return;
  // Other layers that are right are no sign that the wrong one is.
  if (arithmetic.findings()->empty() && arithmetic.any_wrong()) return;
  alerts.Collect(Family::kArithmetic, *arithmetic.findings());
}

void RunJudge::State::JudgeOwn(const StepSample& sample) {
  const OwnWatch::Context context{.pasts = on(Builtin::kOwnPast),
                                  .warming = warms_up(sample.step),
                                  .excused = sample.step < excused_until,
                                  .quiet_steps = options.alert.resolve_steps};
  // A sample without own values is no sign that they are right.
  if (!own.Observe(sample, rows.get(), context) || !on(Builtin::kOwn)) return;
  alerts.Collect(Family::kOwn, *own.findings());
}

void RunJudge::State::JudgeFrozen(const StepSample& sample) {
  if (!frozen.Observe(sample, tensor_names()) || !on(Builtin::kFrozen)) return;
  alerts.Collect(Family::kFrozen, *frozen.findings());
}

void RunJudge::State::JudgeExperts(const StepSample& sample) {
  if (sample.step < excused_until) return alerts.CouldNotLook(Family::kExperts, sample.step);
  const bool warming = warms_up(sample.step);
  if (!experts.Observe(sample, options.alert.resolve_steps, warming) || !on(Builtin::kExperts)) return;
  alerts.Collect(Family::kExperts, *experts.findings());
}

void RunJudge::State::JudgeSequences(const StepSample& sample) {
  const SequenceWatch::Context context{.excused = sample.step < excused_until,
                                       .quiet_steps = options.alert.resolve_steps,
                                       .rate_rose = RiseOfRate(sample.step, kRateJumps).has_value()};
  if (context.excused) alerts.CouldNotLook(Family::kSequences, sample.step);
  if (!sequences.Observe(sample, context) || !on(Builtin::kSequences)) return;
  alerts.Collect(Family::kSequences, *sequences.findings());
}

void RunJudge::State::JudgeParameters(const StepSample& sample) {
  const bool warming = warms_up(sample.step), excused = sample.step < excused_until;
  if (warming || excused) alerts.CouldNotLook(Family::kParameters, sample.step);
  const int64_t quiet = options.alert.resolve_steps;
  const bool grown =
      growth.Observe(sample, tensor_names(), {.warming = warming, .excused = excused, .quiet_steps = quiet});
  std::vector<Finding> findings;
  bool looked = grown | scales.Observe(sample, module_names(), quiet);
  if (!warming) {
    looked |= parameters.Observe(sample, tensor_names(), {.excused = excused, .quiet_steps = quiet});
    looked |= lags.Observe(sample, {.excused = excused, .quiet_steps = quiet});
    findings = std::move(*parameters.findings());
    lags.AddTo(&findings);
  }
  growth.AddTo(&findings);
  scales.AddTo(&findings);
  if (!looked || !on(Builtin::kParameters)) return;
  // In the first steps only growth and scales are looked for: nothing else is known to be over.
  if (findings.empty() && warming) return;
  alerts.Collect(Family::kParameters, findings);
}

void RunJudge::State::JudgeCorruption(const StepSample& sample) {
  if (!corruption.Observe(sample, tensor_names()) || !on(Builtin::kCorruption)) return;
  alerts.Collect(Family::kCorruption, *corruption.findings());
}

void RunJudge::State::JudgeLearning(const StepSample& sample) {
  // Where scores or weights explode, the gradient norm does so before the loss, and comes back: no wrong scale.
  const bool explodes =
      alerts.firing(Family::kLogits) || alerts.firing(Family::kRounding) || alerts.firing(Family::kCorruption);
  optimizer.Observe(sample, tensor_names());
  if (!learning.Observe(sample, explodes, optimizer.lags()) || !on(Builtin::kLearning)) return;
  std::move(optimizer.findings()->begin(), optimizer.findings()->end(), std::back_inserter(*learning.findings()));
  alerts.Collect(Family::kLearning, *learning.findings());
}

void RunJudge::State::JudgeSilence(const StepSample& sample, std::vector<AlertTransition>* out) {
  silence.Observe(sample);
  // Of ranks OnSilence() tells, and what they would report is silent with them.
  if (silent_ranks > 0 || !on(Builtin::kSilent)) return;
  const std::vector<Finding> findings = silence.Find(tensor_names());
  if (!findings.empty()) {
    alerts.Collect(Family::kSilent, findings);
  } else if (alerts.firing(Family::kSilent)) {
    alerts.Resolve(Family::kSilent, sample.step, run, "all that was silent reports again", out);
  }
}

// Copies of a tensor that differ.  A tensor has two sums, of which both or one may differ.
void RunJudge::State::JudgeReplicas(const StepSample& sample, std::vector<Finding>* findings) const {
  std::map<int32_t, const StepSample::Disagreement*> tensors;
  for (const StepSample::Disagreement& disagreement : sample.disagreements) {
    if (FindSignal(disagreement.signal)->granularity == Granularity::kTensor) {
      tensors.try_emplace(disagreement.layer, &disagreement);
    }
  }
  if (tensors.empty()) return;
  const auto name = [this](int32_t row) { return NameOr("tensor", tensor_names(), static_cast<size_t>(row)); };
  const auto& [row, first] = *tensors.begin();
  Finding finding = Finding::OfRun(Rule::kDisagreement, Severity::kCritical,
                                   {.signal = FindSignal(first->signal)->name,
                                    .value = first->high,
                                    .threshold = first->low,
                                    .first_step = sample.step,
                                    .detector = "equal"});
  for (const uint32_t rank : DifferingRanks(*first)) {
    finding.Add(
        {.signal = kDifferingRank, .value = static_cast<double>(rank), .first_step = sample.step, .detector = "equal"});
  }
  finding.score = std::numeric_limits<double>::infinity();  // What heads have differs because tensors do.
  finding.summary =
      absl::StrCat("the copies of ", name(row), " differ at step ", sample.step, ": ", RanksThatDiffer(*first));
  if (tensors.size() > 1) absl::StrAppend(&finding.summary, "; so do those of ", tensors.size() - 1, " more tensors");
  constexpr size_t kNamesMax = 8;
  std::vector<std::string> names;
  for (const auto& [tensor, disagreement] : tensors) {
    if (names.size() == kNamesMax) break;
    names.push_back(name(tensor));
  }
  finding.note = absl::StrCat(absl::StrJoin(names, ", "), tensors.size() > names.size() ? ", ..." : "");
  finding.where.layer = LayerOf(name(row));
  for (const auto& [tensor, disagreement] : tensors) {
    if (LayerOf(name(tensor)) != finding.where.layer) finding.where.layer = -1;
  }
  findings->push_back(std::move(finding));
}

void RunJudge::State::JudgeDisagreements(const StepSample& sample) {
  std::vector<Finding> findings;
  JudgeReplicas(sample, &findings);
  for (const StepSample::Disagreement& disagreement : sample.disagreements) {
    if (!OfHeads(FindSignal(disagreement.signal)->granularity)) continue;
    Finding& finding = findings.emplace_back();
    finding.rule = Rule::kDisagreement;
    finding.severity = Severity::kCritical;
    finding.where = {disagreement.layer, disagreement.head};
    finding.first_step = sample.step;
    finding.score = disagreement.high - disagreement.low;
    finding.Add({.signal = FindSignal(disagreement.signal)->name,
                 .where = finding.where,
                 .value = disagreement.high,
                 .threshold = disagreement.low,
                 .first_step = sample.step,
                 .detector = "equal"});
  }
  if (sample.disagreements_left_out > 0) {
    const auto worst = std::max_element(findings.begin(), findings.end(),
                                        [](const Finding& a, const Finding& b) { return a.score < b.score; });
    if (worst != findings.end()) {
      worst->note = std::to_string(sample.disagreements_left_out) + " values of further heads differ, too";
    }
  }
  alerts.Collect(Family::kDisagreement, findings);
}

void RunJudge::State::JudgeOverhead(const StepSample& sample) {
  const float hook = sample.scalar(SignalId::kHookSeconds);
  const float step = sample.scalar(SignalId::kStepSeconds);
  if (IsNotMeasured(hook) || IsNotMeasured(step) || !(step > 0)) return;
  const double share = hook / step;
  std::vector<Finding> findings;
  if (share > options.alert.hook_overhead_max) {
    if (overhead_since < 0) overhead_since = sample.step;
    if (sample.step - overhead_since >= options.alert.hook_overhead_steps) {
      Finding& finding = findings.emplace_back();
      finding.rule = Rule::kOverhead;
      finding.severity = Severity::kWarning;
      finding.first_step = overhead_since;
      finding.Add({.signal = "hook_overhead",
                   .value = share,
                   .threshold = options.alert.hook_overhead_max,
                   .first_step = overhead_since,
                   .detector = "level"});
    }
  } else {
    overhead_since = -1;
  }
  alerts.Collect(Family::kOverhead, findings);
}

void RunJudge::State::ObserveJump(const StepSample& sample) {
  // What comes back after it is no jump.
  if (sequences.nothing_to_learn() || (sequences.bad_data_ended() && !jump.holds())) return jump.Forget();
  const float same = sample.scalar(SignalId::kLossRepeatedTokens), labels = sample.scalar(SignalId::kLossTokens);
  const bool known = same >= 0 && labels > 0;
  jump.Observe(sample.step, sample.scalar(SignalId::kLoss),
               known ? same / labels : std::numeric_limits<float>::quiet_NaN(), !sequences.bad_data());
}

void RunJudge::Observe(const StepSample& sample, std::vector<AlertTransition>* out) {
  State& s = *state_;
  if (sample.attempt < s.attempt) return;
  if (sample.attempt > s.attempt) {
    s.attempt = sample.attempt;
    s.run.attempt = sample.attempt;
    s.last_step = -1;
    s.rate_step = -1;
    s.finite_step = -1;
    s.loss.Excuse(s.changes.Rewind(sample.step, s.loss.highest(), s.course()));
    s.turn.Forget();
    s.start.End();
    s.jump.Forget();
    s.heads.Rewind();
    s.arithmetic.Rewind();
    s.own.Rewind();
    s.frozen.Rewind();
    s.experts.Rewind();
    s.sequences.Rewind();
    s.parameters.Rewind();
    s.lags.Rewind();
    s.growth.Rewind();
    s.scales.Rewind();
    s.corruption.Forget();
    s.learning.Forget();
    s.optimizer.Forget();
    s.silence.Forget();
    s.user.Forget();
    s.ahead.clear();
    // Not what was announced behind the checkpoint.
    s.excused_until = sample.step + s.options.context.settle_steps;
    s.excused_samples = 0;
  }
  if (sample.step <= s.last_step) return;
  std::erase_if(s.ahead, [&](const AnnouncedChange& change) {
    if (change.step > sample.step) return false;
    s.Announce(change, /*meant=*/true);
    return true;
  });
  if (s.excused_samples > 0 && sample.step >= s.excused_from) {
    --s.excused_samples;
    s.excused_until = std::max(s.excused_until, sample.step + 1);
  }
  s.CountExcused(sample.step);
  s.last_step = sample.step;
  if (s.first_step < 0) s.first_step = sample.step;
  s.pace.Observe(sample);
  s.alerts.SetStepSeconds(s.pace.seconds());
  s.SetSpans();

  if (s.on(Builtin::kNonfinite)) s.JudgeNonfinite(sample);
  s.JudgeKernel(sample);
  s.JudgeArithmetic(sample);
  s.JudgeOwn(sample);
  s.JudgeFrozen(sample);
  s.JudgeExperts(sample);
  s.JudgeSequences(sample);
  s.JudgeParameters(sample);
  s.JudgeCorruption(sample);
  s.JudgeLearning(sample);
  s.JudgeSilence(sample, out);
  if (s.on(Builtin::kDisagreement)) s.JudgeDisagreements(sample);
  if (s.on(Builtin::kOverhead)) s.JudgeOverhead(sample);
  const float loss = sample.scalar(SignalId::kLoss);
  const float gradient = sample.scalar(SignalId::kGradNorm);
  // Loss and gradient norm are held against what came before, from the first step on.
  const bool changed = sample.step < s.excused_until;
  const bool excused = s.excuses_trends(sample.step);
  s.WatchRate(sample);
  s.loss.ObserveLoss(sample.step, loss);  // Ignores what is not finite.
  s.loss.ObserveGradient(sample.step, gradient);
  s.turn.Observe(sample.step, loss);
  s.start.Observe(sample, s.optimizer.no_warmup());
  s.ObserveJump(sample);
  s.changes.Observe(sample.step, loss);
  s.alerts.SetLossNormal(s.on(Builtin::kLoss) && std::isfinite(loss) && s.loss.highest() > 0 &&
                         s.loss.off_course_since() < 0);
  // A state is told in any case; that something is not found only where it was looked for.
  const auto update = [&](Family family, std::vector<Finding>* found) {
    if (!changed || !found->empty()) s.alerts.Collect(family, *found);
  };
  std::vector<Finding> of_run;
  if (s.on(Builtin::kLoss)) s.changes.Find(sample.step, &of_run);
  if (of_run.empty() && s.on(Builtin::kLoss)) {
    s.loss.FindLoss(sample.step, changed, &of_run);
    const std::optional<AnnouncedChange> rise = s.RiseOfRate(s.turn.since(), s.options.context.settle_steps);
    s.turn.Find(rise ? &*rise : nullptr, &of_run);
    // A jump may be placed some steps early.
    if (!s.RiseOfRate(s.jump.since() + kJumpPlaced, kRateJumps)) {
      s.jump.Find(&of_run);
      s.jump.Name(&of_run);
    }
    if (of_run.empty()) s.start.Find(&of_run);
  }
  update(Family::kLoss, &of_run);
  of_run.clear();
  if (!changed && s.on(Builtin::kGradient)) s.loss.FindGradient(sample.step, &of_run);
  // Bad batches make gradients that no moments expect.
  if (s.on(Builtin::kLearning) && !s.sequences.bad_data()) s.optimizer.NameJump(&of_run);
  update(Family::kGradient, &of_run);
  bool ticked = false;
  if (s.heads.Add(sample)) {
    s.heads.Tick(s.run.attention, excused, s.forms(sample.step), s.alerts.under_repair(Family::kRounding));
    if (s.on(Builtin::kKernel)) s.laws.AddEvidence(s.heads.rounding());
    if (s.on(Builtin::kCorruption)) {
      // What the heads of a spoilt layer show follows from it, and no repair of attention helps.
      for (std::vector<Finding>* const found : {s.heads.rounding(), s.heads.logits()}) {
        std::erase_if(*found,
                      [&s](const Finding& f) { return f.where.layer >= 0 && s.corruption.spoils(f.where.layer); });
      }
    }
    if (!excused) {
      s.CollectHeads(Family::kRounding, sample.step, *s.heads.rounding());
      s.CollectHeads(Family::kLogits, sample.step, *s.heads.logits());
      ticked = true;
    } else {
      // States alone: that a trend is not found says nothing now.
      for (const auto& [family, found] :
           {std::pair(Family::kRounding, s.heads.rounding()), std::pair(Family::kLogits, s.heads.logits())}) {
        if (!found->empty()) s.alerts.Collect(family, *found);
      }
    }
  }
  s.alerts.Flush(sample.step, s.run, out);
  if (ticked) {
    s.alerts.ResolveRepaired(
        sample.step, s.run,
        [&s](const std::vector<Head>& heads, int64_t steps) { return s.heads.StandStill(heads, steps); }, out);
  }
  s.user.SetRows(s.rows.get());
  s.user.Observe(sample, s.run.attention, excused, [&](size_t rule, std::vector<Finding>* findings) {
    s.alerts.UpdateRule(rule, sample.step, s.run, *findings, out);
  });
}

void RunJudge::OnEvent(const RunEvent& event, std::vector<AlertTransition>* out) {
  State& s = *state_;
  const int64_t step = std::max(event.step, s.last_step);
  switch (event.kind) {
    case EventKind::kCentringOn:
      s.run.attention.centred = true;
      s.ForgetTrends();
      s.BeginRepairs(step, out);
      break;
    case EventKind::kCentringOff:
      s.run.attention.centred = false;
      s.ForgetTrends();
      s.alerts.EndRepairs(step);
      break;
    case EventKind::kAttentionMode:
      s.run.attention.kernel = event.text;
      s.ForgetTrends();
      break;
    case EventKind::kLearningRate:
    case EventKind::kRestore:
    case EventKind::kData:
    case EventKind::kBatchSize:
    case EventKind::kSequenceLength:
      if (AnnouncedChange change; s.ReadChange(event, &change)) {
        const bool far_ahead = s.last_step >= 0 && event.attempt <= s.attempt &&
                               change.step > s.last_step + s.options.context.settle_steps;
        if (!far_ahead) {
          s.Announce(change, /*meant=*/!event.text.starts_with(kSeenByHook));
        } else if (s.ahead.size() < kChangesAheadMax) {
          s.ahead.push_back(change);
        }
      }
      break;
    default:
      s.sequences.OnEvent(event);
      break;
  }
}

void RunJudge::OnHello(const RunDescription& run, std::vector<AlertTransition>* out) {
  State& s = *state_;
  const bool centred_before = s.run.attention.centred;
  const bool changed = centred_before != run.attention.centred || s.run.attention.kernel != run.attention.kernel ||
                       s.run.attention.score_dtype != run.attention.score_dtype;
  const Layout layout = s.run.layout;
  s.run = run;
  s.run.layout = layout;  // The store refuses a run that changes its layout.
  if (!changed) return;
  s.ForgetTrends();
  const int64_t step = std::max<int64_t>(s.last_step, 0);
  if (run.attention.centred && !centred_before) s.BeginRepairs(step, out);
  if (!run.attention.centred && centred_before) s.alerts.EndRepairs(step);
}

uint64_t RunJudge::rule_rows_left_out() const { return state_->user.rows_left_out() + state_->own.cells_left_out(); }
void RunJudge::SetRows(std::shared_ptr<const RunRows> rows) { state_->rows = std::move(rows); }

void RunJudge::OnSilence(uint32_t silent_ranks, int64_t silent_seconds, std::vector<AlertTransition>* out) {
  State& s = *state_;
  const int64_t step = std::max<int64_t>(s.last_step, 0);
  const bool on = s.on(Builtin::kSilent);
  s.silent_ranks = silent_ranks;
  if (silent_ranks == 0 || !on) {
    s.alerts.Resolve(Family::kSilent, step, s.run, on ? "all ranks report again" : "silence is no longer judged", out);
    return;
  }
  std::vector<Finding> findings(1);
  findings[0].rule = Rule::kSilent;
  findings[0].severity = silent_ranks >= s.run.reporters ? Severity::kCritical : Severity::kWarning;
  findings[0].first_step = step;
  findings[0].Add({.signal = "silent_ranks",
                   .value = static_cast<double>(silent_ranks),
                   .first_step = step,
                   .detector = "dead-man"});
  findings[0].note = std::to_string(silent_ranks) + " of " + std::to_string(s.run.reporters) +
                     " reporters silent for " + std::to_string(silent_seconds) + " s";
  s.alerts.Update(Family::kSilent, step, s.run, findings, out);
}

void RunJudge::SetOptions(const JudgeOptions& given, std::vector<AlertTransition>* out) {
  State& s = *state_;
  const int64_t step = std::max<int64_t>(s.last_step, 0);
  s.given = given;
  s.shorter = s.Shorter();
  const JudgeOptions options = WithShorterSpans(given, s.shorter);
  UserRules user(given, s.run.layout);
  const std::vector<int> from = user.TakeOver(&s.user);
  for (size_t i = 0; i < s.user.size(); ++i) {
    if (std::find(from.begin(), from.end(), static_cast<int>(i)) == from.end())
      s.alerts.ResolveRule(i, step, s.run, "the rule was changed or removed", out);
  }
  s.user = std::move(user);
  s.alerts.SetRules(options.rules, from);
  s.options = options;
  s.HandOut();
  // What a family's alert can come from; without any of it, it ends.
  const std::pair<Family, std::vector<Builtin>> sources[] = {
      {Family::kRounding, {Builtin::kDrift, Builtin::kTies, Builtin::kNorm}},
      {Family::kLogits, {Builtin::kLogits}},
      {Family::kLoss, {Builtin::kLoss}},
      {Family::kGradient, {Builtin::kGradient}},
      {Family::kNonfinite, {Builtin::kNonfinite}},
      {Family::kDisagreement, {Builtin::kDisagreement}},
      {Family::kSilent, {Builtin::kSilent}},
      {Family::kOverhead, {Builtin::kOverhead}},
      {Family::kKernel, {Builtin::kKernel}},
      {Family::kArithmetic, {Builtin::kArithmetic}},
      {Family::kOwn, {Builtin::kOwn}},
      {Family::kFrozen, {Builtin::kFrozen}},
      {Family::kExperts, {Builtin::kExperts}},
      {Family::kSequences, {Builtin::kSequences}},
      {Family::kParameters, {Builtin::kParameters}},
      {Family::kCorruption, {Builtin::kCorruption}},
      {Family::kLearning, {Builtin::kLearning}},
  };
  for (const auto& [family, rules] : sources) {
    if (std::none_of(rules.begin(), rules.end(), [&](Builtin rule) { return s.on(rule); }))
      s.alerts.Resolve(family, step, s.run, "the rule was switched off", out);
  }
}

int32_t RunJudge::stage() const { return std::max(state_->heads.stage(), state_->alerts.stage()); }
Eta RunJudge::eta() const { return state_->alerts.eta(state_->last_step); }
int32_t RunJudge::stage_of(int32_t layer, int32_t head) const {
  const Layout& layout = state_->run.layout;
  if (layer < 0 || layer >= layout.layers || head < 0 || head >= layout.heads) return 0;
  return state_->heads.stage_of(static_cast<size_t>(layer) * static_cast<size_t>(layout.heads) +
                                static_cast<size_t>(head));
}
uint32_t RunJudge::alerts_firing() const { return state_->alerts.alerts_firing(); }
size_t RunJudge::memory_bytes() const {
  return sizeof(State) + state_->heads.memory_bytes() + state_->user.memory_bytes() + state_->own.memory_bytes() +
         state_->frozen.memory_bytes() + state_->experts.memory_bytes() + state_->parameters.memory_bytes() +
         state_->corruption.memory_bytes() + state_->learning.memory_bytes() + state_->growth.memory_bytes() +
         state_->scales.memory_bytes() + state_->sequences.memory_bytes() + state_->jump.memory_bytes() +
         state_->start.memory_bytes() + state_->silence.memory_bytes();
}

std::string RunJudge::Save() const {
  std::string out;
  StateWriter writer(&out);
  State& s = *state_;
  writer(kSilenceMagic);
  writer(s.run.layout.layers);
  writer(s.run.layout.heads);
  writer(s.run.layout.kv_heads);
  // First: a key must not be given twice, also where the rest cannot be read.
  std::vector<uint32_t> numbers = s.alerts.numbered();
  writer(numbers);
  writer(s);
  s.alerts.VisitTold(writer);
  // By itself: it is only of use to the same rules.
  writer(s.user_rules_fingerprint());
  std::string of_rules;
  StateWriter rules_writer(&of_rules);
  s.VisitUserRules(rules_writer);
  s.alerts.VisitToldOfRules(rules_writer);
  s.alerts.VisitSignsOfRules(rules_writer);
  writer(of_rules);
  s.VisitKept(writer);
  s.VisitExcuses(writer);
  s.VisitLaws(writer);
  s.VisitArithmetic(writer);
  s.VisitOwn(writer);
  s.VisitTensors(writer);
  s.VisitExperts(writer);
  s.VisitPasts(writer);
  writer(s.lags);
  s.VisitCauses(writer);
  const uint32_t families = s.alerts.went_back();
  writer(families);
  s.VisitLater(writer);
  writer(s.turn);
  s.alerts.VisitSigns(writer);
  s.VisitSteps(writer);
  s.VisitGrowth(writer);
  s.VisitBatches(writer);
  writer(s.scales);
  s.VisitPace(writer);
  writer(s.start);
  s.VisitSilence(writer);
  return out;
}

bool RunJudge::Restore(std::string_view saved) {
  const RunDescription description = state_->run;
  const JudgeOptions options = state_->given;
  DetectorBank* const bank = state_->bank;
  const std::shared_ptr<const RunRows> rows = state_->rows;
  auto fresh = std::make_unique<State>(options, description, bank);
  fresh->rows = rows;
  StateReader reader(saved);
  uint32_t magic = 0;
  Layout layout;
  reader(magic);
  reader(layout.layers);
  reader(layout.heads);
  reader(layout.kv_heads);
  const bool silence = magic == kSilenceMagic;
  const bool start = magic == kStartMagic || silence;
  const bool of_scales = magic == kScalesMagic || start;
  const bool batches = magic == kBatchesMagic || of_scales;
  const bool growth = magic == kGrowthMagic || batches;
  const bool steps = magic == kStepsMagic || growth;
  const bool signs = magic == kSignsMagic || steps;
  const bool causes = magic == kCausesMagic || signs;
  const bool lags = magic == kLagsMagic || causes;
  const bool pasts = magic == kPastsMagic || lags;
  const bool experts = magic == kExpertsMagic || pasts;
  const bool tensors = magic == kTensorsMagic || experts;
  const bool own = magic == kOwnMagic || tensors;
  const bool layers = magic == kLayersMagic || own;
  const bool laws = magic == kLawsMagic || layers;
  const bool excuses = magic == kExcusesMagic || laws;
  const bool kept = magic == kKeptMagic || excuses;
  const bool numbered = magic == kNumberedMagic || kept;
  const bool fits = (magic == kStateMagic || numbered) && layout.layers == description.layout.layers &&
                    layout.heads == description.layout.heads && layout.kv_heads == description.layout.kv_heads;
  std::vector<uint32_t> numbers;
  if (fits && numbered) {
    reader(numbers);
    if (!reader.ok()) numbers.clear();
    fresh->alerts.SetNumbered(numbers);
  }
  const auto begin_afresh = [&] {
    state_ = std::make_unique<State>(options, description, bank);
    state_->rows = rows;
    state_->alerts.SetNumbered(numbers);
    return false;
  };
  if (fits) reader(*fresh);
  if (fits && numbered) fresh->alerts.VisitTold(reader);
  // A judge of before there were rules of people's own saved nothing of them.
  uint64_t fingerprint = 0;
  std::string of_rules;
  if (fits && reader.ok() && !reader.at_end()) {
    reader(fingerprint);
    reader(of_rules);
  }
  if (fits && kept) fresh->VisitKept(reader);
  if (fits && excuses) fresh->VisitExcuses(reader);
  if (fits && laws) fresh->VisitLaws(reader);
  if (fits && layers) fresh->VisitArithmetic(reader);
  if (fits && own) fresh->VisitOwn(reader);
  if (fits && tensors) fresh->VisitTensors(reader);
  if (fits && experts) fresh->VisitExperts(reader);
  if (fits && pasts) fresh->VisitPasts(reader);
  if (fits && lags) reader(fresh->lags);
  if (fits && causes) fresh->VisitCauses(reader);
  uint32_t went_back = 0;
  if (fits && reader.ok() && !reader.at_end()) reader(went_back);
  if (fits && reader.ok() && !reader.at_end()) fresh->VisitLater(reader);
  if (fits && signs) {
    reader(fresh->turn);
    fresh->alerts.VisitSigns(reader);
  }
  if (fits && steps) fresh->VisitSteps(reader);
  if (fits && growth) fresh->VisitGrowth(reader);
  if (fits && batches) fresh->VisitBatches(reader);
  if (fits && of_scales) reader(fresh->scales);
  if (fits && of_scales) fresh->VisitPace(reader);
  if (fits && !of_scales) fresh->heads.ForgetHowFound();
  if (fits && start) {
    reader(fresh->start);
  } else {
    fresh->start.End();
  }
  if (fits && silence) fresh->VisitSilence(reader);
  if (!fits || !reader.at_end() || !fresh->heads.Consistent() || !fresh->changes.Consistent() ||
      !fresh->laws.Consistent() || !fresh->arithmetic.Consistent() || !fresh->own.Consistent() ||
      !fresh->frozen.Consistent() || !fresh->experts.Consistent() || !fresh->sequences.Consistent() ||
      !fresh->parameters.Consistent() || !fresh->lags.Consistent() || !fresh->growth.Consistent() ||
      !fresh->scales.Consistent() || !fresh->pace.Consistent() || !fresh->corruption.Consistent() ||
      !fresh->learning.Consistent() || !fresh->optimizer.Consistent() || !fresh->turn.Consistent() ||
      !fresh->start.Consistent() || !fresh->silence.Consistent() || !fresh->loss.Consistent() ||
      !fresh->jump.Consistent() || fresh->ahead.size() > kChangesAheadMax)
    return begin_afresh();
  if (fingerprint == fresh->user_rules_fingerprint()) {
    StateReader rules_reader(of_rules);
    fresh->VisitUserRules(rules_reader);
    if (numbered) fresh->alerts.VisitToldOfRules(rules_reader);
    if (signs) fresh->alerts.VisitSignsOfRules(rules_reader);
    if (!rules_reader.at_end() || !fresh->user.Consistent()) return begin_afresh();
  }
  fresh->SetSpans();
  fresh->alerts.SetStepSeconds(fresh->pace.seconds());
  fresh->alerts.MakeSigns(went_back);
  if (!fresh->alerts.Consistent()) return begin_afresh();
  state_ = std::move(fresh);
  return true;
}

}  // namespace bellwether::server
