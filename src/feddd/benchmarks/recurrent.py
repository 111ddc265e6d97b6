"""How long a round of a recurrent network takes, beside a plain loop: next characters, 100 clients."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from feddd.benchmarks.measuring import (
    Figure,
    Settings,
    own_script,
    program,
    ratio,
    simulated,
    take_turns,
    write_work,
)
from feddd.core.streams import stream
from feddd.simulation.simulator import World
from feddd.simulation.training import Training
from feddd.strategies.fedavg import FedAvg
from feddd.world import fleets
from feddd.world.datasets import ImageDataset

CHARACTERS, LENGTH, TEXTS, BATCH = 80, 80, 40, 10
"""As in the federated Shakespeare of LEAF: an alphabet of 80, 80 characters and then the one that follows."""


class NextCharacter(nn.Module):
    """An LSTM that reads characters and gives the logits of the next one."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, 8)
        self.memory = nn.LSTM(8, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, CHARACTERS)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [batch, characters]."""
        states, _ = self.memory(self.characters(inputs.flatten(1).round().long()))
        logits: Tensor = self.head(states[:, -1])
        return logits


def small() -> nn.Module:
    """Return one layer of 128."""
    return NextCharacter(128, 1)


def large() -> nn.Module:
    """Return two layers of 256, as in LEAF."""
    return NextCharacter(256, 2)


def recurrent(settings: Settings) -> Iterator[Figure]:
    """FedAvg with LSTMs, 40 texts of 80 characters a client, beside a plain loop with torch's optimiser."""
    for model, title, clients in (("small", "128 × 1", 100), ("large", "256 × 2", 24)):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # The loop trains fewer clients in its turns: its speed does not depend on how many there are.
            fewer = clients // 4
            write_work(next_character_world(model, fewer), {}, folder)
            steps = {
                "feddd": stack.enter_context(simulated(next_character_world(model, clients), FedAvg())),
                "loop": stack.enter_context(program(sys.executable, own_script("torch_loop"), str(folder))),
            }
            seconds = take_turns(steps, settings.rounds)
        ours, theirs = (statistics.median(seconds[name]) for name in ("feddd", "loop"))
        times = clients / fewer * ratio(seconds["loop"], seconds["feddd"])
        detail = f"{clients * TEXTS / ours:.4g} against {fewer * TEXTS / theirs:.4g} texts/s"
        what = f"LSTM {title}, faster than a plain two-thread loop"
        yield Figure("recurrent", what, times, "×", 2.0, detail=detail)


def next_character_world(model: str, clients: int) -> World:
    """Return clients with random texts: how long a step takes does not depend on what it reads."""
    rng, count = stream(0, "texts"), TEXTS * clients
    texts = rng.integers(0, CHARACTERS, (count + 1, 1, 1, LENGTH)).astype(np.uint8)
    following = rng.integers(0, CHARACTERS, count + 1)
    arrays = (texts[:-1], following[:-1], texts[-1:], following[-1:])
    data = ImageDataset(*arrays, classes=CHARACTERS, mean=(0.0,), deviation=(1 / 255,))  # a network sees the bytes
    parts = [np.arange(TEXTS * client, TEXTS * (client + 1)) for client in range(clients)]
    devices = fleets.Devices(*(np.full(clients, value) for value in (1e4, 1e5, 1.0)))
    training = Training(batch_size=BATCH, learning_rate=0.1)
    return World(data, parts, devices, f"feddd.benchmarks.recurrent:{model}", training, seed=0)
