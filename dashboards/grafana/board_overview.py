"""All runs on one page: which one is ill, which one is silent."""

from __future__ import annotations

from board import STAGE_HELP, Board, Look, link_to_run, query, query_now
from thresholds import of_alert


def overview_board() -> Board:
    """Counts, then stages, then what fires."""
    board = Board(
        "bellwether-overview",
        "Bellwether / Overview",
        "Which run is ill, which is silent, and whether anybody watches. The server itself has its own board.",
    )
    board.marks(
        "Alerts", 'ALERTS{alertname=~"Bellwether.*",alertstate="firing"}', "red", "{{alertname}}",
        "{{severity}}: {{run}}{{instance}}",
    )
    board.marks(
        "Restarts",
        "changes(bellwether_run_attempt[$__rate_interval]) > 0",
        "blue",
        "{{run}} was restarted",
        "Another attempt of the run began: its job came back, or has another number of ranks.",
    )
    board.stat("Runs", "Runs that are exported now.", query("count(bellwether_run_info)"), Look("none", 5, 4, idle=True))
    board.stat(
        "Ill",
        "Runs in stage 1 or beyond.",
        query("count(bellwether_run_stage > 0) or vector(0)"),
        Look("none", 5, 4, warn=1),
    )
    board.stat(
        "Judged in part",
        "Runs of which some layers or signals are not judged: what is wrong there is not seen.",
        query('count(bellwether_run_judged_ratio{family="all"} < 1) or vector(0)'),
        Look("none", 5, 4, warn=1),
    )
    board.stat(
        "Alerts that fire",
        "By the server's own conclusions.",
        query("count(bellwether_alert_active) or vector(0)"),
        Look("none", 5, 4, warn=1),
    )
    board.stat(
        "Streams",
        "Trainers that are connected. None is neither good nor bad: no job runs, or none reaches the server.",
        query("sum(bellwether_ingest_streams)"),
        Look("none", 4, 4, idle=True),
    )
    of_the_line = link_to_run("${__field.labels.run}")
    board.states(
        "Stage",
        f"Runs in which something was found within the time that is shown. {STAGE_HELP} A click leads to the run.",
        query(
            "bellwether_run_stage and on (instance, run) (max_over_time(bellwether_run_stage[$__range]) > 0)", "{{run}}"
        ),
        Look("none", 24, warn=1, critical=3),
    ).data_links([of_the_line])
    board.lines(
        "Steps left",
        "Predicted steps to divergence. A click leads to the run.",
        Look("locale"),
        query("bellwether_run_eta_steps", "{{run}}"),
    ).data_links([of_the_line])
    board.lines(
        "Time left",
        "The same in time: steps left times the median time of a step in the newest five minutes.",
        Look("s"),
        query("bellwether_run_eta_steps * quantile_over_time(0.5, bellwether_run_step_seconds[5m])", "{{run}}"),
    ).data_links([of_the_line])
    board.table(
        "Firing",
        "Alerts with their heads, as of now. A click leads to the run.",
        query_now("bellwether_alert_active"),
        Look("none", 24),
    ).data_links([link_to_run("${__data.fields.run}")])
    board.lines(
        "Silence",
        "Time since a run that has not ended was last heard of.",
        Look("s", critical=of_alert("BellwetherRunSilent")),
        query("time() - bellwether_run_last_report_timestamp_seconds and bellwether_run_ended == 0", "{{run}}"),
    )
    board.lines(
        "Ranks missing",
        "Ranks that should report and do not; none should be missing.",
        Look("none", warn=1),
        query(
            "bellwether_run_ranks_expected - bellwether_run_ranks_reporting and bellwether_run_ended == 0", "{{run}}"
        ),
    )
    return board
