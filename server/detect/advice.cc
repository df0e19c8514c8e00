#include "server/detect/advice.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {
namespace {

// Which row of a family holds.
enum class Case : uint8_t {
  kRoundingFound,
  kDriftWarning,
  kDriftCritical,
  kNormAlone,
  kMoved,
  kDriftLost,
  kNormLost,
  kLogitsFound,
  kLogits,
  kLogitsLost,
  kLossSpike,
  kLossGone,
  kGradientSpike,
  kGradientHigh,
  kGradientLost,
  kNonfiniteSkipped,
  kNonfiniteWarning,
  kNonfinite,
  kDisagreement,
  kSomeSilent,
  kAllSilent,
  kOverhead,
  kKernel,
  kArithmetic,
  kOwnSpike,
  kOwn,
  kRoundedAway,
  kFrozen,
  kExpertsUnused,
  kExpertsDead,
  kSequencesOnce,
  kSequencesStay,
  kParametersJump,
  kParametersStay,
  kWeightsGrow,
  kScalesDoNotFit,
  kCorruption,
  kCorruptGradient,
  kLearning,
};

constexpr char kGoBack[] = "Stop, or go back to a checkpoint";

struct Row {
  Family family;
  const char* when;
  const char* first;
  const char* then;
};

// In the order of Case.  {repair}, {Repair}, {cost}: what the kernel allows;
// {begin}: the alert's first step; {sigma}: AdviceState::sigma_max.
constexpr Row kRows[] = {
    {Family::kRounding, "information", "Look whether the model was so before this run",
     "The named heads were beyond their thresholds in their first sample, as heads of pretrained models with large "
     "biases are. Then there is nothing to do: they are told as a warning once they have grown "
     "further. If training has made them so before it was watched, resume from an older checkpoint."},
    {Family::kRounding, "stage 1 or 2, warning", "{Repair}",
     "{cost} No work is lost yet: keep training, repair at the next convenient step."},
    {Family::kRounding, "stage 1 or 2, critical", "{Repair}",
     "{cost} The weights have not moved yet, but most rows now push the same way: repair at once."},
    {Family::kRounding, "stage 3 or 4, where scores are fp32 or keys are centred", "Clip the named heads (qk.clip)",
     "Centring does not help here, or is on already. A lower learning rate or weight decay keeps the norm down. Keep a "
     "checkpoint from "
     "before {begin}."},
    {Family::kRounding, "stage 3 or 4, else", "Save a checkpoint, then {repair}",
     "That stops the push. {cost} qk.clip on the named heads brings sigma back. Keep a checkpoint from before "
     "{begin}."},
    {Family::kRounding, "stage 5, or sigma(W_Q) above {sigma}", kGoBack,
     "Take the newest one from before {begin}. Before you resume, {repair}: else the same comes again."},
    {Family::kRounding, "the same, where scores are fp32 or keys are centred", kGoBack,
     "Take the newest one from before {begin}. Resume as it is set now, with a lower learning rate or with the named "
     "heads "
     "clipped (qk.clip)."},
    {Family::kLogits, "information", "Look whether the model was so before this run",
     "The scores were as large in the first sample, as those of pretrained models with large biases are. Then there is "
     "nothing to do: they are told as a warning once they have grown further."},
    {Family::kLogits, "stage 4", "Clip the named heads (qk.clip)",
     "It rescales W_Q and W_K. This is true logit growth: centring does not help. A lower learning rate, weight decay "
     "or QK-norm prevents it."},
    {Family::kLogits, "stage 5", kGoBack,
     "Take the newest one from before {begin}. Resume with a lower learning rate, or clip the named heads (qk.clip). "
     "This is true logit growth: centring does not help."},
    {Family::kLoss, "information", "One spike; nothing to do unless it returns", ""},
    {Family::kLoss, "warning or critical", kGoBack,
     "Take the newest one from before {begin}. Do what the run's attention alert advises, then resume. Without such an "
     "alert undo what was changed just before, or suspect the data or the learning rate of these steps."},
    {Family::kGradient, "information", "One spike; nothing to do unless it stays", ""},
    {Family::kGradient, "warning", "Check the learning rate and the data of these steps",
     "The gradient norm stays far above its past. With an attention alert of the same run act on that one."},
    {Family::kGradient, "stage 5", kGoBack,
     "The loss has left its course, too. Take the newest one from before {begin}, then check the learning rate and the "
     "data of these steps."},
    {Family::kNonfinite, "information", "Nothing to do unless it goes on",
     "With fp16 a loss scaler skips a step that overflowed and takes a smaller factor. It is told again, and worse, if "
     "it goes on."},
    {Family::kNonfinite, "warning", "See whether these steps are skipped",
     "With fp16 a loss scaler that skips them finds no factor, and nothing is learned: look at its factor, and at the "
     "gradients of the named heads. If they are not skipped, keep no checkpoint from after {begin}."},
    {Family::kNonfinite, "critical", kGoBack,
     "Take the last one from before {begin}, and overwrite none. With fp16 look at the loss scale first. If it comes "
     "again at the same step, look at the data of that step."},
    {Family::kDisagreement, "always", "Compare checksums of the weights over the ranks",
     "Copies that must be equal are not, so the run trains several models at once. Either they are not synchronised: "
     "look for a parameter that is outside DistributedDataParallel, for a rank that skips a step, and for a broadcast "
     "that was left out behind a load. Or a device computes wrongly: test that of the odd rank, and drain its host. "
     "Then broadcast the weights and the optimizer's state from one rank, or resume from a checkpoint from before "
     "{begin}."},
    {Family::kSilent, "warning", "Look whether the silent ranks still train",
     "The others' samples are judged meanwhile."},
    {Family::kSilent, "critical", "Look whether the job still runs",
     "All ranks are silent: nothing is judged until one reports again."},
    {Family::kOverhead, "always", "Sample less often",
     "Or choose fewer signals. Training loses that share of its time."},
    {Family::kKernel, "always", "Switch to another kernel of attention",
     "No rounding explains these numbers, whatever the model: what the kernel returned is wrong. "
     "`python -m bellwether doctor --kernels` says which kernels are right on this machine. Another backend of "
     "PyTorch, "
     "another version of the library, or attention.mode = hp replace it. If the same kernel is right on another "
     "machine, test this GPU. Steps since {begin} were trained on wrong numbers: resume from a checkpoint from before "
     "it, if there is one."},
    {Family::kArithmetic, "always", "Test the GPUs, and the kernel of the named layer",
     "No rounding explains these numbers, whatever the model: what the layer computed is wrong. Once and on one "
     "machine "
     "it is a flipped bit or a bad device: drain that host. In every sample and on all machines it is what computes "
     "the layer: a fused operation, a scale of FP8, a sum kept in 16 bits. Replace it by PyTorch's own, or by another "
     "version. Steps since {begin} were trained on wrong numbers: resume from a checkpoint from before it, if there is "
     "one."},
    {Family::kOwn, "information", "Look at the named number; nothing to do unless it stays", ""},
    {Family::kOwn, "warning", "Look at the named number, and at what changed before it",
     "The job logs it itself, and it is not finite, beyond the limit that the job has declared, or has left its own "
     "past to the bad side. If training goes by it, as by a reward, keep a checkpoint from before {begin}. Where it "
     "is meant to be so, change the limit, or switch the rule off: own, or own.past for the past alone."},
    {Family::kFrozen, "information", "Look at the type of the named parameters",
     "A parameter of 16 bits stays as it is where a step changes it by less than half of its last bit. Norms' gains, "
     "which are 1, do so below a learning rate of some 0.002. Keep such parameters in fp32, or a copy of them that the "
     "optimizer changes. If they are fp32 already, they are in no group of the optimizer."},
    {Family::kFrozen, "warning", "Look at the optimizer's groups and their learning rates",
     "Where nothing moves, the learning rate is 0 or the step is skipped: look at the scheduler, and at what decides "
     "whether a step is taken. Where some do not move, they are in no group of an optimizer, or in one with a rate of "
     "0. What shall not train is frozen by requires_grad_(False), and then told no more. What was trained since "
     "{begin} was trained without them."},
    {Family::kExperts, "information", "Look whether the data needs the named experts",
     "They have had tokens in few samples, or in none. In a fine-tune to one kind of text that may be right. In "
     "training from the start they are parameters that nothing trains: raise the weight of the balancing loss, or let "
     "their bias grow."},
    {Family::kExperts, "warning", "Look at the router's balancing loss, its bias and its learning rate",
     "Experts that had tokens get none, or all tokens go to the same few. An expert without tokens has no gradient: "
     "only the balancing loss or the router's bias can bring it back. A z-loss, a lower learning rate for the router "
     "and noise on its logits prevent it, and repair nothing. Resume from a checkpoint from before {begin}, or "
     "initialise the router's rows of the dead experts again."},
    {Family::kSequences, "information", "Look at the named sequences; nothing to do unless they stay",
     "One batch is not what batches were. The event of the step has the ids that the job gave, hashed if not allowed "
     "otherwise: put them on the list of what the data loader skips."},
    {Family::kSequences, "warning", "Look at the data, and at what reads it",
     "Batch after batch is not what it was since {begin}: a damaged file, a reader that repeats one token, labels that "
     "are not shifted. If the data is meant to change, announce it (mon.event)."},
    {Family::kParameters, "information", "Look at the named parameters, and at the batch of that step",
     "A batch may do so for some steps. If all parameters have left their past together, look at what they share: the "
     "scale of the loss, the learning rate, gradients that are not set to zero. A lag of some step alone says that "
     "gradients grew at once: look at the batches since the sample before, and whether the loss follows."},
    {Family::kParameters, "warning", "Look at what trains the named parameters, and at what changed before it",
     "A gradient that stays far above its past is a part of the model that explodes, as a row of an embedding or an "
     "expert. Clipping by the norm of all then makes every other step small. If the gradients of all grow step by "
     "step, `zero_grad()` is missing; if they are far below their past, they are unscaled twice. Update ratios of all "
     "follow the learning rate. Where second moments lag, steps are too large until they have followed: a smaller "
     "beta2 follows sooner, and clipping each parameter's update by its lag bounds the step. Keep a checkpoint from "
     "before {begin}."},
    {Family::kParameters, "residual growth, head growth or logit growth",
     "Look at the weight decay and the learning rate of the named parameters",
     "They grow by the same share in every step, and all others do not: no gradient does that for long. Look at the "
     "sign "
     "of their group's weight decay, at a scale that is applied twice, at hooks and at code that writes into them. "
     "What "
     "they feed grows with them, and the loss follows. Save a checkpoint now and keep one from before {begin}: if they "
     "have grown to twice their size or more, resume from that one."},
    {Family::kParameters, "FP8 saturation", "Look at the scale of the named tensor",
     "It clamps its largest elements, or makes the small ones 0. With delayed scaling, look whether the history of its "
     "largest elements is still written, whether the scale follows it, and whether both were restored with the "
     "checkpoint. `fp8_amax_age` says for how long the scale has been the same. A shorter history or a scale of the "
     "tensor itself follows sooner. If the values are right and too far apart for one scale, scale by rows or blocks, "
     "or keep this layer in 16 bits."},
    {Family::kCorruption, "critical", "Go back to a checkpoint, and test this GPU",
     "A weight has jumped from one sample to the next, and no other: no optimizer does that. It is a flipped bit, a "
     "broken device, or code that wrote into the parameter. Take a checkpoint from before {begin}. Test the memory of "
     "the GPUs that hold the named place, and drain that host if it comes again. No repair of attention helps. If the "
     "job has changed the weight on purpose, announce it as a restore (mon.event)."},
    {Family::kCorruption, "warning", "Look whether the named parameter took that step",
     "One element of a gradient is far beyond all others. Clipping by the norm of all makes every other change of that "
     "step small; without clipping the parameter is lost. Once, and on one machine, it is a flipped bit: test this "
     "GPU. "
     "Keep a checkpoint from before {begin}."},
    {Family::kLearning, "always", "Look at the named number, and at the loop that trains",
     "A constant loss has no labels that count, or the same batch each time. Where weights stand still look at the "
     "scheduler, and at what decides whether the optimizer's step is taken. Where gradients add up call zero_grad() "
     "in each step. Where their scale has changed look at what divides by the loss scale, and how often. What was "
     "trained since {begin} was trained for nothing, or by wrong steps: go back to a checkpoint from before it if the "
     "loss has risen."},
};
static_assert(std::size(kRows) == static_cast<size_t>(Case::kLearning) + 1);

const Row& RowOf(Case which) { return kRows[static_cast<size_t>(which)]; }

bool RoundingPossible(const RunDescription& run) {
  return run.attention.score_dtype != "fp32" && !run.attention.centred;
}

Case CaseOf(Family family, const RunDescription& run, const AdviceState& state) {
  const bool lost = state.stage >= 5;
  const bool critical = state.severity >= Severity::kCritical;
  const bool information = state.severity <= Severity::kInfo;
  switch (family) {
    case Family::kRounding: {
      if (information) return Case::kRoundingFound;
      const bool possible = RoundingPossible(run);
      if (lost || state.sigma > state.sigma_max) return possible ? Case::kDriftLost : Case::kNormLost;
      if (state.stage >= 3) return possible ? Case::kMoved : Case::kNormAlone;
      return critical ? Case::kDriftCritical : Case::kDriftWarning;
    }
    case Family::kLogits:
      if (information) return Case::kLogitsFound;
      return lost ? Case::kLogitsLost : Case::kLogits;
    case Family::kLoss:
      return information ? Case::kLossSpike : Case::kLossGone;
    case Family::kGradient:
      return information ? Case::kGradientSpike : lost ? Case::kGradientLost : Case::kGradientHigh;
    case Family::kNonfinite:
      return critical ? Case::kNonfinite : information ? Case::kNonfiniteSkipped : Case::kNonfiniteWarning;
    case Family::kDisagreement:
      return Case::kDisagreement;
    case Family::kSilent:
      return critical ? Case::kAllSilent : Case::kSomeSilent;
    case Family::kOverhead:
      return Case::kOverhead;
    case Family::kKernel:
      return Case::kKernel;
    case Family::kArithmetic:
      return Case::kArithmetic;
    case Family::kOwn:
      return information ? Case::kOwnSpike : Case::kOwn;
    case Family::kExperts:
      return information ? Case::kExpertsUnused : Case::kExpertsDead;
    case Family::kSequences:
      return information ? Case::kSequencesOnce : Case::kSequencesStay;
    case Family::kParameters:
      if (!information &&
          (state.cause == "residual growth" || state.cause == "head growth" || state.cause == "logit growth")) {
        return Case::kWeightsGrow;
      }
      if (!information && state.cause == "FP8 saturation") return Case::kScalesDoNotFit;
      return information ? Case::kParametersJump : Case::kParametersStay;
    case Family::kCorruption:
      return critical ? Case::kCorruption : Case::kCorruptGradient;
    case Family::kLearning:
      return Case::kLearning;
    case Family::kFrozen:
      break;
  }
  return information ? Case::kRoundedAway : Case::kFrozen;
}

constexpr char kCentre[] = "entre the keys (attention.center_k)";
constexpr char kUnbiased[] = "witch to the unbiased delta (attention.mode = hp)";
constexpr char kCentreCost[] =
    "Centring costs up to 8 % of attention time from 4k tokens on, up to 15 % below, on any kernel; attention.mode = "
    "hp "
    "(unbiased delta) removes the cause, for at most 2 % of forward and backward.";
constexpr char kUnbiasedCost[] = "It costs at most 2 % of forward and backward at 4k tokens.";

using Words = std::vector<std::pair<std::string, std::string>>;

Words WordsFor(const RunDescription& run, const AdviceState& state, int64_t begin) {
  const bool centre = run.attention.softcap == 0;  // With it a shift of the scores is none.
  const char* const repair = centre ? kCentre : kUnbiased;
  return {{"{Repair}", absl::StrCat(centre ? "C" : "S", repair)},
          {"{repair}", absl::StrCat(centre ? "c" : "s", repair)},
          {"{cost}", centre ? kCentreCost : kUnbiasedCost},
          {"{begin}", absl::StrCat("step ", begin)},
          {"{sigma}", absl::StrCat(state.sigma_max)}};
}

}  // namespace

