"""More rounds for a run that is there: its strategies go on from their last checkpoints, as if nothing had ended."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from feddd.errors import InputError
from feddd.experiments.checkpoints import move_last
from feddd.experiments.folders import IDENTITY, recorded
from feddd.experiments.loading import load_experiment
from feddd.experiments.results import CHECKPOINTS, LAST, SCHEMAS, read_table
from feddd.experiments.resuming import finished_strategies
from feddd.experiments.tables import WRITTEN, Rows
from feddd.files import write_atomically


def is_longer(folder: Path, rounds: int) -> bool:
    """Whether a run is to get more rounds than it was begun with; fewer are refused."""
    begun = load_experiment(folder / "config.toml").rounds
    if rounds < begun:
        raise InputError(f"--rounds {rounds}: {folder} has {begun} rounds already, and none can be taken away")
    return rounds > begun


def extend(folder: Path, rounds: int) -> None:
    """Make a run's folder one that was interrupted on its way to more rounds; this process has its lock.

    The last step is the config: until then the run is what it was.
    """
    experiment = load_experiment(folder / "config.toml")
    kept = folder / LAST / IDENTITY
    if kept.is_file():
        write_atomically(folder / CHECKPOINTS / IDENTITY, kept.read_bytes())
    finished, _ = finished_strategies(folder, experiment)
    tables = {name: read_table(folder, name) for name in WRITTEN} if finished else {}
    for place, label in enumerate(finished):  # those that come first
        move_last(folder, place, functools.partial(rows_until, tables, experiment.evaluate_every, label))
    longer = recorded(experiment.model_copy(update={"rounds": rounds}))
    write_atomically(folder / "config.toml", longer.to_toml().encode())


def rows_until(tables: Mapping[str, Any], evaluate_every: int, label: str, last: int) -> list[Rows]:
    """The rows of a strategy up to a round, as a longer run has them: its last round was tested for being the last."""
    rows: list[Rows] = []
    for name, table in tables.items():
        mine = table.filter(pc.and_(pc.equal(table["strategy"], label), pc.less_equal(table["round"], last)))
        rounds = mine["round"]
        due = pc.equal(rounds, pc.multiply(pc.divide(rounds, evaluate_every), evaluate_every))
        if name in ("classes", "client_metrics"):
            mine = mine.filter(due)
        for at, field in enumerate(SCHEMAS[name]):
            if field.name.startswith("test_"):
                mine = mine.set_column(at, field, pc.if_else(due, mine[field.name], pa.scalar(None, field.type)))
        rows += [(name, batch) for batch in mine.combine_chunks().to_batches()]
    return rows
