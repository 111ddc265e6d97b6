"""Wall seconds by phase."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds the time since the last lap to a phase's seconds."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Everything since the last lap was this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
