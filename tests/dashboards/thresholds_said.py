"""What dashboards, help texts and documents say of the detectors' numbers, as templates: {NAME} is the
threshold's value, {EXPRESSION} what follows from some, {EXPRESSION:FORMAT} the same in Python's words.
A text that says a number of a threshold has a template here, and its number no other source."""

from __future__ import annotations

RATIO_GROWS = "(1024 / drift.heads_usual) ** drift.heads_exponent"

DETECTION = (
    "is not finite after {own.finite_values} finite ones in a row",
    "its own history to the bad side; for {own.persist_batches} batches",
    "is added to batch means of {trend.batch_steps} steps",
    "A head's drift ratio is {drift.grown_factor} times the median head (held at {drift.ratio_floor} or more) and grows exponentially: "
    "Mann-Kendall z > {trend.mann_kendall_z_min}, r2 > {trend.r2_min}, doubling within {trend.doubling_steps_max} steps. "
    "This holds over {trend.window_batches} or the newest {trend.window_batches_short} batches, for {drift.hold_batches} batches",
    "or it is {drift.level_factor} times the median for {2 * drift.level_batches} batches ({drift.level_batches} where ties hold too",
    "or its common mode is above {drift.common_mode_large} logits, {drift.common_mode_factor} times the median head, and grows exponentially, "
    "for {drift.hold_batches} batches ({2 * drift.hold_batches} where the leak is not measured)",
    "or its key-gradient leak is {leak.factor} times that of the median head (held at {leak.floor:.0e} or more) for {leak.hold_batches} batches",
    "Ties hold and the common mode is above {drift.common_mode_large} logits (and, where the leak is measured, a head of the layer leaked "
    "within the newest {leak.memory_steps} steps). Or the norm or logits rule holds too. Or sigma(W_Q) is {norm.far_factor} times the median head",
    "more than {ties.fraction_min:%} of rows (and {ties.peer_factor} times the median head) have a repeated bf16 maximum, for {ties.hold_batches} "
    "batches. Stage 2 of a drift; alone it warns only where the leak is not measured, and after {2 * ties.hold_batches} batches",
    "sigma(W_Q) is {norm.peer_factor} times the median head and rises against it to {norm.rise_min} times what it was within "
    "{trend.window_batches} batches, monotonically, for {norm.hold_batches} batches. Stage 3 of a drift, as is, however it rose, "
    "{norm.far_factor} times the median head",
    "a head's largest score is above {logits.logit_max_large}, for {logits.hold_batches} batches",
    "or the median head's is above {logits.logit_median_large} ({logits.logit_median_critical}) with an entropy ratio below {logits.entropy_ratio_collapsed}",
    "the mean of {loss.mean_values} losses stays above its minimum by {loss.rise_of_minimum:%}, by {loss.rise_of_gain:%} of what was won, and by "
    "{loss.rise_sigma} of its standard errors, for {loss.persist_steps} ({loss.critical_steps}) steps",
    "is for {loss.change_hold_steps} steps above its level before it by {loss.change_rise_of_level:%} of that and by "
    "{loss.change_rise_of_gain:%} of what was won | warning (critical: {loss.change_lost_of_gain:%} of what was won are lost, or {loss.critical_steps} steps)",
    "{loss.turn_values} losses in a row above the lowest median of 16 by {loss.turn_rise_of_level:%} of it, by {loss.turn_rise_of_gain:%} of what was "
    "won, and by {loss.turn_sigma} deviations of neighbouring losses. {loss.turn_lasting_values} in a row, or a learning rate that has just risen",
    "in the first 100 steps above the first losses by {loss.start_rise:%}, while sigma(W_Q) of half of the heads has changed by {loss.start_moved} in ln",
    "The 10 to 64 newest losses are above the 64 before by {loss.step_sigma} standard errors (of fewer than 20 by up to 1.5 more) and by {loss.step_rise_of_level:%} of the level",
    "and was 0 in 32 values in a row, exactly or but for rounding, and is not in two",
    "or 8 of the newest 10 losses are [above all 64 before](#whether-the-loss-has-jumped) from one step on",
    "or it has doubled from one step on: 8 of the newest 10 are [above all 64 before](#whether-the-loss-has-jumped)",
    "{loss.impulse_sigma} standard deviations above the {loss.window_values} values before it, {loss.impulse_values} times in a row",
    "{loss.gradient_factor} times its geometric mean and {loss.impulse_sigma} standard deviations of its logarithm; for {loss.persist_steps} steps",
    "a parameter has a gradient and does not move, in {frozen.samples} samples that cover it",
    "that always had tokens gets none in 2 samples, at any step. One that had some gets none in {experts.samples}, and in {experts.samples} times as many as ever before",
    "{sequences.repeated_share:%} of a batch's labels are the same as the one before",
    "{sequences.hold_values} steps in a row: a warning",
    "leaves its own history for {parameters.hold_samples} samples; for {parameters.persist_samples}",
    "is above {parameters.lag_level} and off its own history; for {parameters.lag_samples} samples",
    "to {parameters.growth_factor} times its size in 2 or {parameters.growth_samples} samples, while others stand nearly still",
    "loses numbers, since its scale does not fit: in {parameters.scale_samples} samples in a row that cover it",
    "has risen to {corruption.weight_factor} times what it was in the sample before, at any step",
    "an element of one gradient is {corruption.gradient_factor} times the largest of its history",
    "a loss that is the same in {learning.equal_values} values",
    "the hook takes more than {alert.hook_overhead_max:%} of the step for {alert.hook_overhead_steps} steps",
    "Up to a sigma of {norm.rescue_sigma_max} runs were rescued",
    "An alert resolves after {alert.resolve_steps} steps without evidence. Its kind then stays quiet for {alert.cooldown_steps}",
    "In a run of more than {drift.heads_usual} heads three limits grow with (heads / {drift.heads_usual})^{drift.heads_exponent}. They are the two "
    "factors of the ratio, {drift.grown_factor} and {drift.level_factor}, and the share of tied rows, {ties.fraction_min}. At 1,024 heads they are "
    f"{{drift.grown_factor * {RATIO_GROWS}:.1f}}, {{drift.level_factor * {RATIO_GROWS}:.1f}} and {{ties.fraction_min * {RATIO_GROWS}:.2f}}",
)  # fmt: skip

