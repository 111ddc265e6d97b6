"""What FedDD may choose by itself while it runs: the budget, when to broadcast, and who stays out of a round.

All of it is a function of the server's state; what has to be remembered is a plain dict, which a checkpoint can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feddd.core.latency import round_seconds, transfer_seconds
from feddd.strategies.protocol import Fleet, ServerState, Upload

Target = Literal["progress", "round_seconds", "round_bytes", "run_bytes"]
TARGETS: tuple[Target, ...] = ("progress", "round_seconds", "round_bytes", "run_bytes")
STEP = 1.15
"""Two budgets are tried in turn, this factor below and above the best one so far."""
TRIALS = 6
"""So many rounds of each; then the better one is the best so far."""
_HALVINGS = 30


def budget_for_seconds(round_seconds_at: Callable[[float], float], wanted: float, least: float) -> float:
    """The largest budget whose round takes no longer than wanted; the least one if none does."""
    low, high = least, 1.0
    if round_seconds_at(high) <= wanted:
        return high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if round_seconds_at(middle) <= wanted else (low, middle)
    return low


def budget_for_bytes(allowed: float, down: float, fixed_up: float, whole_up: float, least: float) -> float:
    """The budget at which a round's uploads and downloads, of which the latter are known, take what is allowed."""
    return float(np.clip((allowed - down - fixed_up) / whole_up, least, 1.0))


def trial_budget(memory: Mapping[str, Any], number: int, least: float) -> float:
    """The budget to try in a round: a step below the best one so far, then a step above it, and so on."""
    best = float(memory["budget"])
    return float(np.clip(best / STEP if number % 2 else best * STEP, least, 1.0))


def after_trial(memory: Mapping[str, Any], number: int, loss: float, seconds: float, least: float) -> dict[str, Any]:
    """What is remembered after a round: its loss tells what the round before it has brought.

    gains: of the lower and of the higher budget, [loss decrease, seconds, rounds]
    """
    gains = [list(one) for one in memory["gains"]]
    if memory["last"] is not None:
        before_loss, before_seconds, arm = memory["last"]
        gains[arm] = [gains[arm][0] + before_loss - loss, gains[arm][1] + before_seconds, gains[arm][2] + 1]
    best = float(memory["budget"])
    if min(count for *_, count in gains) >= TRIALS:
        below, above = (gain / spent for gain, spent, _ in gains)
        best = float(np.clip(best / STEP if below > above else best * STEP, least, 1.0))
        gains = [[0.0, 0.0, 0], [0.0, 0.0, 0]]
    return {"budget": best, "gains": gains, "last": [loss, seconds, 0 if number % 2 else 1]}


def begin_trials(budget: float) -> dict[str, Any]:
    """Nothing tried yet."""
    return {"budget": budget, "gains": [[0.0, 0.0, 0], [0.0, 0.0, 0]], "last": None}


def mean_loss(uploads: Sequence[Upload]) -> float:
    """Of the round's samples; NaN if nobody counted."""
    good = [upload for upload in uploads if upload.status == "ok"]
    samples = sum(upload.samples for upload in good)
    return sum(upload.samples * upload.train_loss for upload in good) / samples if samples else float("nan")


def seconds_of(uploads: Sequence[Upload], fleet: Fleet) -> float:
    """What the round took by the clock of the method."""
    places = np.array([upload.client for upload in uploads], dtype=np.int64)
    down = transfer_seconds(np.array([8.0 * u.download_bytes for u in uploads]), fleet.downlink_bits_per_s[places])
    up = transfer_seconds(np.array([8.0 * u.upload_bytes for u in uploads]), fleet.uplink_bits_per_s[places])
    return round_seconds(down, fleet.compute_seconds[places], up)


def staying_out(
    state: ServerState, fleet: Fleet, contribution: NDArray[np.float64], share: float, max_absence: int
) -> NDArray[np.bool_]:
    """Who is left out of the coming round: those that bring the least per second, up to a share of the fleet.

    max_absence: nobody is left out of more rounds in a row, and nobody who has not taken part yet
    """
    absent = state.round - state.last_round
    may = (state.last_round > 0) & (absent < max_absence)
    order = np.argsort(contribution / fleet.full_seconds, kind="stable")
    chosen = order[may[order]][: int(share * len(fleet))]
    out = np.zeros(len(fleet), dtype=np.bool_)
    out[chosen] = True
    return out
