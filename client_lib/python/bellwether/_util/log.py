"""Messages to the person at the terminal.  Never warnings.warn: under -W error that raises."""

from __future__ import annotations

import logging
import sys

_LOGGER = logging.getLogger("bellwether")
_LEVELS = {"error": 40, "warning": 30, "info": 20, "debug": 10}


def set_level(name: str) -> None:
    """Prints to stderr unless the program has set up logging of its own."""
    _LOGGER.setLevel(_LEVELS[name])
    if not _LOGGER.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("bellwether: %(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False


def info(text: str) -> None:
    _LOGGER.info("%s", text)


def warning(text: str) -> None:
    _LOGGER.warning("%s", text)


def debug(text: str) -> None:
    _LOGGER.debug("%s", text)
