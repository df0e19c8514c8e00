"""bellwetherd itself: what arrives, what waits, what is written, what is concluded and told, what
it costs."""

from __future__ import annotations

from board import Board, Look, query
from grafana_foundation_sdk.builders.prometheus import Dataquery
from thresholds import of_alert, quantile_of_alert

ACK_SECONDS = of_alert("BellwetherAckSlow")
ACK_SHARE = quantile_of_alert("BellwetherAckSlow")
HERE = 'instance=~"$instance"'
PROCESS = f'job="bellwether",{HERE}'  # Other processes have these metrics too.
THIRD = 8  # Columns.


def rate(metric: str, by: str, only: str = "") -> str:
    """Of a counter per second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{HERE}{only}}}[$__rate_interval]))"


def quantile(part: float, histogram: str, by: str = "") -> str:
    """A quantile of a histogram in seconds."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, {rate(f'{histogram}_bucket', labels)})"


def median_and_tail(histogram: str, by: str = "") -> tuple[Dataquery, Dataquery]:
    """50th and 99th percentile."""
    legend = f" {{{{{by}}}}}" if by else ""
    return (
        query(quantile(0.5, histogram, by), f"p50{legend}"),
        query(quantile(0.99, histogram, by), f"p99{legend}"),
    )


def server_board() -> Board:
    """A panel's causes stand above it: the first wrong panel from the top is the place to look."""
    board = Board(
        "bellwether-server",
        "Bellwether / Server",
        "Whether the watcher is well: frames come in at the top, notifications leave below, the process is last.",
    )
    board.variable("instance", "Server", "label_values(bellwether_build_info, instance)", several=True)
    board.marks(
        "Alerts",
        f'ALERTS{{alertname=~"Bellwether.*",alertstate="firing",run="",{HERE}}}',
        "red",
        "{{alertname}}",
        "{{severity}}: {{instance}}",
    )
    board.marks(
        "Starts and reloads",
        f"changes(bellwether_config_last_reload_success_timestamp_seconds{{{HERE}}}[$__rate_interval]) > 0",
        "blue",
        "{{instance}} has read its rules",
        "The server started, or read its rules, policy and access files again.",
    )
    _state(board)
    _targets(board)
    _arrives(board)
    _waits_and_is_written(board)
    _concluded_and_told(board)
    _asked(board)
    _costs(board)
    return board


def _state(board: Board) -> None:
    board.stat(
        "Streams",
        "Trainers that are connected. None is neither good nor bad: no job runs, or none reaches the server.",
        query(f"sum(bellwether_ingest_streams{{{HERE}}})"),
        Look("none", 6, 4, idle=True),
    )
    board.stat(
        "Degraded",
        "Reasons for which the server does less than it should; none is healthy.",
        query(f"sum(bellwether_degraded{{{HERE}}})"),
        Look("none", 6, 4, critical=1),
    )
    board.stat(
        "Files refused",
        "Servers that refused their rules, policy, access or tokens file when it was last read.",
        query(f"sum(1 - bellwether_config_last_reload_successful{{{HERE}}})"),
        Look("none", 6, 4, critical=1),
    )
    board.stat(
        "Up for",
        "Since the youngest process began.",
        query(f"time() - max(process_start_time_seconds{{{PROCESS}}})"),
        Look("s", 6, 4),
    )


