"""From an experiment to a folder of results: build the world, run every strategy on it, write the tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from feddd.core.streams import stream
from feddd.errors import InputError
from feddd.experiments.checkpoints import Checkpoints
from feddd.experiments.config import Experiment, FleetSection
from feddd.experiments.data import divide, load_data, write_data_facts
from feddd.experiments.extending import extend, is_longer
from feddd.experiments.folders import (
    Lock,
    create_folder,
    finish_folder,
    model_file,
    report_so_far,
    write_model,
)
from feddd.experiments.loading import load_experiment
from feddd.experiments.results import SCHEMAS, Results, check_run_folder, is_finished, load_results
from feddd.experiments.resuming import (
    check_identity,
    find_imports,
    finished_strategies,
    identity,
    resumable,
    tidy,
)
from feddd.experiments.tables import Rows, Tables, partition_table
from feddd.simulation.faults import Faults
from feddd.simulation.optimizers import check_optimizer
from feddd.simulation.proof import Trial, settle_trainer
from feddd.simulation.simulator import EngineName, RoundRecord, Simulation, World, try_model
from feddd.simulation.trainers import obstacle_of
from feddd.simulation.training import Training
from feddd.simulation.worker_process import WorkerPool
from feddd.strategies.protocol import start
from feddd.tracking.following import Following, Trackers, Wanted, remembered
from feddd.world import fleets, models
from feddd.world.dataset import Dataset

log = logging.getLogger("feddd")


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round."""

    label: str
    record: RoundRecord


