"""One training run, cause first, loss last."""

from __future__ import annotations

from board import Board, Look, query, query_now
from grafana_foundation_sdk.models import common, dashboard
from thresholds import built_in

RULES = built_in()
RUN = 'run="$run"'
LAYER = 'run="$run",layer=~"$layer"'
# Of counters of rows: ratios sum before they divide.
TIED = (
    f'sum by (layer) (rate(bellwether_layer_tied_rows_total{{{LAYER},rule="bf16"}}[$__rate_interval]))'
    f" / sum by (layer) (rate(bellwether_layer_sampled_rows_total{{{LAYER}}}[$__rate_interval]))"
)
STAGES = (
    ("healthy", "green"),
    ("1 drift", "orange"),
    ("2 ties and bias", "orange"),
    ("3 norm", "red"),
    ("4 logits", "red"),
    ("5 loss", "red"),
)
# Nothing was found, and not everything is judged: that is not health.
PARTLY = "judged in part"
STAGE = f"bellwether_run_stage{{{RUN}}}"
LEAST = f'bellwether_run_judged_ratio{{{RUN},family="all"}}'
STAGE_OR_PARTLY = f"{STAGE} - ({STAGE} == bool 0) * ignoring (family) ({LEAST} < bool 1) or {STAGE}"
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
        "layer {{layer}} head {{head}}",
    )
    board.marks(
        "Restarts",
        f"changes(bellwether_run_attempt{{{RUN}}}[$__rate_interval]) > 0",
        "blue",
        "{{run}} was restarted",
    )
    _conclusions(board)
    _causes(board)
    _matrix(board)
    _kernel(board)
    _training(board)
    return board


def _conclusions(board: Board) -> None:
    names = {
        str(stage): dashboard.ValueMappingResult(text=text, color=color) for stage, (text, color) in enumerate(STAGES)
    }
    names["-1"] = dashboard.ValueMappingResult(text=PARTLY, color="blue")
    board.stat(
        "Stage",
        "What the alert engine concluded: 0 healthy to 5 loss. Judged in part: nothing was found, and the signals of some "
        "rules do not arrive from all layers.",
        query(STAGE_OR_PARTLY),
        Look("none", 6, 4, warn=1, critical=3),
    ).mappings([dashboard.ValueMap(options=names)]).color_mode(common.BigValueColorMode.BACKGROUND)
    board.stat(
        "Steps left",
        "Predicted steps to divergence; empty without a prediction.",
        query(f"bellwether_run_eta_steps{{{RUN}}}"),
        Look("locale", 6, 4),
    )
    board.stat(
        "Step",
        "The newest step that all ranks reported.",
        query(f"bellwether_run_step{{{RUN}}}"),
        Look("locale", 6, 4),
    )
    board.stat(
        "Last report",
        "Time since the run was last heard of. Silence is not health.",
        query(f"time() - bellwether_run_last_report_timestamp_seconds{{{RUN}}}"),
        Look("s", 6, 4, warn=300, critical=600),
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
        "4 Delta bias",
        "t statistic of the error of delta, the head furthest from zero, sign kept. "
        f"Persistent beyond {RULES['ties.bias_t_min']:g}: biased, not noisy.",
        Look("none"),
        query(f"bellwether_layer_delta_bias_t{{{LAYER}}}", layer),
    )
    board.lines(
        "5 Spectral norm of W_Q",
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
        "7 Entropy",
        "Smallest entropy of a head against uniform attention: 0 is one key.",
        Look("percentunit"),
        query(f"bellwether_layer_entropy_ratio_min{{{LAYER}}}", layer),
    )
    board.lines(
        "8 Loss",
        "Training loss. The last to know.",
        Look("none"),
        query(f"bellwether_run_loss{{{RUN}}}", "loss"),
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
