"""python -m bellwether open [RUN]: the page of a run, also after its job and its private server."""

from __future__ import annotations

import argparse
import os
import sys
import urllib.parse
import webbrowser
from typing import Optional

from .._server import private_server
from .._util import files
from ..query import Client, QueryError, add_client_arguments, client_of, unreachable

OK, FAILED, UNREACHABLE = 0, 1, 4
NAMED_MAX = 10

_EPILOG = """\
examples:
  python -m bellwether open
  python -m bellwether open llama
  python -m bellwether open llama --page https://bellwether:7071 --token-file token
  python -m bellwether open --private

exit codes:
  0  the address is printed
  1  there is no such run, or no server could be started; the text says why
  2  wrong usage
  4  the server could not be reached

The address is printed alone on its line, on stdout.  On a desktop a browser opens it too, unless
--print is given.  Without --page the page beside BELLWETHER_SERVER is asked, else a server at the
usual place, else your private server, which is started again over its data where it has ended.
"""


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether open",
        description="Prints the address of a run's page, or of all runs, and opens it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="the run's name or uuid (all runs)")
    parser.add_argument("--print", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--private",
        action="store_true",
        help="the page of your private server, even where another server answers",
    )
    add_client_arguments(parser)
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _with_server(given: argparse.Namespace) -> Client:
    """Raises OSError, QueryError, ServerError."""
    if given.private:
        return _private(given)
    client = client_of(given)
    if not given.is_named and private_server.running() is None:
        try:
            client.info()
        except OSError:
            return _private(given)
    return client


def _private(given: argparse.Namespace) -> Client:
    """Of the private server, which is started if it does not run."""
    server = private_server.running()
    if server is None:
        server = private_server.join_or_start()
        _say(f"your private server is started over {server.data}; it ends by itself when idle")
    given.page = server.page_url("").partition("#")[0]
    return client_of(given)


def address(page: str, run: str) -> str:
    base, _, _ = page.partition("#")
    parts = urllib.parse.urlsplit(base)
    whole = parts._replace(path=parts.path or "/").geturl()
    return f"{whole}#/run/{urllib.parse.quote(run, safe='')}" if run else whole


def _has_desktop() -> bool:
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)
    names_one = map(os.environ.get, ("BELLWETHER_PAGE", "BELLWETHER_SERVER"))
    given.is_named = bool(given.page) or any(names_one)
    try:
        client = _with_server(given)
        names = [str(run["description"]["name"]) for run in client.runs()]
        name = str(client.run(given.run)["description"]["name"]) if given.run else ""
    except QueryError as e:
        _say(f"open: {e}")
        if e.status == 404:
            known = ", ".join(files.one_line(each) for each in names[:NAMED_MAX])
            _say(f"open: the newest runs are: {known}" if known else "open: there is no run at all")
        return FAILED
    except (private_server.ServerError, ValueError) as e:
        _say(f"open: {e}")
        return FAILED
    except OSError as e:
        _say(f"open: {unreachable(given.page, e)}")
        return UNREACHABLE
    where = address(given.page, name)
    print(where, flush=True)
    if not given.print and _has_desktop():
        webbrowser.open(where)
    return OK