def run(
    experiment: Experiment | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    watch: Callable[[Progress], None] | None = None,
    wire: bool = False,
    pool: WorkerPool | None = None,
    checkpoint_seconds: float | None = None,
    track: Sequence[Wanted] = (),
) -> Results:
    """Simulate every strategy of an experiment and leave tables, models, a summary and report.html in `out`.

    out: a new or empty folder (default: runs/NAME-TIMESTAMP)    workers: processes (default: one per core)
    engine: "local", or "ray" for a cluster: at ray_address, else by Ray's own setting, else on this machine
    state_dir: keep what clients hold between rounds in memory-mapped files there, for fleets larger than memory
    watch: called after every round    wire: really encode and decode every payload
    pool: worker processes that were started before
    checkpoint_seconds: save so often what `resume` goes on from (default: as often as costs 1 % of the time)
    track: who is told after every round: "tensorboard", "mlflow", "wandb", an import path, or a `Tracker` class
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    options = simulation_options(workers, engine, ray_address, state_dir, wire, pool)
    trackers = Trackers(track)
    world = build_world(experiment, Path(data_dir) if data_dir is not None else None)
    note_unused_columns(experiment)
    experiment = resolved(experiment, world)
    with Simulation(world, **options) as simulation:
        check_plans(simulation, experiment)
        folder, lock = create_folder(experiment, out, identity(experiment, simulation))
        with lock, resumable(folder):
            trackers.remember(folder)
            _simulate(simulation, experiment, folder, [], trackers, watch, checkpoint_seconds)
            return finish_folder(folder)


def resume(
    folder: str | os.PathLike[str],
    *,
    rounds: int | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    watch: Callable[[Progress], None] | None = None,
    wire: bool = False,
    pool: WorkerPool | None = None,
    checkpoint_seconds: float | None = None,
    track: Sequence[Wanted] | None = None,
) -> Results:
    """Go on with an interrupted run: its folder ends as if nothing had happened, bit for bit. A finished one is read.

    folder: what `run` has begun; the other arguments are those of `run` and may differ from the first time
    rounds: go on to so many, as if the run, finished or not, had been begun with them
    track: left out, those who followed the run before
    """
    folder = Path(folder)
    check_run_folder(folder)
    longer = rounds is not None and is_longer(folder, rounds)
    if is_finished(folder) and not longer:
        return load_results(folder)
    with Lock(folder), resumable(folder):
        if rounds is not None and longer:
            extend(folder, rounds)
        experiment = load_experiment(folder / "config.toml")
        tidy(folder, experiment)
        finished, rows = finished_strategies(folder, experiment)
        if len(finished) < len(experiment.strategy):
            trackers = Trackers(remembered(folder) if track is None else track)
            trackers.remember(folder)
            options = simulation_options(workers, engine, ray_address, state_dir, wire, pool)
            find_imports(folder, experiment)
            world = build_world(experiment, Path(data_dir) if data_dir is not None else None, prove=False)
            with Simulation(world, **options) as simulation:
                check_identity(folder, identity(experiment, simulation))
                _simulate(simulation, experiment, folder, rows, trackers, watch, checkpoint_seconds, finished)
        return finish_folder(folder)


def _simulate(
    simulation: Simulation,
    experiment: Experiment,
    folder: Path,
    rows: Sequence[Rows],
    trackers: Trackers,
    watch: Callable[[Progress], None] | None,
    checkpoint_seconds: float | None,
    finished: Collection[str] = (),
) -> None:
    """Run the strategies that are not finished, each from its checkpoint if it has one; rows: of the finished ones."""
    with Tables(folder, seed=experiment.seed, then=lambda: report_so_far(folder)) as tables:
        tables.restore(rows)
        tables.write_partition(label_counts_of(simulation.world))
        write_data_facts(folder, experiment, simulation.world)
        report_so_far(folder)
        for place, section in enumerate(experiment.strategy):
            if section.label in finished:
                continue
            checkpoints = Checkpoints(folder, place, section.label, section.build(), checkpoint_seconds)
            with trackers.follow(folder, section.label, experiment.seed, settings_of(experiment, place)) as following:
                for record in simulate_rounds(simulation, experiment, checkpoints, tables, following):
                    if watch:
                        watch(Progress(section.label, record))
            tables.flush()
            checkpoints.keep_last(simulation, record)
            write_model(model_file(folder, experiment, section.label), record.state.model)
            checkpoints.clear()


def simulate_rounds(
    simulation: Simulation,
    experiment: Experiment,
    checkpoints: Checkpoints,
    tables: Tables,
    following: Following,
) -> Iterator[RoundRecord]:
    """Run one strategy from its checkpoint if it has one, else from the start; every round goes into the tables."""
    after, before = checkpoints.find(simulation.initial)
    tables.restore(before)
    following.begin([row for name, batch in before if name == "rounds" for row in batch.to_pylist()])
    rounds = experiment.rounds
    each = experiment.task is not None and experiment.task.evaluate_clients
    testing: dict[str, Any] = {"evaluate_every": experiment.evaluate_every, "evaluate_clients": each}
    for record in simulation.run(checkpoints.strategy, rounds, **testing, after=after):
        added = tables.add(checkpoints.label, record)
        following.log(added[0][1].to_pylist()[0])
        yield record
        if record.round < rounds:
            checkpoints.offer(simulation, record, added)


def settings_of(experiment: Experiment, place: int) -> dict[str, Any]:
    """Return the resolved experiment as its trackers are told it: with one strategy."""
    return experiment.model_dump(exclude={"strategy"}) | {"strategy": experiment.strategy[place].model_dump()}


def check_plans(simulation: Simulation, experiment: Experiment) -> None:
    """A first plan shows whether a strategy fits this fleet and model before anything is written."""
    initial = start(simulation.initial, len(simulation.fleet))
    for section in experiment.strategy:
        try:
            plan = section.build().plan(initial, simulation.fleet, stream(experiment.seed, "strategy", 1))
            simulation.check(plan)
        except ValueError as error:
            raise InputError(f"strategy {section.label!r}: {error}") from error


def simulation_options(
    workers: int | None,
    engine: EngineName,
    ray_address: str | None,
    state_dir: str | os.PathLike[str] | None,
    wire: bool,
    pool: WorkerPool | None,
) -> dict[str, Any]:
    """Return what a simulation is told besides its world; nothing of it changes a number."""
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}")
    if state_dir is not None and not Path(state_dir).is_dir():
        raise InputError(f"the state folder {os.fspath(state_dir)!r} does not exist")
    folder = None if state_dir is None else Path(state_dir).absolute()
    return {
        **{"workers": workers, "engine": engine, "ray_address": ray_address},
        **{"state_dir": folder, "wire": wire, "pool": pool},
    }


def build_world(experiment: Experiment, data_dir: Path | None = None, *, prove: bool = True) -> World:
    """Return the data split, devices and settings that all strategies of the experiment share.

    prove: try a fast trainer against autograd first; a run that goes on has done that
    """
    seed = experiment.seed
    data, chosen = load_data(experiment, data_dir)
    file = _fleet_file(experiment.fleet)
    parts, names = divide(experiment, data, chosen, file)
    training = _training(experiment, data, parts, prove)
    devices = _devices(experiment.fleet, file, seed, [len(part) * training.epochs for part in parts])
    faults = experiment.faults.build() if experiment.faults else Faults()
    model, objective = experiment.model, experiment.objective
    return World(
        *(data, parts, devices, model.network, training, seed, faults, objective, names),
        units=model.units,
        model_arguments=model.arguments or {},
    )


def _training(experiment: Experiment, data: Dataset, parts: Sequence[NDArray[np.int64]], prove: bool) -> Training:
    """Return the settings with the trainer that the model gets; parts: the clients' samples, to try it on."""
    given, name = experiment.training, experiment.model.network
    try:
        torch.empty(0, device=given.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"training.device {given.device!r} cannot be used here: {reason}") from error

    objective, arguments = experiment.objective, experiment.model.arguments
    classes = objective.classes(data)

    def build() -> nn.Module:
        return models.build(name, data.input_shape, classes, seed=experiment.seed, arguments=arguments)

    settings, obstacle = Training(**given.model_dump()), obstacle_of(data, objective)
    check_optimizer(settings)
    try_model(build(), data, parts, objective, name)
    try:
        trial = Trial(build, data, parts[0], objective) if prove else None
        training, reason = settle_trainer(build(), settings, trial, obstacle)
    except ValueError as error:
        key = "" if given.trainer == "auto" else "training.trainer, "
        raise InputError(f"{key}model {name!r}: {error}") from error
    if reason and prove and not obstacle:
        how = "in stacks of clients" if training.trainer == "batched" else "one client at a time"
        log.warning("model %r is trained by %r (autograd, %s): %s", name, training.trainer, how, reason)
    return training


