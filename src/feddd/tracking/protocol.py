"""What a tracker is: told what it tracks, then a dict of numbers after every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Setting = str | int | float | bool


@dataclass(frozen=True)
class Tracked:
    """One strategy on one seed: what one tracker follows.

    experiment: its name    run: the name of the run's folder    label: the strategy's, unlike any other of the run
    settings: the resolved experiment by dotted keys, with this strategy's own as strategy.KEY
    folder: the tracker's own, below the run's; whatever it keeps there is found again on resume
    after: the rounds that were done before, and are not told again; 0 at the start
    """

    experiment: str
    run: str
    label: str
    seed: int
    settings: Mapping[str, Setting]
    folder: Path
    after: int


class Tracker(Protocol):
    """Made with a `Tracked`; `view` says in one line how to look at what it has written."""

    view: str

    def __init__(self, tracked: Tracked) -> None: ...

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Take in a round: the columns of the table `rounds` that are known, and the bytes since the start.

        The metric is there by its name: test_accuracy, test_mae.
        A run that was interrupted may repeat its latest rounds, with the same values.
        """
        ...

    def close(self, *, finished: bool) -> None:
        """Write what is left; finished: whether all rounds are done, or the run may be gone on with."""
        ...
