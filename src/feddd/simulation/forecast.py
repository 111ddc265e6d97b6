"""How a round will go before it is trained: who answers when, who is too late, when the round ends, what it costs.

A payload's size follows from its task, so that all times are known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from feddd.core.latency import round_seconds, transfer_seconds
from feddd.core.units import Units
from feddd.errors import RunError
from feddd.simulation.faults import GONE, Faults, Trouble, draw
from feddd.simulation.faulty_uploads import FaultyTask, upload_bytes
from feddd.strategies.checks import PATIENCE
from feddd.strategies.protocol import Fleet, Plan, Task, Upload

Floats = NDArray[np.float64]
STATUS = {"lost": "lost", GONE: "lost: left for good", "crashed": "lost: crashed before its upload", "late": "late"}


@dataclass(frozen=True)
class ClientRow:
    """One client's part in a round, as the tables have it. Before it starts, a client is waited for in its download."""

    upload: Upload
    dropout: float
    download_seconds: float
    compute_seconds: float
    upload_seconds: float


@dataclass(frozen=True)
class Forecast:
    """A round as it will go.

    tasks: for the engine, in the order of the plan    absent: rows of those whose answer does not come in time
    end_seconds: when it goes on without them; None if it waits for everybody that it asked
    """

    fleet: Fleet
    trouble: Trouble | None
    tasks: tuple[Task, ...]
    absent: dict[int, ClientRow] = field(default_factory=dict)
    end_seconds: float | None = None

    def uploads(self, answered: Sequence[Upload]) -> tuple[Upload, ...]:
        """Return what is known of everybody that the round addressed, in client order."""
        known = {upload.client: upload for upload in answered}
        known |= {client: row.upload for client, row in self.absent.items()}
        return tuple(known[client] for client in sorted(known))

    def row(self, upload: Upload, dropout: float) -> ClientRow:
        """Charge the encoded bits to the client's links."""
        if upload.client in self.absent:
            return self.absent[upload.client]
        return _row(self.fleet, self.trouble, upload, dropout)

    def seconds(self, rows: Sequence[ClientRow]) -> float:
        """Return a synchronous round lasts as long as its slowest client (Eq. 11), or until it goes on without some."""
        if self.end_seconds is not None:
            return self.end_seconds
        parts = [(row.download_seconds, row.compute_seconds, row.upload_seconds) for row in rows]
        return round_seconds(*np.array(parts).T)


def foresee(
    faults: Faults, seed: int, plan: Plan, fleet: Fleet, tables: Sequence[Units], download_bytes: Mapping[int, int]
) -> Forecast:
    """Return the round that a plan leads to; tables: each client's. RunError if the quorum cannot be met."""
    if faults == Faults():
        return Forecast(fleet, None, plan.tasks)
    if any(task.up.planned_bytes(tables[task.client]) is None for task in plan.tasks):
        raise RunError("faults need uploads whose size is known beforehand; that of this method depends on the numbers")
    trouble = draw(faults, seed, plan.round, len(fleet))
    kinds = [str(trouble.answer[task.client]) for task in plan.tasks]
    rows = []
    for task, kind in zip(plan.tasks, kinds, strict=True):
        table = tables[task.client]
        planned = Upload(
            task.client,
            STATUS.get(kind, "ok"),
            upload_bytes=0 if kind == "crashed" else upload_bytes(task, kind, plan.round, table),
            download_bytes=download_bytes[task.client],
        )
        rows.append(_row(fleet, trouble, planned, task.dropout))
    arrival = np.array([np.inf if kind in STATUS else _total(row) for kind, row in zip(kinds, rows, strict=True)])
    end = end_seconds(arrival, faults.deadline_seconds, faults.quorum, plan.round)
    kinds = ["late" if end < at < np.inf else kind for kind, at in zip(kinds, arrival, strict=True)]
    absent = {
        row.upload.client: _cut(replace(row, upload=replace(row.upload, status=STATUS[kind])), kind, end, trouble)
        for kind, row in zip(kinds, rows, strict=True)
        if kind in STATUS
    }
    waits = faults.deadline_seconds is None or not absent
    return Forecast(fleet, trouble, _tasks(plan, kinds, faults), absent, None if waits else end)


def end_seconds(arrival_seconds: Floats, deadline_seconds: float | None, quorum: int, number: int) -> float:
    """Return when a round stops waiting: at the deadline, or with the answer that completes its quorum.

    arrival_seconds: inf for those who never answer. Without a deadline it waits for everybody: inf
    """
    answers, asked = np.sort(arrival_seconds[np.isfinite(arrival_seconds)]), len(arrival_seconds)
    needed = min(quorum, asked)
    latest = np.inf if deadline_seconds is None else PATIENCE * deadline_seconds
    good = int((answers <= latest).sum())
    if good < needed:
        within = "" if deadline_seconds is None else f" within {latest:g} s"
        raise RunError(f"in round {number} only {good} of {asked} clients answer{within}; {needed} are needed")
    if deadline_seconds is None:
        return float(np.inf)
    return max(deadline_seconds, float(answers[needed - 1]) if needed else 0.0)


def _tasks(plan: Plan, kinds: Sequence[str], faults: Faults) -> tuple[Task, ...]:
    return tuple(
        FaultyTask(**vars(task), fault=kind, lie_factor=faults.lie_factor) if kind else task
        for task, kind in zip(plan.tasks, kinds, strict=True)
    )


def _row(fleet: Fleet, trouble: Trouble | None, upload: Upload, dropout: float) -> ClientRow:
    client = upload.client
    downlink, uplink = float(fleet.downlink_bits_per_s[client]), float(fleet.uplink_bits_per_s[client])
    compute_seconds, delay_seconds = float(fleet.compute_seconds[client]), 0.0
    if trouble is not None:
        factor = float(trouble.link_factor[client])
        downlink, uplink = factor * downlink, factor * uplink
        compute_seconds *= float(trouble.compute_factor[client])
        delay_seconds = float(trouble.delay_seconds[client])
    return ClientRow(
        upload,
        dropout,
        download_seconds=delay_seconds + transfer_seconds(8.0 * upload.download_bytes, downlink),
        compute_seconds=compute_seconds,
        upload_seconds=transfer_seconds(8.0 * upload.upload_bytes, uplink),
    )


def _total(row: ClientRow) -> float:
    return row.download_seconds + row.compute_seconds + row.upload_seconds


def _cut(row: ClientRow, kind: str, end: float, trouble: Trouble) -> ClientRow:
    """Return what really travelled of a client that the round went on without; nothing if it was not there."""
    upload = row.upload
    if kind in ("lost", GONE):
        nothing = replace(upload, upload_bytes=0, download_bytes=0)
        return ClientRow(nothing, row.dropout, 0.0, 0.0, 0.0)
    down = min(row.download_seconds, end)
    compute = min(row.compute_seconds, end - down)
    up = min(row.upload_seconds, end - down - compute)
    delay = float(trouble.delay_seconds[upload.client])
    travelled = replace(
        upload,
        download_bytes=_share(upload.download_bytes, down - delay, row.download_seconds - delay),
        upload_bytes=_share(upload.upload_bytes, up, row.upload_seconds),
    )
    return ClientRow(travelled, row.dropout, down, compute, up)


def _share(size: int, seconds: float, whole_seconds: float) -> int:
    return size if seconds >= whole_seconds else int(size * max(seconds, 0.0) / whole_seconds)
