"""A shard: some clients with their data and kept state, trained in one thread; the unit of parallelism.

Clients are grouped in fixed blocks. A shard owns whole blocks and returns partial sums of them, so that traffic to the
coordinator is O(model), not O(clients × model), and the same numbers are added in the same order by any number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.aggregation import Aggregator, Sums, add_sums
from feddd.core.payload import coverage_size, decode, encode, pack_mask, payload_size, unpack_mask
from feddd.core.streams import stream
from feddd.core.submodel import narrow_coverage, slice_model
from feddd.core.units import Mask, Units, units
from feddd.simulation.reduction import Node, reduce_tree
from feddd.simulation.trainers import Train, make_trainer
from feddd.simulation.training import Evaluation, Start, Trained, Training, evaluate
from feddd.strategies.client import Kept, complement, receive, report
from feddd.strategies.protocol import Task, Upload
from feddd.world import datasets, models
from feddd.world.partitions import label_counts, label_coverage

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class ShardSpec:
    """All that a shard needs to build itself, small enough to send.

    blocks: block number → its clients; there are block_count in all
    parts: client → its sample numbers    widths: client → its sub-model
    test_chunks: chunk number → (start, end) of the test samples it evaluates
    coverage: CR(k) per layer of the global model, None if all models are equal
    wire: send every payload through encode and decode instead of only charging its size
    """

    dataset: str
    data_dir: Path | None
    model: str
    seed: int
    training: Training
    block_count: int
    blocks: Mapping[int, Sequence[int]]
    parts: Mapping[int, NDArray[np.int64]]
    widths: Mapping[int, int]
    test_chunks: Mapping[int, tuple[int, int]]
    coverage: Arrays | None = None
    wire: bool = False


@dataclass(frozen=True)
class Partial:
    """Partial sums of some blocks: of what was sent, and of what was not (for the mask error; None if all was sent)."""

    sent: Sums
    dropped: Sums | None


@dataclass(frozen=True)
class ShardResult:
    """A shard's round: what its clients reported, and the sums of the subtrees that it owns whole."""

    uploads: tuple[Upload, ...]
    partials: Mapping[Node, Partial]


@dataclass(frozen=True)
class _Width:
    """One sub-model: its network (trained in place), layer table and coverage."""

    module: nn.Module
    units: Units
    coverage: Mapping[str, Tensor] | None
    train: Train


