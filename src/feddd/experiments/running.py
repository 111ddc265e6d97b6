"""From an experiment to a folder of results: build the world, run every strategy on it, write the tables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.streams import stream
from feddd.core.units import units
from feddd.errors import InputError
from feddd.experiments.config import Experiment, FleetSection
from feddd.experiments.loading import load_experiment
from feddd.experiments.report import write_report
from feddd.experiments.results import SCHEMAS, Results, load_results, summarise
from feddd.experiments.tables import Tables, partition_table
from feddd.files import write_atomically
from feddd.simulation.faults import Faults
from feddd.simulation.processes import WorkerPool
from feddd.simulation.simulator import EngineName, RoundRecord, Simulation, World
from feddd.simulation.trainers import choose_trainer, make_trainer
from feddd.simulation.training import Training
from feddd.strategies.protocol import start
from feddd.world import datasets, fleets, models, partitions, synthetic

REFRESH_SECONDS = 30
"""An open page about a run that goes on loads itself again after so long."""


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
) -> Results:
    """Simulate every strategy of an experiment and leave tables, models, a summary and report.html in `out`.

    out: a new or empty folder (default: runs/NAME-TIMESTAMP)    workers: processes (default: one per core)
    engine: "local", or "ray" for a cluster: at ray_address, else by Ray's own setting, else on this machine
    state_dir: keep what clients hold between rounds in memory-mapped files there, for fleets larger than memory
    watch: called after every round    wire: really encode and decode every payload
    pool: worker processes that were started before
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}")
    world = build_world(experiment, Path(data_dir) if data_dir is not None else None)
    experiment = _resolved(experiment, world)
    strategies = {section.label: section.build() for section in experiment.strategy}
    options: dict[str, Any] = {"engine": engine, "ray_address": ray_address, "state_dir": _state_folder(state_dir)}
    with Simulation(world, workers=workers, wire=wire, pool=pool, **options) as simulation:
        initial = start(simulation.initial, len(simulation.fleet))
        for label, strategy in strategies.items():
            # A first plan shows whether the strategy fits this fleet and model before anything is written.
            try:
                strategy.plan(initial, simulation.fleet, stream(world.seed, "strategy", 1))
            except ValueError as error:
                raise InputError(f"strategy {label!r}: {error}") from error
        folder = new_folder(experiment, out)
        begin_folder(folder, experiment)
        with Tables(folder, seed=experiment.seed, then=lambda: _report_so_far(folder)) as tables:
            tables.write_partition(label_counts_of(world))
            _report_so_far(folder)
            for label, strategy in strategies.items():
                for record in simulation.run(strategy, experiment.rounds, evaluate_every=experiment.evaluate_every):
                    tables.add(label, record)
                    if watch:
                        watch(Progress(label, record))
                tables.flush()
                _write_model(folder / f"model-{label}.safetensors", record.state.model)
    return finish_folder(folder)


def write_strategy(
    simulation: Simulation, experiment: Experiment, folder: Path, watch: Callable[[RoundRecord], None]
) -> None:
    """Run the only strategy of an experiment on a world that is there already; leave config and tables in `folder`."""
    (section,) = experiment.strategy
    begin_folder(folder, _resolved(experiment, simulation.world))
    with Tables(folder, seed=experiment.seed) as tables:
        tables.write_partition(label_counts_of(simulation.world))
        for record in simulation.run(section.build(), experiment.rounds, evaluate_every=experiment.evaluate_every):
            tables.add(section.label, record)
            watch(record)


def build_world(experiment: Experiment, data_dir: Path | None = None) -> World:
    """The data split, devices and settings that all strategies of the experiment share."""
    section, seed = experiment.data, experiment.seed
    made = section.dataset in synthetic.SHAPES
    data = synthetic.make(section.dataset) if made else datasets.load(section.dataset, data_dir)
    if section.train_limit is not None:
        chosen = partitions.subsample(data.train_labels, section.train_limit, stream(seed, "train_limit"))
    else:
        chosen = np.arange(len(data.train_labels))
    if section.validation_share is not None:
        data, chosen = _held_out(data, chosen, section.validation_share, seed)
    file = _fleet_file(experiment.fleet)
    clients = len(file.clients) if file else experiment.fleet.clients
    parts = partitions.partition(
        data.train_labels[chosen],
        clients,
        section.partition,
        stream(seed, "partition"),
        classes=data.classes,
        classes_per_client=section.classes_per_client,
        alpha=0.5 if section.alpha is None else section.alpha,
    )
    parts = [chosen[part] for part in parts]
    training = _training(experiment, data)
    devices = _devices(experiment.fleet, file, seed, [len(part) * training.epochs for part in parts])
    faults = experiment.faults.build() if experiment.faults else Faults()
    return World(data, parts, devices, experiment.model.name, training, seed, faults)


