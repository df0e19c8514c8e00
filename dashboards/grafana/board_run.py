"""One training run, cause first, loss last."""

from __future__ import annotations

from board import STAGE_HELP, STAGE_WORDS, Board, Look, query, query_now
from grafana_foundation_sdk.models import common, dashboard
from thresholds import built_in, of_alert

RULES = built_in()
RUN = 'run="$run"'
LAYER = 'run="$run",layer=~"$layer"'
# Of counters of rows: ratios sum before they divide.
TIED = (
    f'sum by (layer) (rate(bellwether_layer_tied_rows_total{{{LAYER},rule="bf16"}}[$__rate_interval]))'
    f" / sum by (layer) (rate(bellwether_layer_sampled_rows_total{{{LAYER}}}[$__rate_interval]))"
)
STAGE = f"bellwether_run_stage{{{RUN}}}"
LEAST = f'bellwether_run_judged_ratio{{{RUN},family="all"}}'
STAGE_OR_PARTLY = f"{STAGE} - ({STAGE} == bool 0) * ignoring (family) ({LEAST} < bool 1) or {STAGE}"
# Own signals by the names that the field has, whatever stands before and behind them.
REWARDS = "(.*/)?(mean_)?rewards?([/_](mean|avg))?"
POLICY = "(.*/)?(mean_)?((policy_|ppo_|approx_)?kl(_div|_divergence|_loss)?|approxkl|(policy_)?entropy)([/_](mean|avg))?"
# Grafana's heatmap has time on its x axis, so the matrix is a table.  Labels are
# strings: without the conversion 10 would stand before 2.  Columns stand as the
# rows name them first, so the heads are sorted before and the layers behind: with
# the worst heads only, no order of the rows sorts both.
MATRIX: tuple[tuple[str, dict[str, object]], ...] = (
    (
        "convertFieldType",
        {
            "conversions": [
                {"targetField": "layer", "destinationType": "number"},
                {"targetField": "head", "destinationType": "number"},
            ]
        },
    ),
    ("sortBy", {"sort": [{"field": "head"}]}),
    (
        "groupingToMatrix",
        {"columnField": "head", "rowField": "layer", "valueField": "Value", "emptyValue": "null"},
    ),
    ("sortBy", {"sort": [{"field": r"layer\head"}]}),
)


def run_board() -> Board:
    """What will happen to a run stands left and above what is happening."""
    board = Board(
        "bellwether-run",
        "Bellwether / Run",
        "One training run: what will happen to it stands left and above what is happening.",
    )
    board.variable("run", "Run", "label_values(bellwether_run_info, run)")
    board.variable("layer", "Layer", f"label_values(bellwether_layer_drift_ratio_max{{{RUN}}}, layer)", several=True)
    board.marks(
        "Alerts",
        'ALERTS{alertname=~"Bellwether.*",alertstate="firing",run="$run"}',
        "red",
        "{{alertname}}",
        "{{severity}}: layer {{layer}} head {{head}}",
    )
    board.marks(
        "Restarts",
        f"changes(bellwether_run_attempt{{{RUN}}}[$__rate_interval]) > 0",
        "blue",
        "{{run}} was restarted",
        "Another attempt of the run began: its job came back, or has another number of ranks.",
    )
    _conclusions(board)
    _causes(board)
    _matrix(board)
    _kernel(board)
    _training(board)
    _every_step(board)
    _rows(board)
    _ranks(board)
    _sequences(board)
    _experts(board)
    _own(board)
    return board


def _conclusions(board: Board) -> None:
    board.stat(
        "Stage",
        f"What the alert engine concluded. {STAGE_HELP} Judged in part: nothing was found, and the signals of some rules do "
        "not arrive from all layers.",
        query(STAGE_OR_PARTLY),
        Look("none", 5, 4, warn=1, critical=3),
    ).mappings([STAGE_WORDS]).color_mode(common.BigValueColorMode.BACKGROUND)
    board.stat(
        "Steps left",
        "Predicted steps to divergence; empty without a prediction.",
        query(f"bellwether_run_eta_steps{{{RUN}}}"),
        Look("locale", 5, 4),
    )
    board.stat(
        "Time left",
        "The same in time: steps left times the median time of a step in the newest five minutes.",
        query(
            f"bellwether_run_eta_steps{{{RUN}}} * quantile_over_time(0.5, bellwether_run_step_seconds{{{RUN}}}[5m])"
        ),
        Look("s", 5, 4),
    ).decimals(0)
    board.stat(
        "Step",
        "The newest step that all ranks reported.",
        query(f"bellwether_run_step{{{RUN}}}"),
        Look("locale", 4, 4),
    )
    board.stat(
        "Last report",
        "Time since the run was last heard of. Silence is not health.",
        query(f"time() - bellwether_run_last_report_timestamp_seconds{{{RUN}}}"),
        Look("s", 5, 4, critical=of_alert("BellwetherRunSilent")),
    )
    board.states(
        "Stage over time",
        f"When the run was in which stage. {STAGE_HELP}",
        query(STAGE_OR_PARTLY, "stage"),
        Look("none", 24, 3, warn=1, critical=3),
    )


