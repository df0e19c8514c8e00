"""All runs on one page: which one is ill, which one is silent."""

from __future__ import annotations

from board import Board, Look, link_to_run, query, query_now


def overview_board() -> Board:
    """Counts, then stages, then what fires."""
    board = Board(
        "bellwether-overview",
        "Bellwether / Overview",
        "Which run is ill, which is silent, and whether anybody watches. The server itself has its own board.",
    )
    board.marks(
        "Alerts", 'ALERTS{alertname=~"Bellwether.*",alertstate="firing"}', "red", "{{alertname}}", "{{run}}{{instance}}"
    )
    board.marks("Restarts", "changes(bellwether_run_attempt[$__rate_interval]) > 0", "blue", "{{run}} was restarted")
    board.stat("Runs", "Runs that are exported now.", query("count(bellwether_run_info)"), Look("none", 5, 4))
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
    board.stat("Streams", "Trainers that are connected.", query("sum(bellwether_ingest_streams)"), Look("none", 4, 4))
    of_the_line = link_to_run("${__field.labels.run}")
    board.lines(
        "Stage",
        "1 drift, 2 ties and bias, 3 norm, 4 logits, 5 loss. No line: nothing was found. A click leads to the run.",
        Look("none", warn=1, critical=3),
        query("bellwether_run_stage > 0", "{{run}}"),
    ).data_links([of_the_line])
    board.lines(
        "Steps left",
        "Predicted steps to divergence. A click leads to the run.",
        Look("locale"),
        query("bellwether_run_eta_steps", "{{run}}"),
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
        Look("s", warn=300, critical=600),
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
