"""Fleets that misbehave: what befalls whom in a round, drawn from addresses.

The draws know neither the strategy nor the workers, so that every strategy of an experiment meets the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddd.core.streams import stream

Floats = NDArray[np.float64]
Range = float | tuple[float, float]

ANSWERS = ("lost", "crashed", "garbage", "corrupted", "non_finite", "wrong_model", "replayed", "lying")
"""What can become of a client's answer; at most one of them in a round."""
GONE = "gone"


@dataclass(frozen=True)
class Faults:
    """How a fleet misbehaves. Plain shares are probabilities per client and round.

    unreliable: the share of the clients that faults can befall; the others are always well
    lost: it is not there in this round    gone: it leaves for good    crashed: after training, before its upload
    late: it starts so many late_seconds after the others
    slow, links: a spell of spell_rounds begins, in which it computes slow_factor times slower, or its links have
    link_factor of their rates    garbage: it sends random bytes    corrupted: some bytes of its payload are random
    non_finite: one of its values is    wrong_model: it sends another model's payload    replayed: an old answer
    lying: it reports lie_factor times its samples and its loss
    deadline_seconds: a round goes on without those that have not answered by then, if `quorum` have; None: it waits
    """

    unreliable: float = 1.0
    lost: float = 0.0
    gone: float = 0.0
    crashed: float = 0.0
    late: float = 0.0
    late_seconds: Range = (60.0, 600.0)
    slow: float = 0.0
    slow_factor: float = 10.0
    links: float = 0.0
    link_factor: Range = (0.1, 1.0)
    spell_rounds: int = 5
    garbage: float = 0.0
    corrupted: float = 0.0
    non_finite: float = 0.0
    wrong_model: float = 0.0
    replayed: float = 0.0
    lying: float = 0.0
    lie_factor: float = 10.0
    deadline_seconds: float | None = None
    quorum: int = 1

    def __post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in ANSWERS)
        if total > 1.0 + 1e-9:
            raise ValueError(f"{', '.join(ANSWERS)} exclude each other, and add up to {total:g}, more than 1")


@dataclass(frozen=True)
class Trouble:
    """What befalls every client in a round, whoever is asked; all [clients].

    answer: "" or one of ANSWERS or GONE    delay_seconds: before it starts
    compute_factor: on its seconds    link_factor: on its rates
    """

    answer: NDArray[np.str_]
    delay_seconds: Floats
    compute_factor: Floats
    link_factor: Floats


def draw(faults: Faults, seed: int, number: int, clients: int) -> Trouble:
    """Return the trouble of a round."""
    struck = _unreliable(faults, seed, clients)
    chance = _chances(seed, number, clients)
    edges = np.cumsum([getattr(faults, kind) for kind in ANSWERS])
    answer = np.array([*ANSWERS, ""])[np.searchsorted(edges, chance["answer"], side="right")]
    if faults.gone > 0.0:
        leaves = stream(seed, "faults", "gone").geometric(faults.gone, clients)
        answer[leaves <= number] = GONE
    late = struck & (chance["late"] < faults.late)
    compute, links = np.ones(clients), np.ones(clients)
    for begun in range(max(1, number - faults.spell_rounds + 1), number + 1):
        then = _chances(seed, begun, clients)
        compute[struck & (then["slow"] < faults.slow)] = faults.slow_factor
        changed = struck & (then["links"] < faults.links)
        links[changed] = _between(faults.link_factor, then["link_factor"])[changed]
    return Trouble(
        np.where(struck, answer, ""),
        np.where(late, _between(faults.late_seconds, chance["late_seconds"]), 0.0),
        compute,
        links,
    )


def _unreliable(faults: Faults, seed: int, clients: int) -> NDArray[np.bool_]:
    """Return which clients faults can befall."""
    struck = np.zeros(clients, dtype=np.bool_)
    count = round(faults.unreliable * clients)
    struck[stream(seed, "faults", "unreliable").permutation(clients)[:count]] = True
    return struck


_COLUMNS = ("answer", "late", "late_seconds", "slow", "links", "link_factor")


def _chances(seed: int, number: int, clients: int) -> dict[str, Floats]:
    """Uniform numbers of a round; a client's do not depend on how many others there are."""
    table = stream(seed, "faults", number).random((clients, len(_COLUMNS)))
    return dict(zip(_COLUMNS, table.T, strict=True))


def _between(bounds: Range, at: Floats) -> Floats:
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    return low + (high - low) * at