def _causes(board: Board) -> None:
    layer = "layer {{layer}}"
    board.lines(
        "1 Drift ratio",
        "Common mode of the scores over their spread, worst head of the layer. Exponential growth is the first sign: "
        f"{RULES['drift.grown_factor']:g} times the run's median head is told while it grows; "
        f"at {RULES['drift.ratio_critical']:g} a head is lost.",
        Look("none", warn=RULES["drift.grown_factor"], critical=RULES["drift.ratio_critical"], log=True),
        query(f"bellwether_layer_drift_ratio_max{{{LAYER}}}", layer),
    )
    board.lines(
        "2 Key-gradient leak",
        "The part of the key gradients that must be zero and is not, worst key head of the layer: pure kernel error.",
        Look("none", log=True),
        query(f"bellwether_layer_key_leak_ratio_max{{{LAYER}}}", layer),
    )
    board.lines(
        "3 Tied rows",
        f"Share of sampled rows whose bf16 maximum occurs more than once. More than {RULES['ties.fraction_min']:.0%} "
        "of a head's rows is told.".replace("%", " %"),
        Look("percentunit", warn=RULES["ties.fraction_min"]),
        query(TIED, layer),
    )
    board.lines(
        "4 Delta bias t",
        "t statistic of the error of delta, the head furthest from zero, sign kept. "
        f"Persistent beyond {RULES['ties.bias_t_min']:g}: biased, not noisy.",
        Look("none"),
        query(f"bellwether_layer_delta_bias_t{{{LAYER}}}", layer),
    )
    board.lines(
        "5 σ(W_Q)",
        "Largest singular value of a head's W_Q, worst head of the layer: the weights are being pushed.",
        Look("none", log=True),
        query(f"bellwether_layer_wq_spectral_norm_max{{{LAYER}}}", layer),
    )
    board.lines(
        "6 Largest logit",
        f"Largest attention score of the layer. Above {RULES['logits.logit_max_large']:,.0f} attention fails.",
        Look("none", warn=RULES["logits.logit_max_large"], log=True),
        query(f"bellwether_layer_logit_max{{{LAYER}}}", layer),
    )
    board.lines(
        "7 Entropy ratio",
        "Smallest entropy of a head against uniform attention: 0 is one key.",
        Look("percentunit"),
        query(f"bellwether_layer_entropy_ratio_min{{{LAYER}}}", layer),
    )
    board.lines(
        "8 Loss",
        "Training loss. The last to know.",
        Look("none"),
        query(f"bellwether_run_loss{{{RUN}}}", "loss"),
        query(f"bellwether_run_loss_max{{{RUN}}}", "largest since the sample before"),
    )


def _matrix(board: Board) -> None:
    panel = board.table(
        "Layer x head: drift ratio",
        "The exported heads now: the worst ones, or all with export.per_head: all. The console shows every head.",
        query_now(f"bellwether_head_drift_ratio{{{RUN}}}"),
        Look("none", 24, 10, warn=RULES["drift.grown_factor"], critical=RULES["drift.ratio_critical"]),
    )
    panel.decimals(1).align(common.FieldTextAlignment.CENTER)
    panel.cell_options(common.TableColoredBackgroundCellOptions())
    for name, options in MATRIX:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val=name, options=options))


