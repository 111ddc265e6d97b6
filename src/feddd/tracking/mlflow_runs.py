"""MLflow: one run per strategy, in the store of MLFLOW_TRACKING_URI, else in an SQLite file below the run's folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from feddd.files import portable_name, write_atomically
from feddd.tracking.protocol import Tracked

_MOST_PARAMS, _MOST_LETTERS = 100, 500


class MLflow:
    """Logs the settings as parameters and the rounds as steps of metrics."""

    def __init__(self, tracked: Tracked) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its tables
        remote = os.environ.get("MLFLOW_TRACKING_URI")
        tracked.folder.mkdir(parents=True, exist_ok=True)
        address = remote or f"sqlite:///{(tracked.folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=address)
        self.view = f"mlflow ui --backend-store-uri {address}" if remote is None else f"MLflow at {remote}"
        name = tracked.folder / f"{portable_name(tracked.label)}.run-id"
        self._known = 0
        found = self._find(name)
        self._run = found or self._begin(tracked, None if remote else tracked.folder / "artifacts")
        if found is None:
            write_atomically(name, self._run.encode())

    def _find(self, name: Path) -> str | None:
        """The run that was begun before, open again, with the rounds that it knows; None if there is none."""
        try:
            number = name.read_text(encoding="utf-8").strip()
            self._client.update_run(number, status="RUNNING")
            history = self._client.get_metric_history(number, "round_seconds")
        except (OSError, MlflowException):
            return None
        self._known = max((point.step for point in history), default=0)
        return number

    def _begin(self, tracked: Tracked, artifacts: Path | None) -> str:
        experiment = self._client.get_experiment_by_name(tracked.experiment)
        place = artifacts.absolute().as_uri() if artifacts else None
        at = experiment.experiment_id if experiment else self._client.create_experiment(tracked.experiment, place)
        tags = {"feddd.run": tracked.run, "feddd.seed": str(tracked.seed)}
        number: str = self._client.create_run(at, tags=tags, run_name=tracked.label).info.run_id
        params = [Param(key, str(value)[:_MOST_LETTERS]) for key, value in tracked.settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(number, params=params[start : start + _MOST_PARAMS])
        return number

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Log one step of every metric; a round that the store has is not told twice."""
        if number > self._known:
            now = round(1000 * time.time())
            self._client.log_batch(self._run, [Metric(name, value, now, number) for name, value in values.items()])

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")
