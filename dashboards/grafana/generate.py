#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file: python3 generate.py [folder].

Needs grafana-foundation-sdk (deploy/requirements-test.txt). The JSON is committed, so
that Grafana can load it without this script; a test compares the two. Panels stand in
causal order: what a panel shows leads to what the panels below it show.
"""

from __future__ import annotations

import sys
from pathlib import Path

from board_overview import overview_board
from board_run import run_board
from board_server import server_board


def main() -> None:
    """Writes all boards."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for board in (overview_board(), run_board(), server_board()):
        (folder / f"{board.uid}.json").write_text(board.json(), encoding="utf-8")


if __name__ == "__main__":
    main()
