"""Progress for logs: now and then a line on stderr, where no terminal shows a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

STEP = 0.1
"""A line after every tenth of the work …"""
LEAST_SECONDS, MOST_SECONDS = 5.0, 30.0
"""… but never sooner than this after the one before, and never later than that."""


class ProgressLines:
    """Says how far the work is; what was done before this process began counts as done, and not for the speed."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._latest = clock()
        self._first: float | None = None
        self._told = 0.0

    def tell(self, before: float, after: float, words: str) -> None:
        """Some work is done, from one share of all of it to another; words: what it was."""
        now = self._clock()
        if self._first is None:
            self._first = self._told = before
        waited = now - self._latest
        if waited < LEAST_SECONDS or (waited < MOST_SECONDS and after - self._told < STEP - 1e-9):
            return
        self._latest, self._told = now, after
        elapsed = now - self._begun
        left = elapsed * (1.0 - after) / max(after - self._first, 1e-9)
        times = f"elapsed {clock_time(elapsed)}, about {clock_time(left)} left"
        line = "".join(letter if letter.isprintable() else "�" for letter in f"{words}, {times}")
        sys.stderr.write(f"feddd: {line}\n")
        sys.stderr.flush()


def clock_time(seconds: float) -> str:
    """0:27 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