def _held_out(
    data: datasets.Dataset, chosen: NDArray[np.int64], share: float, seed: int
) -> tuple[datasets.Dataset, NDArray[np.int64]]:
    """The data set with some of the chosen training samples in place of its test set, and those that are left."""
    count = max(1, round(share * len(chosen)))
    if count >= len(chosen):
        raise InputError(f"data.validation_share {share:g} leaves none of {len(chosen)} samples to train on")
    held = np.sort(stream(seed, "validation").choice(len(chosen), count, replace=False))
    images, labels = data.train_images[chosen[held]], data.train_labels[chosen[held]]
    return dataclasses.replace(data, test_images=images, test_labels=labels), np.delete(chosen, held)


def _training(experiment: Experiment, data: datasets.Dataset) -> Training:
    """The settings, with the trainer that the model gets."""
    given = experiment.training.model_dump()
    model = models.build(experiment.model.name, data.image_shape, data.classes)
    if given["trainer"] == "auto":
        given["trainer"] = choose_trainer(model)
    try:
        torch.empty(0, device=given["device"])
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"training.device {given['device']!r} cannot be used here: {reason}") from error
    try:
        make_trainer(model, units(model), given["trainer"])
    except ValueError as error:
        raise InputError(f"training.trainer, model {experiment.model.name!r}: {error}") from error
    return Training(**given)


def _resolved(experiment: Experiment, world: World) -> Experiment:
    """The experiment with everything that was left to us written out."""
    training = experiment.training.model_copy(update={"trainer": world.training.trainer})
    return experiment.model_copy(update={"training": training})


def preview(experiment: Experiment, data_dir: str | os.PathLike[str] | None = None) -> Results:
    """An experiment before it has run: its config and how it spreads the data, no rounds."""
    counts = label_counts_of(build_world(experiment, Path(data_dir) if data_dir is not None else None))
    tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()} | {"partition": partition_table(counts)}
    return Results(Path(), experiment.model_dump(), {}, {}, tables)


def _state_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"the state folder {os.fspath(folder)!r} does not exist")
    return None if folder is None else Path(folder).absolute()


def _fleet_file(fleet: FleetSection) -> fleets.FleetFile | None:
    """The columns of the fleet file; a client count that was also given must agree."""
    if fleet.file is None:
        return None
    file = fleets.read_csv(Path(fleet.file))
    count = len(file.clients)
    if "clients" in fleet.model_fields_set and fleet.clients != count:
        raise InputError(f"fleet.clients is {fleet.clients}, but {fleet.file} has {count} clients; leave it out")
    return file


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


def new_folder(experiment: Experiment, out: str | os.PathLike[str] | None) -> Path:
    """A folder that holds nothing yet; anything that does is refused."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(out) if out is not None else Path("runs") / f"{experiment.name}-{stamp}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} already holds something; give --out another folder, nothing is overwritten")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return folder


def begin_folder(folder: Path, experiment: Experiment) -> None:
    """What a run's folder holds from the start: the resolved config, and where it runs."""
    _write_text(folder / "config.toml", experiment.to_toml())
    _write_text(folder / "environment.json", _json(environment(experiment.seed)))


def environment(seed: int) -> dict[str, Any]:
    """Versions, machine and commit behind a run."""
    packages = ("feddd", "torch", "numpy", "scipy", "pyarrow")
    return {
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that this package runs from; None for an installed package."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        top = subprocess.run([*command[:3], "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() if top.returncode == 0 and found.returncode == 0 else None


def label_counts_of(world: World) -> NDArray[np.int64]:
    """How many samples of each label each client has."""
    return partitions.label_counts(world.dataset.train_labels, list(world.parts), world.dataset.classes)


def _report_so_far(folder: Path) -> None:
    """A page about a run that goes on, which loads itself again when it is open."""
    # Where there is no room for the page there may be for the tables, which are what counts.
    with contextlib.suppress(OSError):
        write_report([load_results(folder)], folder / "report.html", refresh_seconds=REFRESH_SECONDS)


def finish_folder(folder: Path) -> Results:
    """Sum up and draw what the tables say."""
    tables = load_results(folder)
    results = dataclasses.replace(tables, summary=summarise(tables))
    _write_text(folder / "summary.json", _json(results.summary))
    write_report([results], folder / "report.html")
    return results


def _write_model(path: Path, model: Mapping[str, Tensor]) -> None:
    """Save a global model; tied tensors once each, because the format does not share memory."""
    first: dict[int, str] = {}
    untied = {
        name: t.contiguous() for name, t in model.items() if first.setdefault(t.data_ptr() or id(t), name) == name
    }
    write_atomically(path, safetensors.torch.save(untied))


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
