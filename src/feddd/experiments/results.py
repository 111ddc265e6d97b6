"""The tables of a run: their columns, how they are written and read, and the summary made from them.

Everything here is a function of the experiment, except ``timings``, which says what the run itself cost.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from feddd.errors import InputError
from feddd.experiments.checks import check_config, read_checked, read_names
from feddd.experiments.metrics import ACCURACY, Metric, metric_of
from feddd.files import parse_json, parse_toml, read_text
from feddd.world.fleets import read_csv

CHECKPOINTS = "checkpoint"
"""In a run's folder until it is finished: what it goes on from, and the lock of the process that runs it."""

LAST = "last"
"""In a finished run's folder: what each strategy goes on from if more rounds are asked for."""

FLEET_FILE = "fleet.csv"
"""In the folder of a run whose fleet came from a file: a copy of it."""

DATA_FILE = "data.json"
"""In the folder of a run on data of one's own: its shapes, its digest, and the names of classes and clients."""

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()

SCHEMAS: Mapping[str, Any] = {
    "rounds": pa.schema(
        [
            ("strategy", _TEXT),
            ("seed", _INT),
            ("round", _INT),
            ("round_seconds", _FLOAT),
            ("clock_seconds", _FLOAT),
            ("test_accuracy", _FLOAT),
            ("test_metric", _FLOAT),
            ("test_loss", _FLOAT),
            ("train_loss", _FLOAT),
            ("upload_bytes", _INT),
            ("download_bytes", _INT),
            ("participants", _INT),
            ("mean_dropout", _FLOAT),
            ("mask_error", _FLOAT),
        ]
    ),
    "clients": pa.schema(
        [
            ("strategy", _TEXT),
            ("seed", _INT),
            ("round", _INT),
            ("client", _INT),
            ("status", _TEXT),
            ("dropout", _FLOAT),
            ("kept_share", _FLOAT),
            ("train_loss", _FLOAT),
            ("samples", _INT),
            ("upload_bytes", _INT),
            ("download_bytes", _INT),
            ("download_seconds", _FLOAT),
            ("compute_seconds", _FLOAT),
            ("upload_seconds", _FLOAT),
        ]
    ),
    "classes": pa.schema([("strategy", _TEXT), ("seed", _INT), ("round", _INT), ("label", _INT), ("accuracy", _FLOAT)]),
    "timings": pa.schema(
        [("strategy", _TEXT), ("seed", _INT), ("round", _INT), ("phase", _TEXT), ("wall_seconds", _FLOAT)]
    ),
    "client_metrics": pa.schema(
        [("strategy", _TEXT), ("seed", _INT), ("round", _INT), ("client", _INT), ("metric", _FLOAT)]
    ),
    "partition": pa.schema([("client", _INT), ("label", _INT), ("samples", _INT)]),
}


