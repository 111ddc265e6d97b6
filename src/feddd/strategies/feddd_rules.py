"""The rules of FedDD that may look at how a run goes: its budget, when it broadcasts, and who stays out of a round.

Each is a small object that FedDD builds from its fields. It checks its own settings, decides from the server's state,
and says what it has to remember: a plain dict or an array over clients, which a checkpoint can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from feddd.core.latency import round_seconds, transfer_seconds
from feddd.strategies.protocol import Fleet, Plan, ServerState, Upload, download_shares

Target = Literal["progress", "round_seconds", "round_bytes", "run_bytes"]
TARGETS: tuple[Target, ...] = ("progress", "round_seconds", "round_bytes", "run_bytes")
Memory = Mapping[str, Any]
STEP = 1.15
"""Two budgets are tried in turn, this factor below and above the best one so far."""
TRIALS = 6
"""So many rounds of each; then the better one is the best so far."""
FIRST_TRIAL = 0.6
_HALVINGS = 30


@dataclass(frozen=True)
class Coming:
    """A round that is to be decided.

    everything: who is sent the full model    least: the smallest budget there is
    seconds_at: what the round takes at a budget
    """

    state: ServerState
    fleet: Fleet
    everything: NDArray[np.bool_]
    least: float
    seconds_at: Callable[[float], float]


class Budget(Protocol):
    """How the share of all parameters that clients upload in a round is chosen."""

    def choose(self, coming: Coming) -> float:
        """Return A for the coming round."""
        ...

    def remember(self, memory: Memory, plan: Plan, uploads: Sequence[Upload], fleet: Fleet) -> dict[str, Any]:
        """Return what the next choice needs; memory: what was remembered before."""
        ...


class _NoMemory:
    def remember(self, memory: Memory, plan: Plan, uploads: Sequence[Upload], fleet: Fleet) -> dict[str, Any]:
        """Remember nothing."""
        return {}


@dataclass(frozen=True)
class FixedBudget(_NoMemory):
    """The same share in every round."""

    share: float

    def choose(self, coming: Coming) -> float:
        """Return the share."""
        return self.share


@dataclass(frozen=True)
class SecondsBudget(_NoMemory):
    """The largest budget whose round takes no longer than wanted; the least one if none does."""

    wanted_seconds: float

    def choose(self, coming: Coming) -> float:
        """Halve the interval of budgets until it is small."""
        low, high = coming.least, 1.0
        if coming.seconds_at(high) <= self.wanted_seconds:
            return high
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if coming.seconds_at(middle) <= self.wanted_seconds else (low, middle)
        return low


@dataclass(frozen=True)
class BytesBudget(_NoMemory):
    """The budget at which a round's uploads and downloads, of which the latter are known, take what is allowed."""

    allowed_bytes: float

    def choose(self, coming: Coming) -> float:
        """Return the share of the uploads that is left after what must travel anyway."""
        return bytes_share(self.allowed_bytes, coming)


@dataclass(frozen=True)
class RunBytesBudget:
    """The same for a whole run: every round gets its share of the bytes that are left."""

    allowed_bytes: float
    rounds: int

    def choose(self, coming: Coming) -> float:
        """Return the budget of a round that takes its share of what is left."""
        left_rounds = max(1, self.rounds - coming.state.round)
        left_bytes = max(0.0, self.allowed_bytes - _number(memory_of(coming.state), "spent"))
        return bytes_share(left_bytes / left_rounds, coming)

    def remember(self, memory: Memory, plan: Plan, uploads: Sequence[Upload], fleet: Fleet) -> dict[str, Any]:
        """Add what the round took to what was spent."""
        sent = sum(upload.upload_bytes + upload.download_bytes for upload in uploads)
        return {"spent": _number(memory, "spent") + float(sent)}


