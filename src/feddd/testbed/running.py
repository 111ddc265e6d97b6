"""`feddd testbed`: an experiment as a deployment, strategy by strategy, with the tables of a simulation at the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from feddd.errors import InputError, RunError
from feddd.experiments.config import Experiment
from feddd.experiments.data import write_data_facts
from feddd.experiments.folders import begin_folder, finish_folder, new_folder
from feddd.experiments.results import Results
from feddd.experiments.resuming import import_folders
from feddd.experiments.running import build_world, label_counts_of, note_unused_columns, resolved
from feddd.experiments.tables import Tables
from feddd.files import write_atomically
from feddd.simulation.forecast import ClientRow
from feddd.simulation.simulator import RoundRecord, World
from feddd.strategies.protocol import Upload
from feddd.testbed.deployment import Deployment, Wrap
from feddd.testbed.namespaces import SERVER_ADDRESS, Network
from feddd.testbed.reaper import Reaper
from feddd.world import models

APP = Path(__file__).parent / "app"
POLL_SECONDS = 2.0
STATUS_SECONDS = 20.0
"""Asking Flower how a run is starts a process of some seconds of work; looking for a new line does not."""

Watch = Callable[[str, int, float | None], None]
"""Told after every round: the strategy's label, the round, the metric on the test samples."""


@dataclass(frozen=True)
class Options:
    """shaping: links as slow as the experiment says, in namespaces; else plain loopback

    insecure: no TLS and no keys, for loopback only    deadline_seconds: of a round
    """

    shaping: bool = True
    insecure: bool = False
    deadline_seconds: float = 1800.0
    fixed_links: bool = False
    data_dir: Path | None = None


@dataclass(frozen=True)
class _Tested:
    metric: float
    accuracy: float | None
    loss: float
    class_accuracy: np.ndarray[Any, np.dtype[np.float64]]


def run_testbed(
    experiment: Experiment, out: Path | None = None, options: Options | None = None, watch: Watch | None = None
) -> Results:
    """Deploy the experiment on this machine and leave tables, wire.json and a report in `out`."""
    options = options or Options()
    if options.insecure and options.shaping:
        raise InputError("--insecure is for loopback only: it goes with --no-shaping")
    if experiment.faults is not None:
        raise InputError("faults are for the simulator (`feddd run`): a testbed's clients are real")
    training = experiment.training.model_copy(update={"trainer": "reference"})
    experiment = experiment.model_copy(update={"training": training})
    world = build_world(experiment, options.data_dir)
    note_unused_columns(experiment)
    experiment = resolved(experiment, world)
    folder = new_folder(experiment, out).absolute()
    begin_folder(folder, experiment)
    deployment_folder = folder / "deployment"
    with contextlib.ExitStack() as stack:
        reaper = stack.enter_context(Reaper())
        network = stack.enter_context(Network(_rates(world), reaper=reaper)) if options.shaping else None
        deployment = stack.enter_context(_deploy(world, deployment_folder, options, network, reaper))
        tables = stack.enter_context(Tables(folder, seed=experiment.seed))
        tables.write_partition(label_counts_of(world))
        write_data_facts(folder, experiment, world)
        wire = {}
        for section in experiment.strategy:
            before = _traffic(network, len(world.parts))
            for record in _run_strategy(deployment, experiment, section.label, folder, options, watch):
                tables.add(section.label, record)
            after = _traffic(network, len(world.parts))
            wire[section.label] = [
                {"client": n, "sent_bytes": a[0] - b[0], "received_bytes": a[1] - b[1]}
                for n, (a, b) in enumerate(zip(after, before, strict=True))
            ]
            if network:
                write_atomically(folder / "wire.json", (json.dumps(wire, indent=2) + "\n").encode())
    return finish_folder(folder)