def _kernel(board: Board) -> None:
    layer = "layer {{layer}}"
    board.lines(
        "Laws of the kernel",
        "Differences of sums that exact arithmetic makes equal, in units of rounding, the key head furthest from zero, "
        "sign kept. Far from zero, and not explained by roundings that are alike, the kernel is wrong.",
        Look("none"),
        query(f"bellwether_layer_law_a3_z{{{LAYER}}}", f"{layer} A3"),
        query(f"bellwether_layer_law_a4_z{{{LAYER}}}", f"{layer} A4"),
    )
    board.lines(
        "Beside the reference",
        "Squared distance of what the kernel returned from its reference, over what rounding gives, worst head of the "
        "layer. Far above one the tensor is wrong.",
        Look("none", log=True),
        query(f"bellwether_layer_shadow_o_excess_max{{{LAYER}}}", f"{layer} O"),
        query(f"bellwether_layer_shadow_dq_excess_max{{{LAYER}}}", f"{layer} dQ"),
        query(f"bellwether_layer_shadow_dk_excess_max{{{LAYER}}}", f"{layer} dK"),
        query(f"bellwether_layer_shadow_dv_excess_max{{{LAYER}}}", f"{layer} dV"),
    )
    board.table(
        "Laws of other layers",
        "The places whose laws differ most, of linear layers, norms, lm_head and weights at rest: law_z in units of rounding, "
        "law_out_nonfinite in elements. Each has its newest value, since they take turns; export.rows_max says how many.",
        query_now(f"bellwether_row_value{{{RUN}}}"),
        Look("none", 24),
    )


def _training(board: Board) -> None:
    board.lines(
        "Gradient norm",
        "Global gradient norm before clipping.",
        Look("none", 8, log=True),
        query(f"bellwether_run_grad_norm{{{RUN}}}", "gradient norm"),
        query(f"bellwether_run_grad_norm_max{{{RUN}}}", "largest since the sample before"),
    )
    board.lines(
        "Tokens",
        "Tokens per second.",
        Look("short", 8),
        query(f"rate(bellwether_run_tokens_total{{{RUN}}}[$__rate_interval])", "tokens"),
    )
    board.lines(
        "Hook overhead",
        "Share of a step that the hook takes.",
        Look("percentunit", 8, warn=RULES["alert.hook_overhead_max"]),
        query(f"bellwether_run_hook_overhead_ratio{{{RUN}}}", "hook"),
    )


def _every_step(board: Board) -> None:
    board.row("Every step")
    board.lines(
        "Lag of the second moment",
        "Largest lag of Adam's second moment since the sample before, in embeddings and the first layers: about one or less "
        "while it follows the gradients. A rise may come some steps before a spike of the loss. Told with stats=steps.",
        Look("none", 8, warn=RULES["parameters.lag_level"]),
        query(f"bellwether_run_moment_lag_max{{{RUN}}}", "lag"),
    )
    board.lines(
        "Clip factor",
        "Smallest factor by which torch has clipped the gradients since the sample before: one where they were within "
        "their limit.",
        Look("none", 8, log=True),
        query(f"bellwether_run_clip_factor{{{RUN}}}", "clip factor"),
    )
    board.lines(
        "Skipped steps and saturated gradients",
        "Steps that the optimizer did not take, and elements of gradients that were not finite or as large as their "
        "type can hold, a second.",
        Look("short", 8),
        query(f"rate(bellwether_run_skipped_steps_total{{{RUN}}}[$__rate_interval])", "skipped steps"),
        query(f"rate(bellwether_run_grad_saturated_elements_total{{{RUN}}}[$__rate_interval])", "saturated elements"),
    )
    board.lines(
        "Where a step's time goes",
        "Mean time of each phase on the host. On a GPU the host only enqueues work, and waits where the job asks for a "
        "number.",
        Look("s", 8),
        query(f"bellwether_run_phase_seconds{{{RUN}}}", "{{phase}}"),
    )
    board.lines(
        "Waiting for data",
        "Share of a step's time between the end of one step and the forward pass of the next.",
        Look("percentunit", 8),
        query(f"bellwether_run_data_wait_ratio{{{RUN}}}", "data"),
    )
    board.lines(
        "GPU memory",
        "What torch's allocator has given out, of the rank that has most.",
        Look("bytes", 8),
        query(f"bellwether_run_memory_allocated_bytes{{{RUN}}}", "allocated"),
        query(f"bellwether_run_memory_peak_bytes{{{RUN}}}", "most so far"),
    )
    board.lines(
        "Loss scale",
        "What a GradScaler has multiplied the loss by.",
        Look("locale", 24, 6, log=True),
        query(f"bellwether_run_loss_scale{{{RUN}}}", "loss scale"),
    )


