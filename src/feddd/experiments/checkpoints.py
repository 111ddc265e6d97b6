"""Where an interrupted run goes on: the two latest checkpoints of the strategy under way, and the rows before them.

A checkpoint is cheap when nobody needs what it holds of its own: the next download is the full model, as after a
broadcast round, or always with methods that send full models. In between the clients' own values go along, seldom.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from feddd.experiments.journal import Journal, Position, read_journal
from feddd.experiments.results import CHECKPOINTS
from feddd.experiments.tables import Rows
from feddd.files import sync_folder, write_atomically
from feddd.simulation.simulator import RoundRecord, Simulation
from feddd.simulation.snapshot import Snapshot, pack_snapshot, unpack_snapshot
from feddd.strategies.packing import MALFORMED, CannotBeSaved
from feddd.strategies.protocol import Strategy

FORMAT = 4
KEEP = 2
SHARE = 0.01
"""Checkpoints take at most this share of a run's time: the dearer, the fewer."""
FIRST_SECONDS = 0.01
"""What the first one is expected to take."""
DEAR_SECONDS = 120.0
"""Checkpoints with clients' own values lie at least so far apart."""
BYTES_PER_S = 5e7
"""A guess at how fast clients' values are saved, for the first time."""

log = logging.getLogger("feddd")


class Checkpoints:
    """Of one strategy of a run."""

    def __init__(self, folder: Path, place: int, label: str, strategy: Strategy, seconds: float | None = None) -> None:
        """place: of the strategy in the experiment    seconds: from one to the next (default: as the cost allows)"""
        self._folder = folder / CHECKPOINTS
        self._place = place
        self.label = label
        self.strategy = strategy
        self._seconds = seconds
        self._journal: Journal | None = None
        self._cheap_seconds, self._dear_seconds = FIRST_SECONDS, 0.0
        self._latest = time.monotonic()
        self._possible = True
        self.written = 0

    def find(self, like: Mapping[str, Tensor]) -> tuple[Snapshot | None, list[Rows]]:
        """The latest one that is whole, and the rows up to it; like: the strategy's model."""
        self._folder.mkdir(exist_ok=True)
        snapshot, rows, position = None, list[Rows](), Position()
        found = sorted(self._files(), key=_round, reverse=True)
        for at, path in enumerate(found):
            try:
                snapshot, position = _load(path, like)
                rows = read_journal(self._rows, position)
                break
            except (OSError, SafetensorError, *MALFORMED) as error:
                snapshot, position = None, Position()
                instead = f"{found[at + 1].name} is used" if found[at + 1 :] else f"{self.label} begins again"
                log.warning("checkpoint %s cannot be used (%s); %s", path.name, error, instead)
                path.unlink()
        self._journal = Journal(self._rows, position)
        self._latest = time.monotonic()
        return snapshot, rows

    def offer(self, simulation: Simulation, record: RoundRecord, rows: Sequence[Rows]) -> None:
        """Called after every round but the last: write a checkpoint if it is time for one."""
        assert self._journal is not None, "find comes first"
        self._journal.add(rows)
        now = time.monotonic()
        if not self._possible or now - self._latest < self._apart(self._cheap_seconds):
            return
        holding = simulation.holding(self.strategy, record.state)
        if holding and now - self._latest < self._apart(max(self._guess(simulation, record), SHARE * DEAR_SECONDS)):
            return
        try:
            self._write(simulation.snapshot(record, holding), self._journal)
        except CannotBeSaved as error:
            self._possible = False
            log.warning("strategy %r: %s; interrupted, it will begin again", self.label, error)
        self._latest = time.monotonic()
        if holding:
            self._dear_seconds = self._latest - now
        else:
            self._cheap_seconds = self._latest - now

    def clear(self) -> None:
        """The strategy is finished: nothing of it is needed any more."""
        for path in [*self._files(), self._rows]:
            path.unlink(missing_ok=True)

    def _apart(self, cost_seconds: float) -> float:
        return cost_seconds / SHARE if self._seconds is None else self._seconds

    def _guess(self, simulation: Simulation, record: RoundRecord) -> float:
        """What a dear one takes: as long as the last one, the first by its size."""
        bits = simulation.fleet.droppable_bits
        kept = sum((1.0 - row.upload.kept_share) * bits[row.upload.client] for row in record.clients)
        return self._dear_seconds or float(kept) / 8.0 / BYTES_PER_S

    def _write(self, snapshot: Snapshot, journal: Journal) -> None:
        """The older ones go only when the new one would survive a loss of power."""
        tensors, document = pack_snapshot(snapshot)
        position = journal.sync()
        document |= {"format": FORMAT, "journal": [position.length, position.sha256]}
        content = safetensors.torch.save(tensors, {"feddd": json.dumps(document)})
        digest = hashlib.sha256(content).hexdigest()[:32]
        write_atomically(self._folder / f"{self._place}-{snapshot.state.round}-{digest}.safetensors", content)
        sync_folder(self._folder)
        self.written += 1
        for path in sorted(self._files(), key=_round, reverse=True)[KEEP:]:
            path.unlink()

    @property
    def _rows(self) -> Path:
        return self._folder / f"{self._place}.rows"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"{self._place}-*.safetensors"))


def _round(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdecimal() else 0


def _load(path: Path, like: Mapping[str, Tensor]) -> tuple[Snapshot, Position]:
    """A checkpoint whose content is what its name says."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:32] != path.stem.split("-")[-1]:
        raise ValueError("it is damaged")
    with safe_open(path, framework="pt") as file:
        document: dict[str, Any] = json.loads((file.metadata() or {})["feddd"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if document["format"] != FORMAT:
        raise ValueError(f"it has format {document['format']}, not {FORMAT}")
    return unpack_snapshot(tensors, document, like), Position(*document["journal"])