bool GoesBack(Family family, const RunDescription& run, const AdviceState& state) {
  return RowOf(CaseOf(family, run, state)).first == std::string_view(kGoBack);
}

std::string FirstAction(Family family, const RunDescription& run, const AdviceState& state) {
  return absl::StrReplaceAll(RowOf(CaseOf(family, run, state)).first, WordsFor(run, state, 0));
}

std::string AdviceText(Family family, const RunDescription& run, const AdviceState& state, int64_t begin) {
  const Row& row = RowOf(CaseOf(family, run, state));
  std::string text = absl::StrCat(row.first, ".");
  if (*row.then != '\0') absl::StrAppend(&text, " ", row.then);
  return absl::StrReplaceAll(text, WordsFor(run, state, begin));
}

std::string RunbookTable(Family family) {
  const Words words = {{"{Repair}", absl::StrCat("C", kCentre, "; with softcap s", kUnbiased)},
                       {"{repair}", absl::StrCat("c", kCentre, "; with softcap s", kUnbiased)},
                       {"{cost}", kCentreCost},
                       {"{begin}", "the alert's first step"},
                       {"{sigma}", absl::StrCat(NormOptions().rescue_sigma_max)}};
  std::string table = "| when | do first | then |\n| --- | --- | --- |\n";
  for (const Row& row : kRows) {
    if (row.family != family) continue;
    absl::StrAppend(&table, "| ",
                    absl::StrReplaceAll(absl::StrCat(row.when, " | **", row.first, "** | ", row.then), words), " |\n");
  }
  return table;
}

}  // namespace bellwether::server