def resolved(experiment: Experiment, world: World) -> Experiment:
    """Return the experiment with everything that was left to us written out."""
    training = experiment.training.model_copy(update={"trainer": world.training.trainer})
    changes: dict[str, Any] = {"training": training}
    if experiment.fleet.file is not None or experiment.data.partition == "natural":
        changes["fleet"] = experiment.fleet.model_copy(update={"clients": len(world.parts)})
    return experiment.model_copy(update=changes)


def preview(experiment: Experiment, data_dir: str | os.PathLike[str] | None = None) -> Results:
    """Return an experiment before it has run: its config and how it spreads the data, no rounds."""
    counts = label_counts_of(build_world(experiment, Path(data_dir) if data_dir is not None else None, prove=False))
    tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()} | {"partition": partition_table(counts)}
    return Results(Path(), experiment.model_dump(), {}, {}, tables)


def _fleet_file(fleet: FleetSection) -> fleets.FleetFile | None:
    """Return the columns of the fleet file; a client count that was also given must agree."""
    if fleet.file is None:
        return None
    file = fleets.read_csv(Path(fleet.file))
    count = len(file.clients)
    if "clients" in fleet.model_fields_set and fleet.clients not in (None, count):
        raise InputError(f"fleet.clients is {fleet.clients}, but {fleet.file} has {count} clients; leave it out")
    return file


def note_unused_columns(experiment: Experiment) -> None:
    """Say which columns of a fleet file a run does not use: they are for `feddd plan`."""
    file = _fleet_file(experiment.fleet)
    unused = [name for name in fleets.OPTIONAL if file and name in file.columns]
    if unused:
        log.warning("%s: a run does not use %s, only `feddd plan` does", experiment.fleet.file, ", ".join(unused))


def _devices(fleet: FleetSection, file: fleets.FleetFile | None, seed: int, processed: list[int]) -> fleets.Devices:
    if file:
        return fleets.Devices(*(file.columns[name] for name in fleets.REQUIRED[1:]))
    if fleet.cpu_hz is None or fleet.cycles_per_sample is None:
        raise InputError("fleet: cpu_hz and cycles_per_sample are needed")
    shannon = {key: getattr(fleet, key) for key in ("bandwidth_hz", "power_w", "gain", "noise_w")}
    return fleets.draw(
        seed,
        np.array(processed, dtype=np.float64),
        cpu_hz=fleet.cpu_hz,
        cycles_per_sample=fleet.cycles_per_sample,
        uplink_bits_per_s=fleet.uplink_bits_per_s,
        downlink_bits_per_s=fleet.downlink_bits_per_s,
        shannon=shannon if fleet.gain is not None else None,
    )


def label_counts_of(world: World) -> NDArray[np.int64]:
    """Return how many samples of each label each client has; where there are no classes, all in one column."""
    counts = world.label_counts()
    return np.array([[len(part)] for part in world.parts]) if counts is None else counts