@dataclass(frozen=True)
class Results:
    """A run's folder, read: its resolved config, its environment and its tables (pyarrow), by name."""

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    tables: Mapping[str, Any]

    @functools.cached_property
    def clients(self) -> tuple[str, ...]:
        """The clients' names: those in the folder's copy of the fleet's file, else those that the data came with."""
        # A config may come from a stranger: no other file that it names is read.
        path = self.path / FLEET_FILE
        named = self.config.get("fleet", {}).get("file") == FLEET_FILE and path.is_file()
        return read_csv(path).clients if named else read_names(self.path / DATA_FILE, "clients")

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, where the data has them."""
        return read_names(self.path / DATA_FILE, "classes")

    @property
    def metric(self) -> Metric:
        """Return what the global model is tested by."""
        return metric_of(self.config)

    @property
    def labels(self) -> list[str]:
        """Return the strategies' labels, in the order of the config."""
        return [strategy["label"] for strategy in self.config["strategy"]]

    def client_name(self, client: int) -> str:
        """Return what a client is called: as in the fleet's file, else by its number."""
        return self.clients[client] if 0 <= client < len(self.clients) else str(client)

    def class_name(self, label: int) -> str:
        """Return what a class is called: as in the data, else by its number."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def rows(self, table: str, **equal: object) -> list[dict[str, Any]]:
        """Return the rows of a table whose columns equal the given values, as dicts."""
        rows = self.tables[table].to_pylist()
        return [row for row in rows if all(row[column] == value for column, value in equal.items())]


def check_run_folder(folder: Path) -> None:
    """Refuse what no run has left behind."""
    if (folder / "sweep.toml").is_file():
        raise InputError(f"{folder} holds a sweep: feddd.resume_sweep goes on with it, feddd.load_sweep reads it")
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} is not a run's folder: it has no config.toml")
    if (folder / "deployment").is_dir():
        raise InputError(f"{folder} was left by `feddd testbed`; only what `feddd run` began can be resumed")


def is_finished(folder: Path) -> bool:
    """Return whether a run was brought to its end."""
    return (folder / "summary.json").is_file() and not (folder / CHECKPOINTS).exists()


def load_results(path: str | os.PathLike[str]) -> Results:
    """Read the folder that a run left behind (a run still going on shows what there is so far)."""
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} is not a run's folder: it has no config.toml")
    try:
        config = parse_toml(read_text(folder / "config.toml", "utf-8-sig"))
        check_config(config)
        documents = {name: _read_json(folder / f"{name}.json") for name in ("environment", "summary")}
        tables = {name: read_table(folder, name) for name in SCHEMAS}
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{folder} holds a damaged file: {' '.join(str(error).split())}") from error
    return Results(folder, config, documents["environment"], documents["summary"], tables)


def read_table(folder: Path, name: str) -> Any:
    """Return one table of a run; empty where the run has not written it yet."""
    path = folder / f"{name}.parquet"
    return read_checked(path, SCHEMAS[name]) if path.is_file() else SCHEMAS[name].empty_table()


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json(read_text(path)) if path.is_file() else {}


def time_to_target(rounds: Sequence[Mapping[str, Any]], target: float, metric: Metric = ACCURACY) -> float | None:
    """Simulated seconds until the test metric first reaches `target`; None if it never does.

    rounds: the rows of one strategy and seed, in order.
    """
    for row in rounds:
        value = metric.tested(row)
        if value is not None and metric.reached(value, target):
            return None if row["clock_seconds"] is None else float(row["clock_seconds"])
    return None


def summarise(results: Results) -> dict[str, Any]:
    """Per strategy: final and best metric, clock, bytes, time to each target and its ratio to FedAvg's.

    Where the metric is the accuracy it is there under that name too.
    """
    metric, config = results.metric, results.config
    targets = [float(target) for target in config["targets"]]
    rounds = {label: results.rows("rounds", strategy=label) for label in results.labels}
    times = {label: {at: time_to_target(rows, at, metric) for at in targets} for label, rows in rounds.items()}
    reference = reference_label(config)
    strategies = {}
    for label, rows in rounds.items():
        values = [value for row in rows if (value := metric.tested(row)) is not None]
        final, best = values[-1] if values else None, metric.best(values)
        reached = [
            {
                "target": target,
                "seconds": times[label][target],
                "ratio_to_fedavg": _ratio(times[label][target], times[reference][target] if reference else None),
            }
            for target in targets
        ]
        strategies[label] = {
            "rounds": len(rows),
            "final_metric": final,
            "best_metric": best,
            "final_accuracy": final if metric.percent else None,
            "best_accuracy": best if metric.percent else None,
            "clock_seconds": rows[-1]["clock_seconds"] if rows else None,
            "upload_bytes": sum(row["upload_bytes"] or 0 for row in rows),
            "download_bytes": sum(row["download_bytes"] or 0 for row in rows),
            "time_to_target": reached,
            "time_to_accuracy": reached if metric.percent else [],
        }
        worst = worst_tenth(results, label)
        if worst is not None:
            strategies[label]["worst_tenth_of_clients"] = worst
    about = {"name": metric.name, "higher_is_better": metric.higher_is_better}
    return {"name": config["name"], "seed": config["seed"], "metric": about, "strategies": strategies}


def worst_tenth(results: Results, label: str) -> float | None:
    """The metric of the last model tested, over the worst tenth of clients on their own data; None if not recorded."""
    rows = [row for row in results.rows("client_metrics", strategy=label) if row["metric"] is not None]
    last = max((row["round"] for row in rows), default=None)
    return results.metric.worst_tenth([row["metric"] for row in rows if row["round"] == last])


def reference_label(config: Mapping[str, Any]) -> str | None:
    """Return the label of the FedAvg that others are compared with: full participation if there is one."""
    fedavgs = [strategy for strategy in config["strategy"] if strategy["name"] == "fedavg"]
    fedavgs.sort(key=lambda strategy: -strategy.get("participation", 1.0))
    return fedavgs[0]["label"] if fedavgs else None


def _ratio(seconds: float | None, reference: float | None) -> float | None:
    return seconds / reference if seconds is not None and reference is not None and reference > 0 else None
