"""What an interrupted run's folder tells the process that goes on with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError, safe_open

from feddd.errors import InputError, RunError
from feddd.experiments.config import Experiment
from feddd.experiments.folders import (
    IDENTITY,
    begin_folder,
    environment,
    model_file,
    recorded,
    to_json,
    versions,
    write_environment,
)
from feddd.experiments.results import CHECKPOINTS, read_table
from feddd.experiments.tables import WRITTEN, Rows
from feddd.files import write_atomically
from feddd.simulation.simulator import Simulation
from feddd.simulation.workers import WorkerDied
from feddd.world.models import import_folder, import_from, import_object
from feddd.world.sources import is_own

log = logging.getLogger("feddd")


def identity(experiment: Experiment, simulation: Simulation) -> dict[str, Any]:
    """Return a digest of everything that a run's numbers come from, as far as it was given from outside.

    How many rounds there are to be is left out: a run may get more of them. So is what is left at its default: a new
    option does not keep anybody from going on.
    """
    settings = recorded(experiment).model_dump(mode="json", exclude_defaults=True, exclude={"rounds"})
    world, digest = simulation.world, hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    devices = world.devices
    for array in (
        *world.parts,
        world.dataset.train_targets,
        *(np.asarray(getattr(devices, name)) for name in sorted(vars(devices))),
        *(tensor.detach().cpu().numpy() for tensor in simulation.initial.values()),
    ):
        digest.update(np.ascontiguousarray(array).tobytes())
    if world.units is not None:
        digest.update(simulation.units.digest)
    if is_own(experiment.data.dataset):
        digest.update(world.dataset.digest().encode())
    return {"sha256": digest.hexdigest(), "imports": import_folders(experiment)}


def import_folders(experiment: Experiment) -> dict[str, str]:
    """Return where the experiment's own code was found, by import path: its run's config.toml lies elsewhere."""
    found = {path: import_folder(path) for path in experiment.import_paths}
    return {path: str(folder) for path, folder in found.items() if folder is not None}


def find_imports(folder: Path, experiment: Experiment) -> None:
    """Let the code be found that an interrupted run was begun with; say where it was if it is gone."""
    places = _document(folder / CHECKPOINTS / IDENTITY).get("imports")
    before = {path: Path(str(place)) for path, place in places.items()} if isinstance(places, dict) else {}
    for place in before.values():
        import_from(place)
    for path in experiment.import_paths:
        try:
            import_object(path)
        except InputError as error:
            where = f"; the run was begun with code from {before[path]}" if path in before else ""
            gone = ", which is gone" if path in before and not before[path].is_dir() else ""
            raise InputError(f"{error}{where}{gone}") from error


def check_identity(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, devices or weights; say so if libraries have changed."""
    if _document(folder / CHECKPOINTS / IDENTITY).get("sha256", found["sha256"]) != found["sha256"]:
        raise InputError(
            f"{folder} cannot be resumed: its config.toml, the fleet's file, the data or the model's code changed"
        )
    before, now = _document(folder / "environment.json").get("versions", {}), versions()
    other = [f"{name} {before[name]} → {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if other:
        log.warning("%s was begun with other versions (%s): the last digits may differ", folder, ", ".join(other))


def reuse_folder(folder: Path, experiment: Experiment, found: Mapping[str, Any]) -> None:
    """Make a folder ready for a run: as it is if an interrupted run of the same has left it, else begun anew."""
    if (folder / "config.toml").is_file() and _document(folder / CHECKPOINTS / IDENTITY) == found:
        check_identity(folder, found)
        tidy(folder, experiment)
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / CHECKPOINTS).mkdir(parents=True)
    write_atomically(folder / CHECKPOINTS / IDENTITY, to_json(found).encode())
    begin_folder(folder, experiment)


def _document(path: Path) -> dict[str, Any]:
    """Return a JSON file; empty where it is missing or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def finished_strategies(folder: Path, experiment: Experiment) -> tuple[list[str], list[Rows]]:
    """Return the strategies that need not run again, and their rows: their model is written after all of their rows."""
    labels = [section.label for section in experiment.strategy]
    try:
        tables = {name: read_table(folder, name) for name in WRITTEN}
        finished = list(takewhile(lambda label: _is_finished(folder, experiment, label, tables), labels))
    except (OSError, pa.ArrowException) as error:
        log.warning("the tables in %s cannot be read (%s); all strategies begin again", folder, error)
        return [], []
    rows: list[Rows] = []
    for name, table in tables.items():
        mine = table.filter(pc.is_in(table["strategy"], pa.array(finished, pa.string())))
        rows += [(name, batch) for batch in mine.to_batches()]
    return finished, rows


def _is_finished(folder: Path, experiment: Experiment, label: str, tables: dict[str, Any]) -> bool:
    try:
        with safe_open(model_file(folder, experiment, label), framework="pt"):
            pass
    except (OSError, SafetensorError):
        return False
    return all(
        set(table.filter(pc.equal(table["strategy"], label))["round"].to_pylist())
        == set(range(1, experiment.rounds + 1))
        for table in (tables["rounds"], tables["clients"])
    )


def tidy(folder: Path, experiment: Experiment) -> None:
    """Remove what was being written when the run was killed, and replace an environment.json that was lost."""
    for path in [*folder.iterdir(), *(folder / CHECKPOINTS).glob("*")]:
        if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) and path.is_file():
            path.unlink(missing_ok=True)
    if not _document(folder / "environment.json"):
        write_environment(folder, environment(experiment.seed))


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Whatever stops the run is told with how to go on, unless the same would happen again."""
    try:
        yield
    except (InputError, RunError) as error:
        if isinstance(error, WorkerDied):
            error.add_note(advice(folder))
        raise
    except BaseException as error:
        error.add_note(advice(folder))
        raise


def advice(folder: Path) -> str:
    """Return how to go on."""
    return f"go on with: feddd run --resume {shlex.quote(str(folder))}"
