"""A round that is asked again: how often, since when, who failed why, and when it has been enough."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING

from feddd.errors import RunError
from feddd.flower.api import logger
from feddd.strategies.checks import PATIENCE
from feddd.strategies.protocol import Upload

MOST_REASONS = 20
"""So many of them fit into an error's line."""


@dataclass
class Attempts:
    """A round from its first moment on, however often it is asked.

    planned: when it was asked first    repeated_bytes: of the attempts before this one, both ways
    failures: why clients did not count, by "client NAME"
    """

    begun: float = field(default_factory=time.monotonic)
    planned: float | None = None
    number: int = 1
    repeated_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def plan(self) -> None:
        """Begin an attempt; patience is counted from the first."""
        self.planned = self.planned or time.monotonic()

    def failed(self, client: str, round_number: int, status: str) -> None:
        """Log why a client does not count, and remember it for the round's facts."""
        logger.log(WARNING, "client %s does not count in round %d: %s", client, round_number, status)
        self.failures[f"client {client}"] = status

    def again(
        self, words: str, uploads: Sequence[Upload], left_out: Mapping[str, str], deadline_seconds: float
    ) -> None:
        """Begin the next attempt, unless patience is used up: that is a RunError with all reasons.

        It lasts for PATIENCE deadlines, of which an attempt takes one even if it fails at once.
        """
        passed = time.monotonic() - (self.planned or self.begun)
        if self.number >= PATIENCE or passed >= PATIENCE * deadline_seconds:
            words += f"; it was asked {self.number} times in {passed:.0f} s"
            raise RunError(with_reasons(words, self.failures | dict(left_out)))
        logger.log(WARNING, "%s: it is asked again", words)
        self.number += 1
        self.repeated_bytes += sum(upload.upload_bytes + upload.download_bytes for upload in uploads)

    def pause_seconds(self, least: float, most: float) -> float:
        """Return how long to wait before this attempt: twice as long as before the last."""
        return float(min(least * 2 ** (self.number - 2), most))


def with_reasons(words: str, reasons: Mapping[str, str]) -> str:
    """Return an error's line, with who failed and why."""
    shown = [f"{who}: {why}" for who, why in list(reasons.items())[:MOST_REASONS]]
    more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    return "; ".join([words, *shown, *more])