NORM = "is {norm.peer_factor} times that of the median head and rises against it"
LOGITS = "is above {logits.logit_max_large}, or that of the median head above {logits.logit_median_large} while"
TIES = "More than {ties.fraction_min:%} of a head's rows have"

RESPOND = (
    "or sigma(W_Q) above {norm.rescue_sigma_max}: stop, or go back",
    TIES,
    NORM + "; in a head that drifts, {norm.far_factor} times",
    LOGITS,
    "is {loss.gradient_factor} times what it was",
    "more than {alert.hook_overhead_max:%} of the step",
)

RUNBOOKS = {
    "driftgrowing": (
        "is {drift.grown_factor} times that of the median head and grows exponentially, or {drift.level_factor} times and rises",
    ),
    "tiesandbiasrising": (TIES, "Below sigma {norm.rescue_sigma_max} a run"),
    "spectralnormgrowing": (
        NORM + " to {norm.rise_min} times what it was. In a head that drifts, {norm.far_factor} times the median head",
    ),
    "logitsgrowing": (LOGITS,),
    "gradientjump": (
        "is {loss.gradient_factor} times what it was and {loss.impulse_sigma} standard deviations above it. "
        "One spike is information; what lasts {loss.persist_steps} steps",
        "or has doubled from one step on and stays for 8, is a warning",
    ),
    "diverging": (
        "for {loss.persist_steps} steps a warning, for {loss.critical_steps} critical",
        "it has turned, {loss.turn_values} losses in a row",
        "Or it has jumped from one step on, and 8 losses later is above all 64 before",
        "a spike, {loss.impulse_sigma} standard deviations above",
    ),
    "nonfinite": (),
    "weightsdisagree": (),
    "kernelwrong": (),
    "arithmeticwrong": (),
    "ownsignal": (
        "after {own.finite_values} finite values in a row",
        "for {own.hold_batches} means of {own.batch_values} values information, for {own.persist_batches} a warning",
        "beyond all of its history by {own.range_factor} times its range",
        "to {own.rise_factor} times its median, or fallen by {own.fall_share:%} of it",
        "was 0 in 32 values in a row, exactly or but for rounding",
    ),
    "parametersfrozen": ("{frozen.samples} samples",),
    "expertsdead": (
        "had some in {experts.seen} samples has had none in {experts.samples} in a row, and in {experts.samples} times as many",
        "is below {experts.breadth}, and {experts.breadth_fall} times below all of its best 64 samples, for {experts.samples} samples; "
        "for two where it is {experts.breadth_fall ** 2:.0f} times below",
        "and none in {experts.start_samples}",
        "if by its lowest share it should have had {experts.steady_tokens} tokens in them",
    ),
    "sequencesodd": (
        "{sequences.repeated_share:%} of its labels or more are the same as the one before, where they were {sequences.usual_share:%}",
        "by {sequences.range_factor} times their range, also of the logarithms, and {sequences.rise_factor} times the largest of them",
        "{sequences.hold_values} in a row are a warning",
    ),
    "parametersoutofpast": (
        "beyond all of that history by {parameters.range_factor} times its range, and by a factor of {parameters.rise_factor} at least, or {parameters.shared_factor} for what all share. "
        "Gradients that fall do so by {parameters.fall_factor}",
        "{parameters.hold_samples} samples in a row that cover it are information, {parameters.persist_samples} a warning",
        "is above {parameters.lag_level} and beyond its own history by the same range: information, and for {parameters.lag_samples} samples in a row a warning",
        "a weight grows to {parameters.growth_factor} times its size in 2 or {parameters.growth_samples} samples",
    ),
    "corruption": (
        "is {corruption.weight_factor} times what it was",
        "is {corruption.gradient_factor} times the largest of its history",
    ),
    "notlearning": (
        "the same in {learning.equal_values} values",
        "rises over {learning.rising_values} values to {learning.rising_factor} times its history",
        "by a factor of {learning.scale_factor} for {learning.scale_values} values",
        "by more than {learning.change_share:%}",
    ),
    "ranksmissing": (),
    "hookoverbudget": ("more than {alert.hook_overhead_max:%} of the step, for {alert.hook_overhead_steps} steps",),
}

