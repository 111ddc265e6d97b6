"""From round records to the tables of a run, kept up to date on disk while it goes on."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feddd.experiments.results import SCHEMAS
from feddd.files import write_atomically
from feddd.simulation.simulator import RoundRecord

FLUSH_SECONDS = 5.0
FLUSH_SHARE = 0.02
"""Tables are written again after so many seconds, but never for more than this share of a run's time."""

WRITTEN = ("rounds", "clients", "classes", "timings", "client_metrics")
"""The tables that grow with every round."""

Rows = tuple[str, Any]
"""A table's name, and a record batch of it."""


class Tables:
    """Collects records; every file is replaced as a whole, so that what was written stays readable."""

    def __init__(self, folder: Path, seed: int, then: Callable[[], object] | None = None) -> None:
        """then: called whenever the tables were written, in the writer's thread"""
        self._folder = folder
        self._then = then
        self._seed = seed
        self._batches: dict[str, list[Any]] = {name: [] for name in WRITTEN}
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tables")
        self._writing: Future[float] | None = None

    def __enter__(self) -> Tables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever stopped a run, the rounds that are done stay readable."""
        try:
            if error is None:
                self.flush()
            else:
                with contextlib.suppress(OSError):
                    self.flush()
        finally:
            self._writer.shutdown()

    def add(self, label: str, record: RoundRecord) -> list[Rows]:
        """Append one round; what was appended, by table."""
        added = [
            self._append("rounds", label, record.round, [_round_row(record)]),
            self._append("clients", label, record.round, [_client_row(row) for row in record.clients]),
        ]
        if record.evaluation is not None:
            accuracies = enumerate(record.evaluation.class_accuracy.tolist())
            rows = [{"label": number, "accuracy": accuracy} for number, accuracy in accuracies]
            added.append(self._append("classes", label, record.round, rows))
        if record.client_metrics is not None:
            rows = [{"client": client, "metric": value} for client, value in record.client_metrics.items()]
            added.append(self._append("client_metrics", label, record.round, rows))
        rows = [{"phase": phase, "wall_seconds": seconds} for phase, seconds in record.wall_seconds.items()]
        added.append(self._append("timings", label, record.round, rows))
        if time.monotonic() >= self._next_flush and (self._writing is None or self._writing.done()):
            self._begin_flush()
        return added

    def restore(self, rows: Iterable[Rows]) -> None:
        """Append what an earlier run had appended."""
        for name, batch in rows:
            self._batches[name].append(batch)

    def write_partition(self, counts: NDArray[np.int64]) -> None:
        """How many samples of each label each client has; counts: [clients, classes]."""
        self._write("partition", partition_table(counts))

    def flush(self) -> None:
        """Write all tables as they stand, and wait for it."""
        self._begin_flush()
        self._finish_flush()

    def _begin_flush(self) -> None:
        """Let the writer's thread do it while the next round runs; what it could not write before is raised here."""
        self._finish_flush()
        snapshot = {name: list(batches) for name, batches in self._batches.items()}
        self._writing = self._writer.submit(self._write_all, snapshot)

    def _finish_flush(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            cost = writing.result()
            self._next_flush = time.monotonic() + max(FLUSH_SECONDS, cost / FLUSH_SHARE)

    def _write_all(self, snapshot: dict[str, list[Any]]) -> float:
        """Return the seconds it took."""
        begun = time.monotonic()
        for name, batches in snapshot.items():
            if name == "client_metrics" and not batches:
                continue
            # In one piece: the bytes of the file do not depend on how the rows came together.
            self._write(name, pa.Table.from_batches(batches, schema=SCHEMAS[name]).combine_chunks())
        if self._then:
            self._then()
        return time.monotonic() - begun

    def _append(self, name: str, label: str, number: int, rows: list[dict[str, Any]]) -> Rows:
        same = {"strategy": label, "seed": self._seed, "round": number}
        known = [same | {key: _known(value) for key, value in row.items()} for row in rows]
        batch = pa.RecordBatch.from_pylist(known, schema=SCHEMAS[name])
        self._batches[name].append(batch)
        return name, batch

    def _write(self, name: str, table: Any) -> None:
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        write_atomically(self._folder / f"{name}.parquet", buffer.getvalue())


def partition_table(counts: NDArray[np.int64]) -> Any:
    """Return one row per client and label; counts: [clients, classes]."""
    clients, labels = np.indices(counts.shape)
    columns = {"client": clients.ravel(), "label": labels.ravel(), "samples": counts.ravel()}
    return pa.table(columns, schema=SCHEMAS["partition"])


def _round_row(record: RoundRecord) -> dict[str, Any]:
    rows = record.clients
    counted = [row for row in rows if row.upload.status == "ok"]
    samples = sum(row.upload.samples for row in counted)
    loss = sum(row.upload.train_loss * row.upload.samples for row in counted)
    return {
        "round_seconds": record.round_seconds,
        "clock_seconds": record.clock_seconds,
        "test_accuracy": record.evaluation.accuracy if record.evaluation else None,
        "test_metric": record.evaluation.metric if record.evaluation else None,
        "test_loss": record.evaluation.loss if record.evaluation else None,
        "train_loss": loss / samples if samples else None,
        "upload_bytes": sum(row.upload.upload_bytes for row in rows),
        "download_bytes": sum(row.upload.download_bytes for row in rows),
        "participants": len(counted),
        "mean_dropout": sum(row.dropout for row in rows) / len(rows),
        "mask_error": record.mask_error,
    }


def _client_row(row: Any) -> dict[str, Any]:
    upload = row.upload
    counted = upload.status == "ok"
    return {
        "client": upload.client,
        "status": upload.status,
        "dropout": row.dropout,
        "kept_share": upload.kept_share if counted else None,
        "train_loss": upload.train_loss,
        "samples": upload.samples,
        "upload_bytes": upload.upload_bytes,
        "download_bytes": upload.download_bytes,
        "download_seconds": row.download_seconds,
        "compute_seconds": row.compute_seconds,
        "upload_seconds": row.upload_seconds,
    }


def _known(value: Any) -> Any:
    """Null for what is not a number: the tables hold no NaN and no infinity."""
    return None if isinstance(value, float) and not np.isfinite(value) else value