@dataclass(frozen=True)
class ProgressBudget:
    """The budget with the greatest decrease of the loss per second, found by trying two in turn.

    gains: of the lower and of the higher budget, [loss decrease, seconds, rounds]    last: the latest round's loss,
    seconds, and which of the two it tried
    """

    least: float

    def choose(self, coming: Coming) -> float:
        """Return a step below the best budget so far, then a step above it, and so on."""
        best = float(_trials(memory_of(coming.state))["budget"])
        return self._stepped(best, lower=bool((coming.state.round + 1) % 2))

    def remember(self, memory: Memory, plan: Plan, uploads: Sequence[Upload], fleet: Fleet) -> dict[str, Any]:
        """Credit the round before with the decrease of the loss; after enough trials move to the better budget."""
        known, loss = _trials(memory), mean_loss(uploads)
        if np.isnan(loss):
            return known
        gains = [list(one) for one in known["gains"]]
        if known["last"] is not None:
            before_loss, before_seconds, arm = known["last"]
            gains[arm] = [gains[arm][0] + before_loss - loss, gains[arm][1] + before_seconds, gains[arm][2] + 1]
        best = float(known["budget"])
        if min(count for *_, count in gains) >= TRIALS:
            below, above = (gain / spent for gain, spent, _ in gains)
            best = self._stepped(best, lower=below > above)
            gains = [[0.0, 0.0, 0], [0.0, 0.0, 0]]
        return {"budget": best, "gains": gains, "last": [loss, seconds_of(uploads, fleet), 0 if plan.round % 2 else 1]}

    def _stepped(self, best: float, *, lower: bool) -> float:
        return float(np.clip(best / STEP if lower else best * STEP, self.least, 1.0))


def make_budget(budget: float | str, target: str, value: float, rounds: int, least: float) -> Budget:
    """Return the rule that FedDD's fields describe; a ValueError says what in them does not go together."""
    if target not in TARGETS:
        raise ValueError(f"auto_target must be one of {', '.join(TARGETS)}, not {target!r}")
    if not isinstance(budget, str):
        return FixedBudget(budget)
    if target == "progress":
        return ProgressBudget(least)
    if not 0 < value < np.inf:
        raise ValueError(f"auto_target {target!r} needs an auto_value above 0, not {value}")
    if target == "run_bytes":
        if rounds < 1:
            raise ValueError("auto_target 'run_bytes' needs auto_rounds, the rounds that share the bytes")
        return RunBytesBudget(value, rounds)
    return SecondsBudget(value) if target == "round_seconds" else BytesBudget(value)


@dataclass(frozen=True)
class Broadcasts:
    """When everybody is sent the full model: every h rounds, and when masks have cost too much since the last time.

    every: h, 0 for never    later: (round, h) pairs, from that round on another h
    most_error: what the mask errors since the last broadcast may add up to, None for any
    """

    every: int
    later: tuple[tuple[int, int], ...] = ()
    most_error: float | None = None

    def __post_init__(self) -> None:
        if self.most_error is not None and not self.most_error > 0:
            raise ValueError(f"broadcast_error must be above 0, not {self.most_error}")
        if self.every < 0:
            raise ValueError(f"broadcast_every must be at least 0 (0: never), not {self.every}")
        turns = [turn for turn, _ in self.later]
        if turns != sorted(set(turns)) or any(turn < 2 or every < 0 for turn, every in self.later):
            raise ValueError(
                "broadcast_later takes (round, h) pairs with rounds that go up from 2 and h of at least 0 (0: never), "
                f"not {[list(pair) for pair in self.later]}"
            )

    @property
    def always_come(self) -> bool:
        """Return whether there is no time from which on nobody is sent the full model."""
        return 0 not in [self.every, *(every for _, every in self.later)]

    def due(self, state: ServerState) -> bool:
        """Return whether the coming round begins with the full model for everybody."""
        if self.most_error is not None and self._error(state) >= self.most_error:
            return True
        later = [every for turn, every in self.later if turn <= state.round]
        every = later[-1] if later else self.every
        return state.round == 0 or (every > 0 and state.round % every == 0)

    def remember(self, state: ServerState, plan: Plan) -> dict[str, Any]:
        """Add up the mask errors since the last broadcast, where they matter."""
        if self.most_error is None:
            return {}
        return {"drift": 0.0 if plan.broadcast else self._error(state)}

    def _error(self, state: ServerState) -> float:
        return _number(memory_of(state), "drift") + float(np.nan_to_num(state.mask_error))


