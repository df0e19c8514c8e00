"""python -m instabilities: list, run, plan, make, score; see README.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import causes


def _list(args: argparse.Namespace) -> int:
    for name, family in causes.FAMILIES.items():
        print(f"{name:26}{family.meaning}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from .run import Request, run

    request = Request(causes.family(args.family).name, args.split, args.seed, args.set)
    print(json.dumps(run(request, args.out, args.default_stats, args.device), indent=1))
    return 0


def _make(args: argparse.Namespace) -> int:
    from .plan import make

    return make(args.plan, args.out, args.jobs, args.default_stats, args.device)


def _score(args: argparse.Namespace) -> int:
    from .report import Asked, main

    return main(Asked(folders=args.folder, monitors=args.monitor, severity=args.severity,
                      as_json=args.json, synthetic=args.synthetic, bars=args.bars))  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m instabilities", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    listed = commands.add_parser("list", help="the families of faults")
    listed.set_defaults(does=_list)

    def making(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text)
        made.add_argument("--out", type=Path, required=True, help="folder of the recordings")
        made.add_argument(
            "--default-stats", action="store_true", help="measure attach()'s defaults"
        )
        made.add_argument("--device", default="cpu", help="cpu or cuda")
        return made

    one = making("run", "makes one run")
    one.add_argument("family")
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--split", default="train", help="train or test")
    one.add_argument("--set", default="{}", metavar="JSON",
                     help='fields of the setting that are not drawn: {"steps": 300}')  # fmt: skip
    one.set_defaults(does=_run)
    many = making("make", "makes all runs of a plan that are not there yet")
    many.add_argument("plan", help="a file, or the name of one in plans/")
    many.add_argument("--jobs", type=int, default=1, help="processes at a time")
    many.set_defaults(does=_make)
    scored = commands.add_parser("score", help="what monitors say of the runs of a folder")
    scored.add_argument("folder", type=Path, nargs="+",
                        help="runs with their truths, or recordings with labels.json, or both")  # fmt: skip
    scored.add_argument("--monitor", action="append", help="these only; default: all of monitors/")
    scored.add_argument("--severity", default="warning", choices=("info", "warning", "critical"),
                        help="the least that counts as an alarm")  # fmt: skip
    scored.add_argument("--json", action="store_true")
    scored.add_argument("--synthetic", action="store_true",
                        help="the bars of made-up runs, too (minutes)")  # fmt: skip
    scored.add_argument("--bars", action="store_true",
                        help="exit with 1 if a bar is missed; else it is a report")  # fmt: skip
    scored.set_defaults(does=_score)
    return top


def main() -> int:
    args = parser().parse_args()
    try:
        return int(args.does(args))
    except (ValueError, OSError) as error:
        print(f"instabilities: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
