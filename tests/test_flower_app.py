"""The example app runs with `flwr run`, in simulation and as a deployment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import PATIENCE, ending
from feddd.testbed.deployment import OFFLINE, Deployment

APP = Path(__file__).parents[1] / "examples" / "flower-app"


@contextlib.contextmanager
def flower_home(folder: Path) -> Iterator[dict[str, str]]:
    """An environment with a private home; whatever was started in it and still runs is ended."""
    home = str(folder / "flwr")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        yield {**os.environ, **OFFLINE, "FLWR_HOME": home, "XDG_CACHE_HOME": str(folder / "cache"), "PATH": tools}
    finally:
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.slow
def test_the_example_runs_in_flowers_simulation(tmp_path: Path) -> None:
    with flower_home(tmp_path) as environment:
        command = ["flwr", "run", str(APP), "local", "--stream", "--run-config", "rounds=2"]
        command += ["--federation-config", "num-supernodes=2"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        listed = ["flwr", "list", "local", "--format", "json"]
        answer = subprocess.run(listed, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["runs"][0]["status"] == "finished:completed", done.stdout[-2000:]
    check(done.stdout)


@pytest.mark.slow
def test_the_example_runs_as_a_deployment(tmp_path: Path) -> None:
    configs = [
        {"partition-id": n, "num-partitions": 2, "feddd-store": str(tmp_path / f"store-{n}"), "uplink-bits-per-s": rate}
        for n, rate in enumerate((1e6, 4e6))
    ]
    with Deployment(tmp_path / "deployment", configs) as running:
        run = running.run_app(APP, {"rounds": 2})
        status = ending(running, run)
        said = running.run_log(run)
    assert status == "finished:completed", said[-2000:]
    check(said)


def check(said: str) -> None:
    """Round 1 uploads everything, round 2 the budget's share of it."""
    sent = [int(line.split(" bytes up")[0].split()[-1]) for line in said.splitlines() if "bytes up" in line]
    assert len(sent) == 2
    assert sent[1] / sent[0] == pytest.approx(0.6, abs=0.02)
    assert "round 2: accuracy 0.9" in said or "round 2: accuracy 1.0" in said