@dataclass(frozen=True)
class Absences:
    """Who stays out of a round that does not begin with a broadcast: those that bring the least per second.

    share: of the fleet, at most    most_rounds: nobody is left out of more of them in a row
    """

    share: float
    most_rounds: int

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or self.most_rounds < 1:
            raise ValueError("leave_out must lie between 0 and 1, and max_absence be at least 1")

    def choose(self, state: ServerState, fleet: Fleet, contribution: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return who is left out of the coming round; nobody who has not taken part yet."""
        may = (state.last_round > 0) & (state.round - state.last_round < self.most_rounds)
        order = np.argsort(contribution / fleet.full_seconds, kind="stable")
        out = np.zeros(len(fleet), dtype=np.bool_)
        out[order[may[order]][: int(self.share * len(fleet))]] = True
        return out

    def remembered(self, state: ServerState) -> NDArray[np.bool_]:
        """Return which clients have only not been asked since they last answered."""
        nobody = np.zeros(len(state.clients), dtype=np.bool_)
        return state.client_memory.get("left_out", nobody).copy()

    def remember(self, state: ServerState, plan: Plan) -> dict[str, NDArray[np.bool_]]:
        """Return who was left out, so that it is not taken for one that failed."""
        if not self.share:
            return {}
        left_out = self.remembered(state) | (state.last_round == state.round)
        # Nobody is left out of a broadcast: who was not asked was not there, and has missed it.
        left_out[[task.client for task in plan.tasks] if not plan.broadcast else slice(None)] = False
        return {"left_out": left_out}


def bytes_share(allowed: float, coming: Coming) -> float:
    """Return the share of all parameters that may be uploaded if the round is to take so many bytes both ways."""
    fleet, shares = coming.fleet, download_shares(coming.state, coming.everything)
    down = float((shares * fleet.droppable_bits + fleet.fixed_bits).sum()) / 8
    fixed, whole = float(fleet.fixed_bits.sum()) / 8, float(fleet.droppable_bits.sum()) / 8
    return float(np.clip((allowed - down - fixed) / whole, coming.least, 1.0))


def mean_loss(uploads: Sequence[Upload]) -> float:
    """Return the mean loss of the round's samples; NaN if nobody counted."""
    good = [upload for upload in uploads if upload.status == "ok"]
    samples = sum(upload.samples for upload in good)
    return sum(upload.samples * upload.train_loss for upload in good) / samples if samples else float("nan")


def seconds_of(uploads: Sequence[Upload], fleet: Fleet) -> float:
    """Return what the round took by the clock of the method."""
    places = np.array([upload.client for upload in uploads], dtype=np.int64)
    down = transfer_seconds(np.array([8.0 * u.download_bytes for u in uploads]), fleet.downlink_bits_per_s[places])
    up = transfer_seconds(np.array([8.0 * u.upload_bytes for u in uploads]), fleet.uplink_bits_per_s[places])
    return round_seconds(down, fleet.compute_seconds[places], up)


def memory_of(state: ServerState) -> Memory:
    """Return what FedDD remembers in all; nothing before the first round."""
    return state.memory if isinstance(state.memory, dict) else {}


def _trials(memory: Memory) -> dict[str, Any]:
    begun = {"budget": FIRST_TRIAL, "gains": [[0.0, 0.0, 0], [0.0, 0.0, 0]], "last": None}
    return {key: memory.get(key, value) for key, value in begun.items()}


def _number(memory: Memory, key: str) -> float:
    return float(memory.get(key, 0.0))
