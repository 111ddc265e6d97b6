"""A shard: some clients with their data and kept state, trained in one thread; the unit of parallelism.

Clients are grouped in fixed blocks. A shard owns whole blocks and returns partial sums of them, so that traffic to the
coordinator is O(model), not O(clients × model), and the same numbers are added in the same order by any number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.aggregation import Aggregator
from feddd.core.payload import coverage_size, droppable_bytes, fixed_bytes, pack_mask, pack_masks, payload_sizes
from feddd.core.quantise import FLOAT_BITS
from feddd.core.streams import stream
from feddd.core.submodel import narrow_coverage, slice_model
from feddd.core.units import Mask, Units, units
from feddd.simulation import wire
from feddd.simulation.answers import ABSENT, Wire, fault_of, receive_answers
from feddd.simulation.differences import Arrays, Download, Sent, arriving
from feddd.simulation.kept import KeptArrays, KeptStore
from feddd.simulation.parts import Part, blocks_sent, confine, sparse_sent
from feddd.simulation.reduction import Node, Partial, merge_partials, reduce_tree
from feddd.simulation.samples import SampleArrays
from feddd.simulation.trainers import Trainer, make_trainer
from feddd.simulation.training import Evaluation, Local, Trained, Training, evaluate, only
from feddd.simulation.watch import Watch
from feddd.strategies.client import merge_stack, report_stack
from feddd.strategies.feedback import keeping, residual_of
from feddd.strategies.protocol import Kind, Task, Upload
from feddd.world import models


@dataclass(frozen=True)
class ShardSpec:
    """All that a shard needs to build itself besides the data, small enough to send.

    blocks: block number → its clients; there are block_count in all
    samples: client → (start, end) of its samples in the common arrays    widths: client → its sub-model
    label_coverage: client → Σ_c min(C·dis_n^c, 1)
    test_chunks: chunk number → (start, end) of the test samples it evaluates
    coverage: CR(k) per layer of the global model, None if all models are equal
    constants: the tensors of the model that never travel: frozen parameters, counters
    wire: send every payload through encode and decode instead of only charging its size
    state_dir: keep what clients hold between rounds in memory-mapped files there, None for in memory
    """

    model: str
    classes: int
    seed: int
    training: Training
    block_count: int
    blocks: Mapping[int, Sequence[int]]
    samples: Mapping[int, tuple[int, int]]
    widths: Mapping[int, int]
    label_coverage: Mapping[int, float]
    test_chunks: Mapping[int, tuple[int, int]]
    constants: Arrays
    coverage: Arrays | None = None
    wire: bool = False
    state_dir: Path | None = None


@dataclass(frozen=True)
class ShardResult:
    """A shard's round: what its clients reported, and the sums of the subtrees that it owns whole.

    seconds: what it spent on each part of the clients' rounds
    """

    uploads: tuple[Upload, ...]
    partials: Mapping[Node, Partial]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class _Width:
    """One sub-model: its network (a workbench), layer table, packed full mask, coverage and trainer."""

    module: nn.Module
    units: Units
    full_mask: bytes
    coverage: Mapping[str, Tensor] | None
    trainer: Trainer


class Shard:
    """Owns its clients for the length of a run."""

    def __init__(self, spec: ShardSpec, arrays: SampleArrays) -> None:
        self.spec = spec
        device = spec.training.device
        self._train_samples, self._test_samples = arrays.tensors(device)
        shape = arrays.image_shape
        coverage = {name: torch.from_numpy(share) for name, share in (spec.coverage or {}).items()}
        self._widths = {}
        for width in sorted({0, *spec.widths.values()}):
            module = models.build(spec.model, shape, spec.classes, width).to(device)
            if width == 0:
                module.load_state_dict(_from_arrays(spec.constants), strict=False)
            table = units(module)
            own = narrow_coverage(coverage, table) if coverage else None
            trainer = make_trainer(module, table, spec.training.trainer)
            self._widths[width] = _Width(module, table, pack_mask(table.full_mask(), table), own, trainer)
        self._seconds: dict[str, float] = {}
        self._kept = KeptStore(spec.state_dir, 2 * self._widths[0].units.elements)

    def reset(self) -> None:
        """Forget what clients kept: another strategy starts."""
        self._kept.clear()

    def snapshot(self) -> dict[int, KeptArrays]:
        """What every client keeps, as arrays."""
        return self._kept.snapshot()

    def restore(self, snapshot: Mapping[int, KeptArrays]) -> None:
        """Go on from a snapshot."""
        self._kept.restore(snapshot)

    def train(self, number: int, tasks: Sequence[Task], download: Download) -> ShardResult:
        """Run one round for the tasks of this shard's clients."""
        with single_thread():
            global_model = _from_arrays(download.model)
            sent = {width: self._sent(width, download) for width in self._widths}
            by_client = {task.client: task for task in tasks}
            uploads: list[Upload] = []
            partials: dict[Node, Partial] = {}
            for block, clients in self.spec.blocks.items():
                mine = [by_client[client] for client in clients if client in by_client]
                own, partials[0, block] = self._train_block(number, mine, global_model, sent, download)
                uploads += own
                # Merging as soon as a subtree is whole keeps a handful of sums alive, not one per block.
                partials = reduce_tree(partials, self.spec.block_count, merge_partials)
            seconds, self._seconds = self._seconds, {}
            return ShardResult(tuple(uploads), partials, seconds)

    def evaluate(self, model: Arrays) -> dict[int, Evaluation]:
        """The global model on this shard's test chunks."""
        with single_thread():
            params, network, samples = _from_arrays(model), self._widths[0].module, self._test_samples
            return {
                chunk: evaluate(
                    network, params, samples.inputs(samples.images[a:b]), samples.labels[a:b], self.spec.classes
                )
                for chunk, (a, b) in self.spec.test_chunks.items()
            }

    def _sent(self, width: int, download: Download) -> Sent:
        """The download of one sub-model."""
        server, reference, before = (
            None if arrays is None else self._own_model(width, _from_arrays(arrays))
            for arrays in (download.server, download.reference, download.before)
        )
        return Sent(self._own_model(width, _from_arrays(download.model)), download.bits, server, reference, before)

    def _own_model(self, width: int, global_model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The server's values of one sub-model, as far as they travel."""
        table = self._widths[width].units
        own = slice_model(global_model, self._widths[0].units, table) if width else global_model
        return {slot.name: own[slot.name].to(self.spec.training.device) for slot in table.slots}

    def _train_block(
        self,
        number: int,
        tasks: Sequence[Task],
        global_model: Mapping[str, Tensor],
        sent_models: Mapping[int, Sent],
        download: Download,
    ) -> tuple[list[Upload], Partial]:
        sent = Aggregator(global_model, units=self._widths[0].units)
        drops = any(task.selects for task in tasks)
        full = Aggregator(global_model, units=self._widths[0].units) if drops else None
        uploads: list[Upload] = []
        # Clients with one kind of model and one selection rule go through a round together.
        for kind, alike in groupby(sorted(tasks, key=self._kind), key=self._kind):
            width, together = self._widths[kind[0]], list(alike)
            stacks = -(-len(together) // width.trainer.clients)
            for start, end in pairwise(np.linspace(0, len(together), stacks + 1).round().astype(int).tolist()):
                uploads += self._train_stack(
                    number, together[start:end], width, sent_models[kind[0]], download.download_bytes, sent, full
                )
        return uploads, Partial(sent.sums(), full.sums() if full else None)

    def _kind(self, task: Task) -> tuple[int, Kind]:
        return self.spec.widths[task.client], task.kind

    def _train_stack(
        self,
        number: int,
        tasks: Sequence[Task],
        width: _Width,
        sent_model: Sent,
        coded_bytes: Mapping[int, int] | None,
        sent: Aggregator,
        full: Aggregator | None,
    ) -> list[Upload]:
        """The client half of a round for some alike clients; what they send, and all they have, goes into the sums."""
        watch, table = Watch(self._seconds), width.units
        tasks = [task for task in tasks if fault_of(task) not in ABSENT]
        if not tasks:
            return []
        residuals = self._residuals(tasks, sent_model, table)
        before, download_bytes = self._download(tasks, width, sent_model.model)
        if coded_bytes is not None:
            download_bytes = np.array([coded_bytes[task.client] for task in tasks])
        if tasks[0].submodel is not None:
            confine(before, tasks, table, wire=self.spec.wire)
        watch.lap("download")
        clients = [self._local(number, task) for task in tasks]
        trained = width.trainer.train(before, self._train_samples, clients, self.spec.training)
        fine = trained.finite()
        watch.lap("training")
        uploads = [
            self._diverged(tasks[place].client, download_bytes[place]) for place in np.flatnonzero(~fine).tolist()
        ]
        if uploads:
            before, trained, download_bytes = only(before, fine), trained.only(fine), download_bytes[fine]
            tasks = [task for task, ok in zip(tasks, fine, strict=True) if ok]
            residuals = [residual for residual, ok in zip(residuals, fine, strict=False) if ok]
            if not tasks:
                return uploads
        part = self._part(before, trained.after, tasks, sent_model, table)
        masks = self._select(number, before, trained.after, tasks, width)
        watch.lap("selection")
        answered = self._uploads(tasks, trained, masks, table, download_bytes, sent_model.bits)
        answered = part.told(answered) if part else answered
        after = trained.after
        arrived = after if part else self._upload(number, after, tasks, masks, sent_model, table, residuals)
        if any(fault_of(task) for task in tasks):
            crossing = Wire(after, arrived, masks, sent_model, table)
            answered = receive_answers(self.spec.seed, number, tasks, answered, crossing)
            fine = np.array([upload.status == "ok" for upload in answered])
            after, arrived, masks = only(after, fine), only(arrived, fine), only(masks, fine)
            part = part.only(fine) if part else None
        weights = torch.tensor([float(u.samples) for u in answered if u.status == "ok"], dtype=torch.float64)
        if part and len(weights):
            part.count(sent, weights, table)
        elif len(weights):
            sent.add_stack(arrived, masks, weights, table)
            if full is not None:
                full.add_stack(after, None, weights, table)
        watch.lap("sums")
        return uploads + answered

    def _part(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], tasks: Sequence[Task], sent: Sent, table: Units
    ) -> Part | None:
        """What arrives of clients that send something else than units."""
        if tasks[0].submodel is not None:
            return blocks_sent(after, tasks, table, wire=self.spec.wire)
        if tasks[0].sparse is not None:
            return sparse_sent(before, after, sent.server or sent.model, tasks, self._kept, table, wire=self.spec.wire)
        return None

    def _select(
        self,
        number: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        tasks: Sequence[Task],
        width: _Width,
    ) -> Mask:
        """The units that go up; what the clients keep of the others is remembered."""
        if tasks[0].submodel is not None or tasks[0].sparse is not None:
            return {name: mask.expand(len(tasks), -1) for name, mask in width.units.full_mask().items()}
        rngs = None
        if tasks[0].selector == "random":
            rngs = [stream(self.spec.seed, "selection", number, task.client) for task in tasks]
        masks, kept = report_stack(before, after, tasks, width.units, rngs=rngs, coverage=width.coverage)
        for task, own in zip(tasks, kept, strict=True):
            self._kept.put(task.client, own)
        return masks

    def _local(self, number: int, task: Task) -> Local:
        first, end = self.spec.samples[task.client]
        return Local(first, end - first, stream(self.spec.seed, "batches", number, task.client), task.scaler)

    def _uploads(
        self,
        tasks: Sequence[Task],
        trained: Trained,
        masks: Mask,
        table: Units,
        download_bytes: NDArray[np.int64],
        bits: int,
    ) -> list[Upload]:
        """What is known of clients that count."""
        packed = pack_masks(masks, table)
        upload_bytes = payload_sizes(packed, table, bits)
        shares = (payload_sizes(packed, table) - fixed_bytes(table)) / droppable_bytes(table)
        return [
            Upload(
                client=task.client,
                mask=packed[place],
                kept_share=float(shares[place]),
                train_loss=float(trained.mean_loss[place]),
                oort_statistic=float(trained.oort_statistic[place]),
                samples=self._count(task.client),
                label_coverage=self.spec.label_coverage[task.client],
                upload_bytes=int(upload_bytes[place]),
                download_bytes=int(download_bytes[place]),
            )
            for place, task in enumerate(tasks)
        ]

    def _download(
        self, tasks: Sequence[Task], width: _Width, own_model: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
        """What the clients hold after the download, a stack, and what it cost each."""
        table = width.units
        packed = [width.full_mask if task.download is None else task.download for task in tasks]
        before = {name: tensor.expand(len(tasks), *tensor.shape).clone() for name, tensor in own_model.items()}
        if self.spec.wire:
            wire.download(before, own_model, packed, table)
        if any(task.download is not None for task in tasks):
            kept = [None if task.download is None else self._kept[task.client] for task in tasks]
            merge_stack(before, kept, table)
        for task in tasks:  # a full download replaces what was kept, and training is about to replace it in any case
            if task.sparse is None:
                self._kept.forget(task.client)
        extra = np.array([coverage_size(table) if task.coverage else 0 for task in tasks])
        return before, payload_sizes(packed, table) + extra

    def _residuals(self, tasks: Sequence[Task], sent: Sent, table: Units) -> list[Tensor]:
        """What error feedback has to add to the clients' differences; empty without it."""
        return [
            residual_of(self._kept.get(task.client), None if task.download else sent.before, table)
            for task in tasks
            if task.feedback != "none"
        ]

    def _upload(
        self,
        number: int,
        after: Mapping[str, Tensor],
        tasks: Sequence[Task],
        masks: Mask,
        sent: Sent,
        table: Units,
        residuals: Sequence[Tensor],
    ) -> Mapping[str, Tensor]:
        """What arrives at the server: with `wire` really encoded and decoded, zero where nothing was sent."""
        if sent.bits == FLOAT_BITS:
            return wire.upload(after, masks, table) if self.spec.wire else after
        # What is rounded at random is more than error feedback can bear: it would feed back growing errors.
        rngs = None if residuals else [stream(self.spec.seed, "rounding", number, task.client) for task in tasks]
        arrived, rest = arriving(after, tasks, masks, sent, table, rngs, residuals=residuals, wire=self.spec.wire)
        for task, residual in zip(tasks, rest, strict=False):
            self._kept.put(task.client, keeping(self._kept[task.client], residual))
        return arrived

    def _diverged(self, client: int, download_bytes: int) -> Upload:
        return Upload(client, status="diverged", samples=self._count(client), download_bytes=int(download_bytes))

    def _count(self, client: int) -> int:
        first, end = self.spec.samples[client]
        return end - first


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
