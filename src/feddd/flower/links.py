"""What the server believes about the clients' links, which no app code can see.

The allocation needs 1/r_up + 1/r_down per client. A round's turnaround is overhead + computing + bits × that sum:
computing is reported, overhead (polling, some seconds) is measured with messages that carry nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

DEFAULT_UPLINK_BITS_PER_S = 1e6
DEFAULT_DOWNLINK_BITS_PER_S = 4e6
MEMORY = 0.5
"""Weight of the newest observation against what was believed before."""


@dataclass(frozen=True)
class Link:
    """One client: its rates, and how long it computes in a round."""

    uplink_bits_per_s: float = DEFAULT_UPLINK_BITS_PER_S
    downlink_bits_per_s: float = DEFAULT_DOWNLINK_BITS_PER_S
    compute_seconds: float = math.nan

    def __post_init__(self) -> None:
        if not (0 < self.uplink_bits_per_s < math.inf and 0 < self.downlink_bits_per_s < math.inf):
            raise ValueError(
                f"rates must be finite and above 0, not {self.uplink_bits_per_s} and {self.downlink_bits_per_s}"
            )

    @property
    def seconds_per_bit(self) -> float:
        """1/r_up + 1/r_down."""
        return 1.0 / self.uplink_bits_per_s + 1.0 / self.downlink_bits_per_s


class Links(Protocol):
    """Beliefs about links, by client id."""

    def introduce(self, client: str, uplink_bits_per_s: float, downlink_bits_per_s: float) -> None:
        """A client says hello, with its own rates if it was told them (else 0)."""
        ...

    def idle(self, seconds: float) -> None:
        """A message that carried nothing took so long there and back."""
        ...

    def observe(self, client: str, *, turnaround_seconds: float, compute_seconds: float, bits: float) -> None:
        """A round of a client: how long it took, and how many bits travelled both ways."""
        ...

    def __getitem__(self, client: str) -> Link: ...


@dataclass(frozen=True)
class FixedLinks:
    """Links that are known and do not change."""

    links: Mapping[str, Link]

    def introduce(self, client: str, uplink_bits_per_s: float, downlink_bits_per_s: float) -> None:
        """Only clients that are known may come."""
        if client not in self.links:
            raise ValueError(f"no link is known for client {client!r}")

    def idle(self, seconds: float) -> None:
        """Learn nothing."""

    def observe(self, client: str, *, turnaround_seconds: float, compute_seconds: float, bits: float) -> None:
        """Learn nothing."""

    def __getitem__(self, client: str) -> Link:
        return self.links[client]


@dataclass
class MeasuredLinks:
    """Links that start from what clients were told, or from defaults, and follow what rounds show."""

    default: Link = field(default_factory=Link)
    _links: dict[str, Link] = field(default_factory=dict)
    _idle_seconds: list[float] = field(default_factory=list)

    @property
    def overhead_seconds(self) -> float:
        """Return what a message costs that carries nothing: the median of those seen."""
        seen = sorted(self._idle_seconds)
        return seen[len(seen) // 2] if seen else 0.0

    def introduce(self, client: str, uplink_bits_per_s: float, downlink_bits_per_s: float) -> None:
        """What the client was told about itself counts until rounds show otherwise."""
        if client not in self._links:
            told = uplink_bits_per_s > 0 and downlink_bits_per_s > 0
            self._links[client] = Link(uplink_bits_per_s, downlink_bits_per_s) if told else self.default

    def idle(self, seconds: float) -> None:
        """Remember the last hundred."""
        self._idle_seconds = [*self._idle_seconds[-99:], seconds]

    def observe(self, client: str, *, turnaround_seconds: float, compute_seconds: float, bits: float) -> None:
        """Move the belief halfway to what this round shows; the ratio of the two directions stays as it was told.

        A transfer that takes less than the overhead says only that the link is not slower than believed.
        """
        old = self[client]
        transfer_seconds = turnaround_seconds - compute_seconds - self.overhead_seconds
        seconds_per_bit = old.seconds_per_bit
        shown = max(transfer_seconds, 0.0) / bits if bits > 0 else seconds_per_bit
        if transfer_seconds > self.overhead_seconds:
            seconds_per_bit = MEMORY * shown + (1 - MEMORY) * seconds_per_bit
        else:
            limit = max(self.overhead_seconds, 1e-3) / bits if bits > 0 else seconds_per_bit
            seconds_per_bit = min(seconds_per_bit, limit)
        change = old.seconds_per_bit / seconds_per_bit
        known = old.compute_seconds if not math.isnan(old.compute_seconds) else compute_seconds
        self._links[client] = Link(
            old.uplink_bits_per_s * change,
            old.downlink_bits_per_s * change,
            MEMORY * compute_seconds + (1 - MEMORY) * known,
        )

    def __getitem__(self, client: str) -> Link:
        return self._links.get(client, self.default)