GLOSSARY = (
    "Beyond {drift.grown_factor} times the median head and growing, it is a drift",
    "doubles within {trend.doubling_steps_max} steps",
    "With fewer than {drift.peers_min} heads there are no peers",
    "Above {logits.logit_max_large} in a head, attention fails",
    "Beyond {ties.bias_t_min} in either direction a bias is no chance",
    # No thresholds.
    "with an interval of 80 %",
    "held 98 % of their values",
    "1 drift, 2 ties and bias, 3 norm growth, 4 logits, 5 loss",
    "1 is over all keys alike, 0 is on one key",
    "From step 700 on a run that all six judge is called healthy",
)

PAGE = (
    "{drift.grown_factor} times it and growing is a drift",
    "Above {logits.logit_max_large} in a head, or above {logits.logit_median_large} in the median head",
    "More than {ties.fraction_min:%} is told",
)

BOARD = (
    "{drift.grown_factor} times the run's median head is told while it grows; at {drift.ratio_critical} a head is lost",
    "More than {ties.fraction_min:%} of a head's rows is told",
    "Persistent beyond {ties.bias_t_min}: biased",
    "Above {logits.logit_max_large} attention fails",
)

# A panel's thresholds.
PANELS = {
    "1 Drift ratio": ("drift.grown_factor", "drift.ratio_critical"),
    "Layer x head: drift ratio": ("drift.grown_factor", "drift.ratio_critical"),
    "3 Tied rows": ("ties.fraction_min",),
    "6 Largest logit": ("logits.logit_max_large",),
    "Hook overhead": ("alert.hook_overhead_max",),
    "Repeated labels": ("sequences.repeated_share",),
    "Lag of the second moment": ("parameters.lag_level",),
}