def _targets(board: Board) -> None:
    """What the server is meant to keep to; each limit is that of the alert which is named."""
    board.row("Targets")
    within = f'sum(rate(bellwether_ack_seconds_bucket{{{HERE},le="{ACK_SECONDS:g}"}}[$__rate_interval]))'
    board.stat(
        "Acknowledged in time",
        f"Share of frames that are durable within {ACK_SECONDS:g} s of their arrival. Target: {ACK_SHARE:.0%} or more "
        "(BellwetherAckSlow).".replace("%", " %"),
        query(f"{within} / (sum(rate(bellwether_ack_seconds_count{{{HERE}}}[$__rate_interval])) > 0)"),
        Look("percentunit", 6, 4, least=ACK_SHARE),
    )
    board.stat(
        "Refused frames",
        "Messages that a limit refused in 10 minutes. Target: none (BellwetherIngestRejecting).",
        query(f"sum(increase(bellwether_ingest_limit_refused_total{{{HERE}}}[10m]))"),
        Look("locale", 6, 4, critical=1),
    ).decimals(0)
    board.stat(
        "Failed notifications",
        "Notifications that failed or were refused in 15 minutes. Target: none (BellwetherNotificationsFailing).",
        query(
            f'sum(increase(bellwether_notifications_total{{{HERE},result=~"failed|refused"}}[15m])) or vector(0)'
        ),
        Look("locale", 6, 4, critical=1),
    ).decimals(0)
    board.stat(
        "Free for the store",
        "Free bytes of the fullest data folder's file system. Target: 5 GiB or more (BellwetherStoreFull).",
        query(f"min(bellwether_store_free_bytes{{{HERE}}})"),
        Look("bytes", 6, 4, least=of_alert("BellwetherStoreFull")),
    )


def _arrives(board: Board) -> None:
    board.row("What arrives")
    board.lines(
        "Frames",
        "Frames per second by what became of them. Everything but taken is lost or was not needed.",
        Look("short", THIRD),
        query(rate("bellwether_ingest_frames_total", "result"), "{{result}}"),
    )
    board.lines(
        "Values",
        "Values per second that were accepted.",
        Look("short", THIRD),
        query(rate("bellwether_ingest_values_total", "instance"), "{{instance}}"),
    )
    board.lines(
        "Bytes",
        "Bytes per second of accepted frames.",
        Look("Bps", THIRD),
        query(rate("bellwether_ingest_bytes_total", "instance"), "{{instance}}"),
    )
    board.lines(
        "Refused by a limit",
        "Messages and streams per second that a limit refused; the label is the limit's name in the settings.",
        Look("short", THIRD),
        query(rate("bellwether_ingest_limit_refused_total", "limit"), "{{limit}}"),
    )
    board.lines(
        "Gaps and deadlines",
        "Per second: jumps in clients' sequence numbers, and steps closed before every rank had reported.",
        Look("short", THIRD),
        query(rate("bellwether_ingest_seq_gaps_total", "instance"), "gaps {{instance}}"),
        query(rate("bellwether_steps_closed_by_deadline_total", "instance"), "deadlines {{instance}}"),
    )
    board.lines(
        "Lost on the way",
        "Frames per second that never arrived, by where they were lost, or without their heads; over all runs.",
        Look("short", THIRD),
        query(rate("bellwether_run_frames_dropped_total", "reason"), "{{reason}}"),
        query(rate("bellwether_run_frames_stripped_total", "instance"), "without heads {{instance}}"),
    )


def _waits_and_is_written(board: Board) -> None:
    board.row("What waits and what is written")
    board.lines(
        "Shard queues",
        "Frames that wait for a shard. One that only grows: a shard is stuck; all that grow: too little CPU.",
        Look("short", THIRD),
        query(f"bellwether_shard_queue_frames{{{HERE}}}", "{{instance}} shard {{shard}}"),
    )
    board.lines(
        "Log to disk",
        "Time of one fdatasync of the write-ahead log. A slow disk shows here first. The line is what a whole acknowledgement "
        "may take.",
        Look("s", THIRD, warn=ACK_SECONDS),
        *median_and_tail("bellwether_wal_fsync_seconds"),
    )
    board.lines(
        "Durable acknowledgement",
        "From a frame's arrival to its durable acknowledgement. Trainers buffer while it is slow.",
        Look("s", THIRD, warn=ACK_SECONDS),
        *median_and_tail("bellwether_ack_seconds"),
    )
    board.lines(
        "Store",
        "Bytes on disk by kind, and of the write-ahead log.",
        Look("bytes", 12),
        query(f"sum by (kind) (bellwether_store_bytes{{{HERE}}})", "{{kind}}"),
        query(f"sum(bellwether_wal_bytes{{{HERE}}})", "write-ahead log"),
    )
    board.lines(
        "Free",
        "Free bytes of the data directory's file system.",
        Look("bytes", 12, least=of_alert("BellwetherStoreFull")),
        query(f"bellwether_store_free_bytes{{{HERE}}}", "{{instance}}"),
    )