@dataclass
class Shard:
    """Owns its clients for the length of a run."""

    spec: ShardSpec
    _kept: dict[int, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        data = datasets.load(spec.dataset, spec.data_dir, verify=False)
        self._classes = data.classes
        self._data = {n: _tensors(data, data.train_images, data.train_labels, part) for n, part in spec.parts.items()}
        self._test = {
            chunk: _tensors(data, data.test_images, data.test_labels, np.arange(*bounds))
            for chunk, bounds in spec.test_chunks.items()
        }
        shape = data.train_images.shape[1:]
        coverage = {name: torch.from_numpy(share) for name, share in (spec.coverage or {}).items()}
        self._widths = {}
        for width in sorted({0, *spec.widths.values()}):
            module = models.build(spec.model, shape, data.classes, width)
            table = units(module)
            own = narrow_coverage(coverage, table) if coverage else None
            self._widths[width] = _Width(module, table, own, make_trainer(module, spec.training.trainer))
        self._label_coverage = {
            n: float(label_coverage(label_counts(labels.numpy(), [np.arange(len(labels))], self._classes))[0])
            for n, (_, labels) in self._data.items()
        }

    def reset(self) -> None:
        """Forget what clients kept: another strategy starts."""
        self._kept.clear()

    def train(self, number: int, tasks: Sequence[Task], model: Arrays) -> ShardResult:
        """Run one round for the tasks of this shard's clients."""
        with single_thread():
            global_model = _from_arrays(model)
            by_client = {task.client: task for task in tasks}
            uploads: list[Upload] = []
            partials: dict[Node, Partial] = {}
            for block, clients in self.spec.blocks.items():
                mine = [by_client[client] for client in clients if client in by_client]
                own, partials[0, block] = self._train_block(number, mine, global_model)
                uploads += own
                # Merging as soon as a subtree is whole keeps a handful of sums alive, not one per block.
                partials = reduce_tree(partials, self.spec.block_count, merge_partials)
            return ShardResult(tuple(uploads), partials)

    def evaluate(self, model: Arrays) -> dict[int, Evaluation]:
        """The global model on this shard's test chunks."""
        with single_thread():
            params, network = _from_arrays(model), self._widths[0].module
            return {chunk: evaluate(network, params, *data, self._classes) for chunk, data in self._test.items()}

    def _train_block(
        self, number: int, tasks: Sequence[Task], global_model: Mapping[str, Tensor]
    ) -> tuple[list[Upload], Partial]:
        table = self._widths[0].units
        sent = Aggregator(global_model, units=table)
        dropped = Aggregator(global_model, units=table)
        uploads: list[Upload] = []
        for width in sorted({self.spec.widths[task.client] for task in tasks}):
            mine = [task for task in tasks if self.spec.widths[task.client] == width]
            uploads += self._train_width(number, mine, self._widths[width], global_model, sent, dropped)
        nothing_dropped = all(task.dropout == 0.0 for task in tasks)
        return uploads, Partial(sent.sums(), None if nothing_dropped else dropped.sums())

    def _train_width(
        self,
        number: int,
        tasks: Sequence[Task],
        width: _Width,
        global_model: Mapping[str, Tensor],
        sent: Aggregator,
        dropped: Aggregator,
    ) -> Iterator[Upload]:
        """The client half of a round for clients of one width; what they send and drop goes straight into the sums."""
        download_bytes: list[int] = []

        def starts() -> Iterator[Start]:
            for task in tasks:
                before, size = self._download(task, global_model, width)
                download_bytes.append(size)
                yield Start(before, *self._data[task.client], stream(self.spec.seed, "batches", number, task.client))

        trained_clients = width.train(starts(), self.spec.training)
        for place, (task, (start, trained)) in enumerate(zip(tasks, trained_clients, strict=True)):
            client, samples = task.client, len(start.labels)
            if not trained.finite:
                self._kept.pop(client, None)
                yield Upload(client, status="diverged", samples=samples, download_bytes=download_bytes[place])
                continue
            rng = stream(self.spec.seed, "selection", number, client)
            mask, self._kept[client] = report(
                start.before, trained.after, task, width.units, rng=rng, coverage=width.coverage
            )
            values, upload_bytes = self._transfer(trained.after, mask, width.units)
            sent.add(values, mask, float(samples))
            if task.dropout > 0.0:
                dropped.add(trained.after, complement(mask), float(samples))
            yield self._upload(client, trained, mask, width.units, upload_bytes, download_bytes[place])

    def _download(self, task: Task, global_model: Mapping[str, Tensor], width: _Width) -> tuple[dict[str, Tensor], int]:
        """What the client holds after the download, and what the download costs."""
        own = dict(global_model)
        if width is not self._widths[0]:
            own |= slice_model(global_model, self._widths[0].units, width.units)  # integers stay the server's
        full = task.download is None
        mask = width.units.full_mask() if task.download is None else unpack_mask(task.download, width.units)
        received, size = self._transfer(own, mask, width.units)
        extra = coverage_size(width.units) if task.coverage else 0
        kept = None if full else self._kept[task.client]
        return receive({**own, **received}, kept, width.units), size + extra

    def _transfer(self, params: Mapping[str, Tensor], mask: Mask, table: Units) -> tuple[Mapping[str, Tensor], int]:
        """What arrives at the other end, and its bytes: really encoded, or only measured."""
        if not self.spec.wire:
            return params, payload_size(mask, params, units=table)
        data = encode(params, mask, units=table)
        values, _ = decode(data, params, units=table, finite=True)
        return values, len(data)

    def _upload(
        self, client: int, trained: Trained, mask: Mask, table: Units, upload_bytes: int, download_bytes: int
    ) -> Upload:
        return Upload(
            client=client,
            mask=pack_mask(mask, table),
            kept_share=table.kept_elements(mask) / table.elements,
            train_loss=trained.mean_loss,
            oort_statistic=trained.oort_statistic,
            samples=len(self._data[client][1]),
            label_coverage=self._label_coverage[client],
            upload_bytes=upload_bytes,
            download_bytes=download_bytes,
        )


def merge_partials(left: Partial, right: Partial) -> Partial:
    """Two neighbouring subtrees as one; the left one's arrays are used up."""
    if left.dropped is None or right.dropped is None:
        return Partial(add_sums(left.sent, right.sent), left.dropped or right.dropped)
    return Partial(add_sums(left.sent, right.sent), add_sums(left.dropped, right.dropped))


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread for torch, as every shard has it: more would change the order of sums, and lose on small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def to_arrays(params: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """Tensors as arrays, which travel between processes by value."""
    return {name: tensor.detach().numpy() for name, tensor in params.items()}


def _from_arrays(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def _tensors(
    data: datasets.Dataset, images: NDArray[np.uint8], labels: NDArray[np.int64], index: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Some samples as a network takes them."""
    return torch.from_numpy(data.inputs(images[index])), torch.from_numpy(np.asarray(labels[index], dtype=np.int64))