def _rows(board: Board) -> None:
    board.row("Parameters and modules")
    few = "Of those with the largest now, which change; export.rows_max says how many."
    board.lines(
        "Gradient norm of parameters",
        f"Norm of a parameter's gradient. {few}",
        Look("none", log=True),
        query(f"bellwether_tensor_grad_norm{{{RUN}}}", "{{tensor}}"),
    )
    board.lines(
        "Update ratio of parameters",
        f"Norm of a step's change over the norm of the parameter. {few}",
        Look("none", log=True),
        query(f"bellwether_tensor_update_ratio{{{RUN}}}", "{{tensor}}"),
    )
    board.lines(
        "Activation RMS",
        f"Root of the mean square of what a module returns. {few}",
        Look("none", log=True),
        query(f"bellwether_module_rms{{{RUN}}}", "{{module}}"),
    )
    board.lines(
        "Share of the top channel",
        f"Share of the sum of squares that the channel with the largest one has. {few}",
        Look("percentunit"),
        query(f"bellwether_module_top_channel_share{{{RUN}}}", "{{module}}"),
    )


def _ranks(board: Board) -> None:
    board.row("Ranks")
    board.lines(
        "Gradients of single ranks",
        "Norm of a rank's own gradient, before ranks average theirs: of the ranks with the largest now, beside the "
        "median and the largest of all. Told with stats=rank_norms.",
        Look("none", 24, log=True),
        query(f"bellwether_rank_grad_norm{{{RUN}}}", "rank {{rank}}"),
        query(f"bellwether_run_rank_grad_norm_median{{{RUN}}}", "median of all"),
        query(f"bellwether_run_rank_grad_norm_max{{{RUN}}}", "largest of all"),
    )


def _sequences(board: Board) -> None:
    board.row("Losses of sequences")
    board.lines(
        "Largest losses",
        "Of a sequence and of a micro-batch, beside the mean, where the job tells them by mon.losses(). A bad sequence "
        "disappears in the mean.",
        Look("none"),
        query(f"bellwether_run_loss_sequence_max{{{RUN}}}", "sequence"),
        query(f"bellwether_run_loss_batch_max{{{RUN}}}", "micro-batch"),
        query(f"bellwether_run_loss{{{RUN}}}", "mean"),
    )
    board.lines(
        "Repeated labels",
        "Share of the labels that count and are the same as the one before: near one for a batch of one repeated token.",
        Look("percentunit", warn=RULES["sequences.repeated_share"]),
        query(f"bellwether_run_loss_repeated_ratio{{{RUN}}}", "repeated"),
    )


def _experts(board: Board) -> None:
    layer = "layer {{layer}}"
    board.row("Experts")
    board.lines(
        "Busiest expert",
        "Load of the layer's busiest expert over the mean load: one is balanced.",
        Look("none", log=True),
        query(f"bellwether_layer_expert_load_max_ratio{{{LAYER}}}", layer),
    )
    board.lines(
        "Dead experts",
        "Experts of the layer that were chosen for no token of the sample.",
        Look("none"),
        query(f"bellwether_layer_experts_dead{{{LAYER}}}", layer),
    )
    board.lines(
        "Entropy of the router",
        "Mean over tokens, against the largest that it can be: near zero the router is sure of each token.",
        Look("percentunit"),
        query(f"bellwether_layer_router_entropy_ratio{{{LAYER}}}", layer),
    )
    board.lines(
        "Largest logit of the router",
        "Largest logit that the layer's router has given an expert.",
        Look("none"),
        query(f"bellwether_layer_router_logit_max{{{LAYER}}}", layer),
    )


def _own(board: Board) -> None:
    board.row("Signals of its own")
    board.lines(
        "Reward",
        "What the job logs by a name such as reward or critic/rewards/mean.",
        Look("none"),
        query(f'bellwether_own_value{{{RUN},signal=~"{REWARDS}"}}', "{{row}}"),
    )
    board.lines(
        "KL divergence and entropy of the policy",
        "What the job logs by a name such as kl, actor/ppo_kl or entropy. A policy that collapses loses its entropy "
        "before its reward.",
        Look("none"),
        query(f'bellwether_own_value{{{RUN},signal=~"{POLICY}"}}', "{{row}}"),
    )
    board.table(
        "All signals of its own",
        "The newest values of what the job logs by mon.log(): the cells furthest from zero; export.rows_max says how many.",
        query_now(f"bellwether_own_value{{{RUN}}}"),
        Look("none", 24),
    )
