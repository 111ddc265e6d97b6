"""A shard: some clients with their data and kept state, trained in one thread; the unit of parallelism.

Clients are grouped in fixed blocks. A shard owns whole blocks and returns partial sums of them, so that traffic to the
coordinator is O(model), not O(clients × model), and the same numbers are added in the same order by any number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.aggregation import Aggregator
from feddd.core.streams import stream
from feddd.core.submodel import narrow_coverage, slice_model
from feddd.core.units import Params, Units
from feddd.simulation.client_state import ClientStates, StateArrays
from feddd.simulation.evaluation import Evaluation, evaluate_chunks, evaluate_each
from feddd.simulation.faulty_uploads import ABSENT, fault_of, receive_answers
from feddd.simulation.optimizers import training_rules
from feddd.simulation.reduction import Node, Partial, merge_partials, reduce_tree
from feddd.simulation.samples import SampleArrays
from feddd.simulation.stopwatch import Stopwatch
from feddd.simulation.trainers import Trainer, make_trainer
from feddd.simulation.training import Local, Trained, Training
from feddd.strategies.protocol import Task, Upload
from feddd.wire.chosen import some
from feddd.wire.down import over_the_wire
from feddd.wire.exchange import Arrived, decode, encode, through_bytes
from feddd.wire.local import LocalRound, Vectors, finish_rules, start_rules, vector_bytes, vector_through_bytes
from feddd.wire.stage import At, ClientState, Known, Update
from feddd.world import models
from feddd.world.objectives import CLASSIFICATION, Objective

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Download:
    """What the server sends in a round, as arrays that travel between processes; see `wire.exchange.Known`.

    server, reference, replaced: None where values travel as they are    sizes: in bytes, by client
    vectors: what rules of local training send beside the model, see `wire.local`
    """

    sent: Arrays
    sizes: Mapping[int, int]
    server: Arrays | None = None
    reference: Arrays | None = None
    replaced: Arrays | None = None
    vectors: Mapping[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardSpec:
    """All that a shard needs to build itself besides the data, small enough to send.

    blocks: block number → its clients; there are block_count in all
    samples: client → (start, end) of its samples in the common arrays    widths: client → its sub-model
    units: what makes the layer table, by import path
    label_coverage: client → Σ_c min(C·dis_n^c, 1)
    test_chunks: chunk number → (start, end) of the test samples it evaluates
    coverage: CR(k) per layer of the global model, None if all models are equal
    constants: the tensors of the model that never travel: frozen parameters, counters
    wire: send every payload through encode and decode instead of only charging its size
    state_dir: keep what clients hold between rounds in memory-mapped files there, None for in memory
    """

    model: str
    classes: int | None
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
    objective: Objective = CLASSIFICATION
    units: str | None = None
    model_arguments: Mapping[str, Any] = field(default_factory=dict)


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
    """One width of model: its network (a workbench), layer table, coverage and trainer."""

    module: nn.Module
    units: Units
    coverage: Mapping[str, Tensor] | None
    trainer: Trainer


@dataclass(frozen=True)
class _Round:
    """What a shard is told of a round.

    training: at its learning rate    model: as clients decode it    known: the downloads, by width of model
    vectors: what rules of local training send beside it    sizes: of the downloads, by client
    """

    number: int
    training: Training
    model: Params
    known: Mapping[int, Known]
    vectors: Vectors
    sizes: Mapping[int, int]


@dataclass(frozen=True)
class _Sums:
    """What a block adds up: what was sent, everything (None if that is the same), and vectors beside the models."""

    sent: Aggregator
    full: Aggregator | None
    vectors: Mapping[str, Aggregator]

    def partial(self) -> Partial:
        """Return the sums, to be merged with those of other blocks."""
        vectors = {name: own.sums() for name, own in self.vectors.items()}
        return Partial(self.sent.sums(), self.full.sums() if self.full else None, vectors)


class Shard:
    """Owns its clients for the length of a run."""

    def __init__(self, spec: ShardSpec, arrays: SampleArrays) -> None:
        self.spec = spec
        device, shape = spec.training.device, arrays.layout.input_shape
        self._train_samples, self._test_samples = arrays.tensors(device, spec.objective)
        coverage = {name: torch.from_numpy(share) for name, share in (spec.coverage or {}).items()}
        self._widths = {}
        for width in sorted({0, *spec.widths.values()}):
            arguments = spec.model_arguments
            module = models.build(spec.model, shape, spec.classes, width, arguments=arguments).to(device)
            if width == 0:
                module.load_state_dict(_from_arrays(spec.constants), strict=False)
            (table,) = models.layer_tables([module], spec.units)
            own = narrow_coverage(coverage, table) if coverage else None
            self._widths[width] = _Width(module, table, own, make_trainer(module, table, spec.training.trainer))
        self._seconds: dict[str, float] = {}
        self._states = ClientStates(spec.state_dir, self._widths[0].units.elements)

    def reset(self) -> None:
        """Forget what clients kept: another strategy starts."""
        self._states.clear()

    def snapshot(self) -> dict[int, StateArrays]:
        """Return what every client keeps, as arrays."""
        return self._states.snapshot()

    def restore(self, snapshot: Mapping[int, StateArrays]) -> None:
        """Go on from a snapshot."""
        self._states.restore(snapshot)

    def train(self, number: int, tasks: Sequence[Task], download: Download) -> ShardResult:
        """Run one round for the tasks of this shard's clients."""
        with single_thread():
            known = {width: self._known(width, download) for width in self._widths}
            vectors = {name: self._own_model(0, _from_arrays(own)) for name, own in download.vectors.items()}
            training, model = self.spec.training.in_round(number), _from_arrays(download.sent)
            order = _Round(number, training, model, known, vectors, download.sizes)
            by_client = {task.client: task for task in tasks}
            uploads: list[Upload] = []
            partials: dict[Node, Partial] = {}
            for block, clients in self.spec.blocks.items():
                mine = [by_client[client] for client in clients if client in by_client]
                own, partials[0, block] = self._train_block(order, mine)
                uploads += own
                # Merging as soon as a subtree is whole keeps a handful of sums alive, not one per block.
                partials = reduce_tree(partials, self.spec.block_count, merge_partials)
            seconds, self._seconds = self._seconds, {}
            return ShardResult(tuple(uploads), partials, seconds)

    def evaluate(self, model: Arrays) -> dict[int, Evaluation]:
        """Return the global model on this shard's test chunks."""
        with single_thread():
            network, chunks = self._widths[0].module, self.spec.test_chunks
            return evaluate_chunks(network, _from_arrays(model), self._test_samples, chunks, self.spec.classes)

    def evaluate_clients(self, model: Arrays) -> dict[int, float]:
        """Return the global model's metric on the training samples of each of this shard's clients."""
        with single_thread():
            network, spec = self._widths[0].module, self.spec
            return evaluate_each(network, _from_arrays(model), self._train_samples, spec.samples, spec.classes)

    def _known(self, width: int, download: Download) -> Known:
        """Return the download of one width of model."""
        sent, server, reference, replaced = (
            None if arrays is None else self._own_model(width, _from_arrays(arrays))
            for arrays in (download.sent, download.server, download.reference, download.replaced)
        )
        assert sent is not None
        return Known(sent, server or sent, reference, replaced)

    def _own_model(self, width: int, global_model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the server's values of one sub-model, as far as they travel."""
        table = self._widths[width].units
        own = slice_model(global_model, self._widths[0].units, table) if width else global_model
        return {slot.name: own[slot.name].to(self.spec.training.device) for slot in table.slots}

    def _train_block(self, order: _Round, tasks: Sequence[Task]) -> tuple[list[Upload], Partial]:
        drops = any(task.dropout > 0.0 and not task.up.splits_units for task in tasks)
        table, names = self._widths[0].units, sorted({name for task in tasks for name in task.vectors})
        sums = _Sums(
            Aggregator(order.model, units=table),
            Aggregator(order.model, units=table) if drops else None,
            {name: Aggregator(order.model, units=table) for name in names},
        )
        uploads: list[Upload] = []
        # Clients with one width of model and one kind of task go through a round together.
        for (width, _), alike in groupby(sorted(tasks, key=self._order), key=self._kind):
            together = list(alike)
            stacks = -(-len(together) // self._widths[width].trainer.clients)
            for start, end in pairwise(np.linspace(0, len(together), stacks + 1).round().astype(int).tolist()):
                uploads += self._train_stack(order, together[start:end], width, sums)
        return uploads, sums.partial()

    def _kind(self, task: Task) -> tuple[int, Any]:
        return self.spec.widths[task.client], task.kind

    def _order(self, task: Task) -> tuple[int, str]:
        width, kind = self._kind(task)
        return width, str(kind)

    def _train_stack(self, order: _Round, tasks: Sequence[Task], width_number: int, sums: _Sums) -> list[Upload]:
        """Run the client half of a round for some alike clients; what they send, and all they have, is summed up."""
        width, known, sizes = self._widths[width_number], order.known[width_number], order.sizes
        stopwatch, table, number = Stopwatch(self._seconds), width.units, order.number
        tasks = [task for task in tasks if fault_of(task) not in ABSENT]
        if not tasks:
            return []
        states = [self._states.get(task.client) for task in tasks]
        before = self._download(tasks, states, known, table)
        stopwatch.lap("download")
        clients = [self._local(number, task) for task in tasks]
        local = self._local_round(order, tasks, states, before, table)
        rules = start_rules([task.local + training_rules(order.training) for task in tasks], local)
        trained = width.trainer.train(before, self._train_samples, clients, order.training, rules)
        fine = trained.finite()
        stopwatch.lap("training")
        uploads = [
            self._diverged(tasks[place].client, sizes[tasks[place].client]) for place in np.flatnonzero(~fine).tolist()
        ]
        if uploads:
            local, trained = local.only(fine), trained.only(fine)
            tasks = [task for task, ok in zip(tasks, fine, strict=True) if ok]
            if not tasks:
                return uploads
        states, vectors = finish_rules([task.local for task in tasks], local, trained.after)
        if self.spec.wire:
            vectors = {name: vector_through_bytes(own, table) for name, own in vectors.items()}
        at = self._at(number, tasks, width, known, local.before, trained)
        update, arrived = self._exchange(tasks, states, at)
        stopwatch.lap("selection")
        answered = self._uploads(tasks, trained, arrived, table, sizes)
        after = trained.after
        if any(fault_of(task) for task in tasks):
            answered, arrived = receive_answers(tasks, answered, update, arrived, at)
            fine = np.array([upload.status == "ok" for upload in answered])
            after, arrived = some(after, fine), arrived.only(fine)
            vectors = {name: some(own, fine) for name, own in vectors.items()}
        weights = torch.tensor([float(u.samples) for u in answered if u.status == "ok"], dtype=torch.float64)
        if len(weights):
            arrived.chosen.add(sums.sent, arrived.values, weights, table)
            if sums.full is not None and not tasks[0].up.splits_units:
                sums.full.add_stack(after, None, weights, table)
            for name, own in vectors.items():
                sums.vectors[name].add_stack(own, None, torch.ones_like(weights), table)
        stopwatch.lap("sums")
        return uploads + answered

    def _local_round(
        self, order: _Round, tasks: Sequence[Task], states: Sequence[ClientState], before: Params, table: Units
    ) -> LocalRound:
        """Return what rules of local training may look at."""
        training = order.training
        steps = [training.epochs * -(-self._count(task.client) // training.batch_size) for task in tasks]
        return LocalRound(table, before, states, order.vectors, torch.tensor(steps), training.learning_rate)

    def _at(
        self,
        number: int,
        tasks: Sequence[Task],
        width: _Width,
        known: Known,
        before: Params,
        trained: Trained,
    ) -> At:
        """Return where some trained clients stand."""
        return At(
            width.units,
            [task.client for task in tasks],
            number,
            self.spec.seed,
            known,
            [task.down.mask for task in tasks],
            before,
            trained.after,
            width.coverage,
            wire=self.spec.wire or any(fault_of(task) for task in tasks),
        )

    def _exchange(self, tasks: Sequence[Task], states: Sequence[ClientState], at: At) -> tuple[Update, Arrived]:
        """Return what some clients send and what the server makes of it; what they keep is remembered."""
        chains = [task.up for task in tasks]
        update, kept = encode(chains, states, at)
        if self.spec.wire:
            update = through_bytes(chains, update, at.table)
        for task, state in zip(tasks, kept, strict=True):
            self._states.put(task.client, state)
        return update, decode(chains[0], update, at)

    def _local(self, number: int, task: Task) -> Local:
        first, end = self.spec.samples[task.client]
        return Local(first, end - first, stream(self.spec.seed, "batches", number, task.client), task.local)

    def _uploads(
        self, tasks: Sequence[Task], trained: Trained, arrived: Arrived, table: Units, sizes: Mapping[int, int]
    ) -> list[Upload]:
        """Return what is known of clients that count."""
        packed, shares = arrived.chosen.packed(table), arrived.chosen.shares(table)
        return [
            Upload(
                client=task.client,
                mask=packed[place],
                kept_share=float(shares[place]),
                train_loss=float(trained.mean_loss[place]),
                oort_statistic=float(trained.oort_statistic[place]),
                samples=self._count(task.client),
                label_coverage=self.spec.label_coverage[task.client],
                upload_bytes=int(arrived.sizes[place]) + vector_bytes(task.local, table),
                download_bytes=sizes[task.client],
            )
            for place, task in enumerate(tasks)
        ]

    def _download(
        self, tasks: Sequence[Task], states: Sequence[ClientState], known: Known, table: Units
    ) -> dict[str, Tensor]:
        """Return the models that the clients train, a stack: what they were sent, and their own values beside it."""
        downs = [task.down for task in tasks]
        before = {name: tensor.expand(len(tasks), *tensor.shape).clone() for name, tensor in known.sent.items()}
        if self.spec.wire:
            for name, received in over_the_wire(downs, known.sent, table).items():
                before[name].copy_(received)
        downs[0].local(before, downs, states, table)
        return before

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
    """Return tensors as arrays, which travel between processes by value."""
    return {name: tensor.detach().numpy() for name, tensor in params.items()}


def _from_arrays(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
