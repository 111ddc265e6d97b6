"""A stranger's compressor and the method around it: signs and their mean magnitude, in one file outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from feddd.strategies.protocol import Plan, Task, digest
from feddd.wire.difference import Difference, Feedback
from feddd.wire.exchange import chain
from feddd.wire.stage import COMPOSED, Stage, Update, fixed_values


@dataclass(frozen=True)
class Signs(Stage):
    """Send a bit for every number, and what they are on average."""

    codes_values: ClassVar[bool] = True

    def encode(self, update: Update, states: Any, at: Any, each: Any) -> Any:
        """Give all numbers the same magnitude."""
        written, vectors = [], []
        for place in range(len(states)):
            numbers = update.chosen.take(update.values, place, at.table).numpy()
            mean = np.float32(np.abs(numbers).mean(dtype=np.float64))
            written.append((mean, numbers < 0))
            vectors.append(_values(mean, numbers < 0, fixed_values(update, place, at.table)))
        return Update(update.chosen.put(vectors, at.table), update.chosen, written), states

    def sizes(self, update: Update, table: Any) -> Any:
        """Return the bytes of signs and floats."""
        return 4 + 4 * update.chosen.fixed(table) + -(-update.chosen.numbers(table) // 8)

    def back(self, update: Update, place: int, table: Any) -> bytes:
        """Write it all."""
        mean, negative = update.coded[place]
        floats = np.array([mean, *fixed_values(update, place, table)], "<f4")
        return floats.tobytes() + np.packbits(negative).tobytes()

    def planned(self, table: Any, numbers: int, units: int) -> Any:
        """Return the same before anything is trained."""
        return numbers, units, 4 + 4 * len(table.fixed) + -(-numbers // 8)

    def read_back(self, reading: Any, table: Any) -> None:
        """Read it all."""
        count, fixed = int(reading.chosen.numbers(table)[0]), reading.chosen.fixed(table)
        floats = np.frombuffer(reading.take(4 + 4 * fixed), "<f4").astype(np.float32)
        bits = np.unpackbits(np.frombuffer(reading.take(-(-count // 8)), np.uint8))[:count]
        reading.values = _values(floats[0], bits > 0, floats[1:])

    def encoding(self, inner: int) -> int:
        """Return that of chains that have none of their own."""
        return COMPOSED


def _values(mean: np.float32, negative: Any, fixed: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.where(negative, -mean, mean), fixed]).astype(np.float32))


@dataclass(frozen=True)
class SignAvg:
    """Send signs, with what they lose added to the next ones."""

    feedback: bool = True

    def plan(self, state: Any, fleet: Any, rng: Any) -> Plan:
        """Ask everybody."""
        up = chain(Difference(), *([Feedback()] if self.feedback else []), Signs())
        return Plan(state.round + 1, tuple(Task(client, up) for client in range(len(fleet))))

    def absorb(self, state: Any, fleet: Any, plan: Plan, uploads: Any, model: Any) -> Any:
        """Remember the new model."""
        return digest(state, plan, uploads, model)


def make(**options: Any) -> SignAvg:
    """Return the method, as an experiment asks for it."""
    return SignAvg(**options)
