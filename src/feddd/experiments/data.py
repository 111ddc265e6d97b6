"""The data of an experiment: loaded, cut to what was asked for, and divided among the clients."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feddd.core.streams import stream
from feddd.errors import InputError
from feddd.experiments.config import Experiment
from feddd.experiments.problem import DataSection
from feddd.experiments.results import DATA_FILE
from feddd.files import write_atomically
from feddd.simulation.simulator import World
from feddd.world import datasets, partitions, synthetic
from feddd.world.dataset import Dataset
from feddd.world.fleets import FleetFile
from feddd.world.owners import natural, own_split
from feddd.world.sources import is_own, is_table, load_own

Indices = NDArray[np.int64]

log = logging.getLogger("feddd")


def load_data(experiment: Experiment, data_dir: Path | None) -> tuple[Dataset, Indices]:
    """Return the data set, with targets as the loss takes them, and the training samples that clients may have."""
    section, seed = experiment.data, experiment.seed
    data = _load(experiment, section, data_dir)
    try:
        data = experiment.objective.prepare(data)
    except InputError as error:
        raise InputError(f"data set {section.dataset!r}: {error}") from error
    if section.train_limit is not None:
        chosen = partitions.subsample(data.train_targets, section.train_limit, stream(seed, "train_limit"))
    else:
        chosen = np.arange(len(data.train_targets))
    if section.validation_share is not None:
        return _held_out(data, chosen, section.validation_share, seed)
    return data, chosen


def _load(experiment: Experiment, section: DataSection, data_dir: Path | None) -> Dataset:
    if not is_own(section.dataset):
        made = section.dataset in synthetic.SHAPES
        return synthetic.make(section.dataset) if made else datasets.load(section.dataset, data_dir)
    table = None
    if is_table(section.dataset):
        table = {
            "target": section.target,
            "client": section.client,
            "test_share": section.test_share,
            "standardise": section.standardise is not False,
            "classes": experiment.objective.loss != "mse",
        }
    return load_own(section.dataset, section.arguments, table=table, rng=stream(experiment.seed, "test_share"))


def _held_out(data: Dataset, chosen: Indices, share: float, seed: int) -> tuple[Dataset, Indices]:
    """The data set with some of the chosen training samples in place of its test set, and those that are left."""
    count = max(1, round(share * len(chosen)))
    if count >= len(chosen):
        raise InputError(f"data.validation_share {share:g} leaves none of {len(chosen)} samples to train on")
    held = np.sort(stream(seed, "validation").choice(len(chosen), count, replace=False))
    return data.tested_on(chosen[held]), np.delete(chosen, held)


def divide(
    experiment: Experiment, data: Dataset, chosen: Indices, file: FleetFile | None
) -> tuple[list[Indices], tuple[str, ...]]:
    """Return each client's samples among the chosen ones, and the clients' names where the data or a file has them."""
    section, rng = experiment.data, stream(experiment.seed, "partition")
    wanted = None if file is None else file.clients
    if section.partition == "natural":
        owners = None if data.clients is None else data.clients[chosen]
        parts, names = natural(owners, experiment.fleet.clients, wanted, rng)
        if wanted is not None and owners is not None and len(names) < len(np.unique(owners)):
            rest = len(np.unique(owners)) - len(names)
            log.warning("%d owners are not in %s and take no part", rest, experiment.fleet.file)
        return [chosen[part] for part in parts], names
    clients = experiment.fleet.clients or 0 if wanted is None else len(wanted)
    targets = data.train_targets[chosen]
    if ":" in section.partition:
        parts = own_split(section.partition, targets, clients, rng)
    else:
        parts = partitions.partition(
            targets,
            clients,
            section.partition,
            rng,
            classes=data.class_count if experiment.objective.has_classes(data) else None,
            classes_per_client=section.classes_per_client,
            alpha=0.5 if section.alpha is None else section.alpha,
        )
    return [chosen[part] for part in parts], wanted or ()


def write_data_facts(folder: Path, experiment: Experiment, world: World) -> None:
    """Leave in a run's folder what its data was, where that is nobody else's to know: data.json."""
    data = world.dataset
    if not is_own(experiment.data.dataset):
        return
    document = {
        "dataset": experiment.data.dataset,
        "sha256": data.digest(),
        "arrays": {name: {"shape": list(array.shape), "type": str(array.dtype)} for name, array in data.arrays()},
        "classes": list(data.class_names),
        "clients": list(world.names),
    }
    write_atomically(folder / DATA_FILE, (json.dumps(document, indent=2) + "\n").encode())