def _rates(world: World) -> list[tuple[float, float]]:
    devices = world.devices
    return [(float(u), float(d)) for u, d in zip(devices.uplink_bits_per_s, devices.downlink_bits_per_s, strict=True)]


def _deploy(world: World, folder: Path, options: Options, network: Network | None, reaper: Reaper) -> Deployment:
    configs: list[dict[str, str | int | float]] = [
        {
            "partition-id": n,
            "sub-model": n % models.widths(world.model),
            "feddd-store": str(folder / "stores" / str(n)),
            "uplink-bits-per-s": up,
            "downlink-bits-per-s": down,
        }
        for n, (up, down) in enumerate(_rates(world))
    ]
    wrap = cast("Wrap", network.wrap) if network else (lambda _, command: list(command))
    address = SERVER_ADDRESS if network else "127.0.0.1"
    return Deployment(
        folder, configs, address=address, secure=not options.insecure, wrap=wrap, database=False, reaper=reaper
    )


def _traffic(network: Network | None, clients: int) -> list[tuple[int, int]]:
    if network is None:
        return [(0, 0)] * clients
    return [(seen.sent, seen.received) for seen in (network.traffic(n) for n in range(clients))]


def _run_strategy(
    deployment: Deployment, experiment: Experiment, label: str, folder: Path, options: Options, watch: Watch | None
) -> Iterator[RoundRecord]:
    """Start the run and yield its rounds as they come."""
    place = [section.label for section in experiment.strategy].index(label)
    out = folder / "deployment" / f"run-{place}"
    out.mkdir(parents=True)
    config: dict[str, str | int | float] = {
        "experiment": str(folder / "config.toml"),
        "import-folders": os.pathsep.join(dict.fromkeys(import_folders(experiment).values())),
        "strategy": label,
        "out": str(out),
        "data-dir": str(options.data_dir.absolute()) if options.data_dir else "",
        "deadline-seconds": float(options.deadline_seconds),
        "rounds": experiment.rounds,
        "fixed-links": options.fixed_links,
    }
    run = deployment.run_app(APP, config)
    path, seen, asked = out / "rounds.jsonl", 0, time.monotonic()
    while seen < experiment.rounds:
        status = ""
        if time.monotonic() - asked > STATUS_SECONDS:  # before the lines are read, which may be the last ones
            status, asked = deployment.status(run), time.monotonic()
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole[seen:]:
            document = json.loads(line)
            if watch:
                watch(label, document["round"], document["evaluation"]["metric"])
            yield record_of(document)
        if status.startswith("finished") and len(whole) == seen:
            words = " ".join(deployment.run_log(run).split())[-500:]
            raise RunError(f"the deployment ended after {seen} of {experiment.rounds} rounds ({status}): {words}")
        seen = len(whole)
        time.sleep(POLL_SECONDS)


def record_of(document: dict[str, Any]) -> RoundRecord:
    """Return a line of rounds.jsonl as the record that tables take; what a deployment cannot see is not a number."""
    rows = []
    for client in document["clients"]:
        upload = Upload(
            client=client["client"],
            status=client["status"],
            mask=bytes.fromhex(client["mask"]),
            kept_share=_number(client["kept_share"]),
            train_loss=_number(client["train_loss"]),
            samples=client["samples"] or 0,
            upload_bytes=client["upload_bytes"],
            download_bytes=client["download_bytes"],
        )
        rows.append(ClientRow(upload, client["dropout"], math.nan, _number(client["compute_seconds"]), math.nan))
    tested = document["evaluation"]
    evaluation = _Tested(tested["metric"], tested["accuracy"], tested["loss"], np.array(tested["classes"]))
    return RoundRecord(
        round=document["round"],
        round_seconds=document["seconds"],
        clock_seconds=document["clock_seconds"],
        clients=tuple(sorted(rows, key=lambda row: row.upload.client)),
        evaluation=cast("Any", evaluation),
        mask_error=None,
        state=cast("Any", None),
        wall_seconds={},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