def _concluded_and_told(board: Board) -> None:
    board.row("What is concluded and told")
    board.lines(
        "Detector tick",
        "99th percentile of evaluating all tests of a run's heads at the end of a batch, by backend.",
        Look("s", THIRD),
        query(quantile(0.99, "bellwether_detector_tick_seconds", "backend"), "p99 {{backend}}"),
    )
    board.lines(
        "Spectra",
        "Gram matrices per second that clients shipped, by what became of them.",
        Look("short", THIRD),
        query(rate("bellwether_spectra_total", "result"), "{{result}}"),
    )
    board.lines(
        "Changes of alerts",
        "Per second, by rule and new state.",
        Look("short", THIRD),
        query(rate("bellwether_alert_transitions_total", "rule, to"), "{{rule}} {{to}}"),
    )
    board.lines(
        "Changes of actions",
        "Per second, by kind and new state; requests that were refused, too.",
        Look("short", THIRD),
        query(rate("bellwether_actions_total", "kind, result"), "{{kind}} {{result}}"),
    )
    board.lines(
        "Notifications",
        "Per second, by what became of them. Failed ones reached nobody.",
        Look("short", THIRD),
        query(rate("bellwether_notifications_total", "channel, result"), "{{channel}} {{result}}"),
    )
    board.lines(
        "Time to tell",
        "From a transition to its delivery, by channel.",
        Look("s", THIRD),
        *median_and_tail("bellwether_notification_seconds", "channel"),
    )


def _asked(board: Board) -> None:
    board.row("What is asked")
    board.lines(
        "HTTP",
        "Requests per second by path and code.",
        Look("reqps", THIRD),
        query(rate("bellwether_http_requests_total", "path, code"), "{{path}} {{code}}"),
    )
    board.lines(
        "RPCs",
        "Calls per second that ended, by method and code.",
        Look("reqps", THIRD),
        query(rate("grpc_server_handled_total", "grpc_method, grpc_code"), "{{grpc_method}} {{grpc_code}}"),
    )
    board.lines(
        "Queries",
        "99th percentile of the time of a query, by method.",
        Look("s", THIRD),
        query(quantile(0.99, "bellwether_query_seconds", "method"), "p99 {{method}}"),
    )
    board.lines(
        "Series",
        "Series of the metrics page by level; the limit drops heads first.",
        Look("short", 12),
        query(f"sum by (level) (bellwether_series_exported{{{HERE}}})", "{{level}}"),
    )
    board.lines(
        "Series suppressed",
        "Series per second left out for the limit, added up over scrapes.",
        Look("short", 12),
        query(rate("bellwether_series_suppressed_total", "level"), "{{level}}"),
    )


def _costs(board: Board) -> None:
    board.row("What it costs")
    board.lines(
        "CPU",
        "Cores that the process uses.",
        Look("short", THIRD),
        query(f"rate(process_cpu_seconds_total{{{PROCESS}}}[$__rate_interval])", "{{instance}}"),
    )
    board.lines(
        "Memory",
        "Resident memory of the process.",
        Look("bytes", THIRD),
        query(f"process_resident_memory_bytes{{{PROCESS}}}", "{{instance}}"),
    )
    board.lines(
        "File descriptors",
        "Share of the open file descriptors that are allowed: streams and files.",
        Look("percentunit", THIRD),
        query(f"process_open_fds{{{PROCESS}}} / process_max_fds{{{PROCESS}}}", "{{instance}}"),
    )
