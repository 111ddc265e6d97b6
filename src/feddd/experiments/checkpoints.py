"""Where an interrupted run goes on: the two latest checkpoints of the strategy under way, and the rows before them.

A checkpoint is cheap when nobody needs what it holds of its own: the next download is the full model, as after a
broadcast round, or always with methods that send full models. In between the clients' own values go along, seldom.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from feddd.errors import InputError
from feddd.experiments.journal import Journal, Position, read_journal
from feddd.experiments.results import CHECKPOINTS, LAST
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
LAST_BYTES = 64e6
"""A finished strategy keeps no more of its clients' values than this; beyond, more rounds go on from further back."""

log = logging.getLogger("feddd")


class OtherFormat(InputError):
    """A checkpoint is whole, but another version has written it: its rounds are not thrown away."""


class Checkpoints:
    """Of one strategy of a run."""

    def __init__(self, folder: Path, place: int, label: str, strategy: Strategy, seconds: float | None = None) -> None:
        """place: of the strategy in the experiment    seconds: from one to the next (default: as the cost allows)"""
        self._folder, self._last = folder / CHECKPOINTS, folder / LAST
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
        """Return the latest one that is whole, and the rows up to it; OtherFormat if this version cannot read it.

        like: the strategy's model
        """
        self._folder.mkdir(exist_ok=True)
        snapshot, rows, position = None, list[Rows](), Position()
        found = sorted(self._files(), key=_round, reverse=True)
        for at, path in enumerate(found):
            try:
                snapshot, position = _load(path, like)
                rows = read_journal(self._rows, position)
                break
            except OtherFormat:
                raise
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

    def keep_last(self, simulation: Simulation, record: RoundRecord) -> None:
        """Called after the last round: keep one checkpoint that more rounds can go on from, the later the better."""
        self._last.mkdir(exist_ok=True)
        for old in self._last.glob(f"{self._place}-*.safetensors"):
            old.unlink()
        latest = max(self._files(), key=_round, default=None)
        content = self._final(simulation, record)
        if content is not None:
            write_atomically(self._last / _name(self._place, record.round, content), content)
        elif latest is not None:
            write_atomically(self._last / latest.name, latest.read_bytes())

    def _final(self, simulation: Simulation, record: RoundRecord) -> bytes | None:
        """Return the checkpoint after the last round; None if it cannot be saved or would be too large."""
        if not self._possible:
            return None
        try:
            holding = simulation.holding(self.strategy, record.state)
        except Exception as error:  # a method of one's own need not have a plan beyond the rounds that were asked for
            log.debug("strategy %r has no plan after its last round: %s", self.label, error)
            return None
        if holding and self._kept_bytes(simulation, record) > LAST_BYTES:
            return None
        try:
            return _packed(simulation.snapshot(record, holding), Position())
        except CannotBeSaved:
            return None

    def clear(self) -> None:
        """The strategy is finished: nothing of it is needed any more."""
        for path in [*self._files(), self._rows]:
            path.unlink(missing_ok=True)

    def _apart(self, cost_seconds: float) -> float:
        return cost_seconds / SHARE if self._seconds is None else self._seconds

    def _guess(self, simulation: Simulation, record: RoundRecord) -> float:
        """Return what a dear one takes: as long as the last one, the first by its size."""
        return self._dear_seconds or self._kept_bytes(simulation, record) / BYTES_PER_S

    def _kept_bytes(self, simulation: Simulation, record: RoundRecord) -> float:
        """Return about how much the clients keep for themselves."""
        bits = simulation.fleet.droppable_bits
        kept = sum((1.0 - row.upload.kept_share) * bits[row.upload.client] for row in record.clients)
        return float(kept) / 8.0

    def _write(self, snapshot: Snapshot, journal: Journal) -> None:
        """The older ones go only when the new one would survive a loss of power."""
        content = _packed(snapshot, journal.sync())
        write_atomically(self._folder / _name(self._place, snapshot.state.round, content), content)
        sync_folder(self._folder)
        self.written += 1
        for path in sorted(self._files(), key=_round, reverse=True)[KEEP:]:
            path.unlink()

    @property
    def _rows(self) -> Path:
        return self._folder / f"{self._place}.rows"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"{self._place}-*.safetensors"))


def move_last(folder: Path, place: int, rows: Callable[[int], Sequence[Rows]]) -> None:
    """Let a finished strategy's last checkpoint be found again; rows: up to a round, as they are to be gone on with."""
    for path in (folder / LAST).glob(f"{place}-*.safetensors"):
        try:
            tensors, document = _read(path)
        except (OSError, SafetensorError, *MALFORMED) as error:
            log.warning("%s cannot be used (%s); its strategy begins again", path.name, error)
            continue
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        journal = Journal(folder / CHECKPOINTS / f"{place}.rows", Position())
        journal.add(rows(_round(path)))
        content = _saved(tensors, document, journal.sync())
        write_atomically(folder / CHECKPOINTS / _name(place, _round(path), content), content)
        sync_folder(folder / CHECKPOINTS)


def _packed(snapshot: Snapshot, position: Position) -> bytes:
    tensors, document = pack_snapshot(snapshot)
    return _saved(tensors, document | {"format": FORMAT}, position)


def _saved(tensors: dict[str, Tensor], document: Mapping[str, Any], position: Position) -> bytes:
    whole = {**document, "journal": [position.length, position.sha256]}
    return safetensors.torch.save(tensors, {"feddd": json.dumps(whole)})


def _name(place: int, number: int, content: bytes) -> str:
    """Return a checkpoint's name says what it holds: which strategy, after which round, and the digest of it all."""
    return f"{place}-{number}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"


def _round(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdecimal() else 0


def _load(path: Path, like: Mapping[str, Tensor]) -> tuple[Snapshot, Position]:
    """Return a checkpoint, and where its rows end."""
    tensors, document = _read(path)
    return unpack_snapshot(tensors, document, like), Position(*document["journal"])


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parts of a checkpoint whose content is what its name says."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:32] != path.stem.split("-")[-1]:
        raise ValueError("it is damaged")
    with safe_open(path, framework="pt") as file:
        document: dict[str, Any] = json.loads((file.metadata() or {})["feddd"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if document["format"] != FORMAT:
        raise OtherFormat(
            f"{path} has checkpoint format {document['format']!r:.80}, and this version reads {FORMAT}: go on with the "
            f"version of feddd that environment.json names, or delete {path.parent} to begin again"
        )
    return tensors, document
