"""The round loop and the virtual clock: plan → download, train, upload → absorb → one record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.aggregation import Aggregator
from feddd.core.convergence import mask_error
from feddd.core.labels import label_coverage
from feddd.core.streams import stream
from feddd.core.submodel import coverage
from feddd.errors import InputError, RunError
from feddd.simulation.engine import Engine, assign_blocks, block_ranges
from feddd.simulation.evaluation import TEST_CHUNK, Evaluation
from feddd.simulation.faults import Faults
from feddd.simulation.forecast import ClientRow, foresee
from feddd.simulation.optimizers import training_rules
from feddd.simulation.samples import Layout, SampleArrays, fill, lay_out, make_samples
from feddd.simulation.shard import Arrays, Download, ShardResult, ShardSpec, single_thread, to_arrays
from feddd.simulation.snapshot import Snapshot
from feddd.simulation.stacked import is_chain
from feddd.simulation.stopwatch import Stopwatch
from feddd.simulation.trainers import convolves
from feddd.simulation.training import Training
from feddd.simulation.worker_process import WorkerPool, default_workers
from feddd.simulation.workers import InProcess, Processes
from feddd.strategies.protocol import Plan, ServerState, Strategy, check_plan, make_fleet, start
from feddd.strategies.with_rules import with_rules
from feddd.wire.down import Sending, download_sizes, prepare, reference_after
from feddd.wire.format import coverage_size, pack_mask
from feddd.wire.local import absorb_vectors, vector_bytes
from feddd.world import models
from feddd.world.dataset import Dataset
from feddd.world.fleets import Devices
from feddd.world.objectives import CLASSIFICATION, Objective, check_fit
from feddd.world.partitions import label_counts

EngineName = Literal["local", "ray"]


class EverybodyDiverged(RunError):
    """No client of a round trained to finite numbers."""


@dataclass(frozen=True)
class World:
    """What all strategies of an experiment share: data split, devices, initial weights, batch order.

    parts: each client's sample numbers    model: a name or import path    names: of the clients; empty for numbers
    units: an import path; None for channels and neurons
    model_arguments: of a model by import path
    """

    dataset: Dataset
    parts: Sequence[NDArray[np.int64]]
    devices: Devices
    model: str
    training: Training
    seed: int
    faults: Faults = field(default_factory=Faults)
    objective: Objective = CLASSIFICATION
    names: tuple[str, ...] = ()
    units: str | None = None
    model_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int | None:
        """Return how many classes or tokens the model tells apart; None where targets are numbers."""
        return self.objective.classes(self.dataset)

    def build_model(self, width: int = 0) -> nn.Module:
        """Return the network, or one of its sub-models, with its initial weights."""
        facts = self.dataset.input_shape, self.classes, width
        return models.build(self.model, *facts, seed=self.seed, arguments=self.model_arguments)

    def label_counts(self) -> NDArray[np.int64] | None:
        """Return how many samples of each class each client has, [clients, classes]; None where there are none."""
        if not self.objective.has_classes(self.dataset):
            return None
        return label_counts(self.dataset.train_targets, list(self.parts), self.dataset.class_count or 0)


@dataclass(frozen=True)
class RoundRecord:
    """Everything known after a round; evaluation is None in rounds without one."""

    round: int
    round_seconds: float
    clock_seconds: float
    clients: tuple[ClientRow, ...]
    evaluation: Evaluation | None
    mask_error: float | None
    state: ServerState
    wall_seconds: dict[str, float]
    client_metrics: dict[int, float] | None = None


def try_model(
    module: nn.Module, data: Dataset, parts: Sequence[NDArray[np.int64]], objective: Objective, name: str
) -> None:
    """Refuse a model, a loss or a metric that cannot take the samples that clients have."""
    first = np.concatenate([np.asarray(part[:2]) for part in parts[:2]])[:2]
    samples, _ = make_samples(data, first, objective)
    check_fit(module, samples.between(0, len(first)), samples.targets, objective, objective.classes(data), name)


class Simulation:
    """A world with its workers; runs one strategy after another on it."""

    def __init__(
        self,
        world: World,
        *,
        workers: int | None = None,
        engine: EngineName = "local",
        ray_address: str | None = None,
        state_dir: Path | None = None,
        wire: bool = False,
        pool: WorkerPool | None = None,
    ) -> None:
        """workers: how many shards (default: one per core)    engine: "local" processes or a "ray" cluster

        ray_address: of the cluster; None for Ray's own setting, or a cluster on this machine
        state_dir: keep what clients hold between rounds in memory-mapped files there    wire: really encode payloads
        pool: of worker processes that were started before
        """
        self.world = world
        module = world.build_model()
        try_model(module, world.dataset, world.parts, world.objective, world.model)
        self.initial = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self._convolves = convolves(module)
        self._chain = is_chain(module)
        count = models.widths(world.model)
        modules = [module, *(world.build_model(width) for width in range(1, count))]
        self._tables = models.layer_tables(modules, world.units)
        self.units = self._tables[0]
        self._width_of = [client % count for client in range(len(world.parts))]
        self._client_tables = [self._tables[width] for width in self._width_of]
        devices = world.devices
        self.fleet = make_fleet(
            devices.uplink_bits_per_s,
            devices.downlink_bits_per_s,
            devices.compute_seconds,
            self._client_tables,
            self.units,
        )
        if engine == "ray":
            from feddd.simulation.ray_workers import RayCluster

            cluster = RayCluster(ray_address)
            if workers is not None and workers > cluster.cores:
                cores = cluster.cores
                cluster.close()
                raise InputError(f"{workers} workers need a core each; the Ray cluster has {cores}")
            specs = self._specs(workers or cluster.cores, state_dir, wire)
            cluster.load(self._layout(), self._fill)
            self._engine = Engine(specs, cluster)
            return
        specs = self._specs(workers or default_workers(), state_dir, wire)
        layout = self._layout()
        alone = len(specs) == 1
        backend = InProcess(layout, self._fill) if alone else Processes(layout, self._fill, pool or WorkerPool())
        self._engine = Engine(specs, backend)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(
        self,
        strategy: Strategy,
        rounds: int,
        *,
        evaluate_every: int = 1,
        evaluate_clients: bool = False,
        after: Snapshot | None = None,
    ) -> Iterator[RoundRecord]:
        """Simulate the rounds, yielding one record after each.

        evaluate_clients: test on each client's samples too    after: where an earlier run of the same stood
        """
        state, clock_seconds = start(self.initial, len(self.fleet)), 0.0
        if after is None:
            self._engine.reset()
        else:
            state, clock_seconds = after.state, after.clock_seconds
            self._engine.restore(after.clients)
        for number in range(state.round + 1, rounds + 1):
            stopwatch = Stopwatch()
            plan = self._plan(strategy, state)
            stopwatch.lap("plan")
            self.check(plan)
            downs = [task.down for task in plan.tasks]
            sent = prepare(
                *(downs, state.model, state.reference, len(self.fleet), self.units),
                round=number,
                seed=self.world.seed,
            )
            sizes = self._download_sizes(plan, sent)
            forecast = foresee(self.world.faults, self.world.seed, plan, self.fleet, self._client_tables, sizes)
            download = dataclasses.replace(self._download(plan, sent, sizes), vectors=self._vectors(state, plan))
            result = self._engine.train(number, forecast.tasks, download)
            uploads = forecast.uploads(result.uploads)
            stopwatch.lap("train")
            if all(upload.status == "diverged" for upload in uploads):
                raise EverybodyDiverged(
                    f"in round {number} the training of every client diverged (loss or weights not finite); "
                    f"a smaller learning rate than {self.world.training.in_round(number).learning_rate:g} may help"
                )
            with single_thread():  # two threads that wait for each other lose to any neighbour
                model, error = self._aggregate(state, plan, result)
            state = strategy.absorb(state, self.fleet, plan, uploads, model)
            known = math.nan if error is None else error
            trained = [upload.client for upload in uploads if upload.status in ("ok", "diverged")]
            state = dataclasses.replace(state, reference=reference_after(sent, trained), mask_error=known)
            state = self._absorb_vectors(state, plan, result)
            stopwatch.lap("absorb")
            due = number % evaluate_every == 0 or number == rounds
            evaluation = self._engine.evaluate(to_arrays(state.model)) if due else None
            each = self._engine.evaluate_clients(to_arrays(state.model)) if due and evaluate_clients else None
            stopwatch.lap("evaluate")
            rates = {task.client: task.dropout for task in plan.tasks}
            rows = tuple(forecast.row(upload, rates[upload.client]) for upload in uploads)
            seconds = forecast.seconds(rows)
            clock_seconds += seconds
            # Of the workers' time, added up over all of them; the round waits for the slowest during "train".
            wall_seconds = stopwatch.seconds | {f"worker_{part}": spent for part, spent in result.seconds.items()}
            yield RoundRecord(number, seconds, clock_seconds, rows, evaluation, error, state, wall_seconds, each)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that nobody can carry out, or one of sub-models where they would not be networks."""
        try:
            check_plan(with_rules(plan, training_rules(self.world.training)), len(self.fleet), self.units)
        except ValueError as error:
            raise InputError(f"in round {plan.round} {error}") from error
        if not self._chain and any(task.down.sub_model is not None for task in plan.tasks):
            raise InputError(f"model {self.world.model!r} has no sub-models: it is not a chain of layers with ReLU")
        beside = next((name for task in plan.tasks for name in task.vectors), None)
        if beside is not None and len(self._tables) > 1:
            raise InputError(f"{beside!r} travels beside models of one size only; {self.world.model!r} has several")

    def snapshot(self, record: RoundRecord, holding: Sequence[int]) -> Snapshot:
        """Return all that it takes to go on after the latest record; holding: whose own state goes along."""
        kept = self._engine.snapshot() if holding else {}
        return Snapshot(
            record.state, record.clock_seconds, {client: kept[client] for client in holding if client in kept}
        )

    def holding(self, strategy: Strategy, state: ServerState) -> list[int]:
        """Return the clients whose own state the coming rounds build on; nobody if all get the full model next."""
        plan = self._plan(strategy, state)
        if any(task.up.lasting or any(rule.lasting for rule in task.local) for task in plan.tasks):
            return np.flatnonzero(state.last_round).tolist()
        replaced = {task.client for task in plan.tasks if task.starts_afresh}
        full = {width: pack_mask(table.full_mask(), table) for width, table in enumerate(self._tables)}
        return [
            client
            for client, mask in enumerate(state.masks)
            if mask is not None and mask != full[self._width_of[client]] and client not in replaced
        ]

    def _plan(self, strategy: Strategy, state: ServerState) -> Plan:
        try:
            return strategy.plan(state, self.fleet, stream(self.world.seed, "strategy", state.round + 1))
        except ValueError as error:
            raise InputError(str(error)) from error

    def _download_sizes(self, plan: Plan, sent: Sending) -> dict[int, int]:
        clients = [task.client for task in plan.tasks]
        tables = [self._client_tables[client] for client in clients]
        sizes = download_sizes(sent, [task.down for task in plan.tasks], clients, tables)
        return {
            task.client: size + (coverage_size(table) if task.coverage else 0) + vector_bytes(task.local, table)
            for task, size, table in zip(plan.tasks, sizes, tables, strict=True)
        }

    def _download(self, plan: Plan, sent: Sending, sizes: dict[int, int]) -> Download:
        if sent.reference is None:
            return Download(to_arrays(sent.sent), sizes)
        lasting = any(task.up.lasting for task in plan.tasks) and sent.before is not None
        replaced = to_arrays(sent.before.model) if lasting and sent.before else None
        own, reference = to_arrays(sent.server), to_arrays(sent.reference.model)
        return Download(to_arrays(sent.sent), sizes, own, reference, replaced)

    def _vectors(self, state: ServerState, plan: Plan) -> dict[str, Arrays]:
        """Return what travels beside the model: what the server has, zero at first."""
        names = sorted({name for task in plan.tasks for name in task.vectors})
        return {name: to_arrays(state.vectors.get(name, self._nothing())) for name in names}

    def _absorb_vectors(self, state: ServerState, plan: Plan, result: ShardResult) -> ServerState:
        """Return the state with what the server makes of the vectors that clients sent beside their models."""
        (total,) = result.partials.values()
        means, share = {}, 0.0
        for name, sums in total.vectors.items():
            own = Aggregator(self._nothing(), units=self.units)
            own.merge(sums)
            means[name], share = own.result(), sums.total_weight / len(self.fleet)
        if not means:
            return state
        rules = next(task.local for task in plan.tasks if task.vectors)
        nothing = {name: self._nothing() for name in means}
        return dataclasses.replace(state, vectors=absorb_vectors(rules, nothing | dict(state.vectors), means, share))

    def _nothing(self) -> dict[str, Tensor]:
        return {slot.name: torch.zeros(slot.shape) for slot in self.units.slots}

    def _aggregate(self, state: ServerState, plan: Plan, result: ShardResult) -> tuple[dict[str, Tensor], float | None]:
        """The new global model, and how far the masks moved it from the full average; None if it is not known."""
        (total,) = result.partials.values()
        sent = Aggregator(state.model, units=self.units)
        sent.merge(total.sent)
        model = sent.result()
        if plan.splits_units:
            return model, None
        if total.full is None:
            return model, 0.0
        full = Aggregator(state.model, units=self.units)
        full.merge(total.full)
        return model, mask_error(model, full.result(), self.units)

    def _layout(self) -> Layout:
        world = self.world
        train, test = sum(len(part) for part in world.parts), len(world.dataset.test_targets)
        together = world.training.trainer != "reference" and self._convolves
        return lay_out(world.dataset, train, test, channels_last=together)

    def _fill(self, arrays: SampleArrays) -> None:
        fill(arrays, self.world.dataset, self.world.parts)

    def _specs(self, workers: int, state_dir: Path | None, wire: bool) -> list[ShardSpec]:
        world = self.world
        tests = len(world.dataset.test_targets)
        chunks = {start // TEST_CHUNK: (start, min(start + TEST_CHUNK, tests)) for start in range(0, tests, TEST_CHUNK)}
        blocks = block_ranges(len(world.parts))
        sizes = [self._tables[width].elements for width in self._width_of]
        costs = [float(sum(len(world.parts[n]) * sizes[n] for n in block)) for block in blocks]
        shares = assign_blocks(costs, workers)
        share = coverage(self.units, self._client_tables) if len(self._tables) > 1 else None
        ends = np.cumsum([len(part) for part in world.parts]).tolist()
        counts = world.label_counts()
        labels = np.full(len(world.parts), np.nan) if counts is None else label_coverage(counts)
        carried = {slot.name for slot in self.units.slots} | {alias for alias, _ in self.units.aliases}
        constants = to_arrays({name: tensor for name, tensor in self.initial.items() if name not in carried})
        return [
            ShardSpec(
                model=world.model,
                model_arguments=world.model_arguments,
                units=world.units,
                classes=world.classes,
                seed=world.seed,
                training=world.training,
                block_count=len(blocks),
                blocks={block: list(blocks[block]) for block in mine},
                samples={n: (ends[n] - len(world.parts[n]), ends[n]) for block in mine for n in blocks[block]},
                widths={n: self._width_of[n] for block in mine for n in blocks[block]},
                label_coverage={n: float(labels[n]) for block in mine for n in blocks[block]},
                test_chunks={chunk: bounds for chunk, bounds in chunks.items() if chunk % len(shares) == worker},
                constants=constants,
                coverage=None if share is None else to_arrays(share),
                wire=wire,
                state_dir=state_dir,
                objective=world.objective,
            )
            for worker, mine in enumerate(shares)
        ]
