"""A real deployment: a SuperLink and SuperNodes as processes, TLS and registered keys, on loopback; and its faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments import PATIENCE, ending, hasty
from feddd.errors import InputError
from feddd.experiments.config import Experiment, parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation
from feddd.testbed.certificates import make_certificates
from feddd.testbed.deployment import CONNECTION, Deployment
from feddd.testbed.namespaces import Network, check_possible
from feddd.testbed.running import APP, record_of

CLIENTS = 3


def small(rounds: int, name: str = "feddd", **options: Any) -> Experiment:
    strategy = {"name": name, **({"broadcast_every": 3} if name == "feddd" else {}), **options}
    return parse_experiment(
        {
            "name": "deployed",
            "rounds": rounds,
            "data": {"dataset": "fashion-mnist-mini", "partition": "iid", "train_limit": 300},
            "fleet": {"clients": CLIENTS},
            "training": {"trainer": "reference", "batch_size": 16, "learning_rate": 0.05},
            "strategy": [strategy],
        }
    )


def deployment(folder: Path, **options: Any) -> Deployment:
    configs = [{"partition-id": n, "feddd-store": str(folder / f"store-{n}")} for n in range(CLIENTS)]
    return Deployment(folder / "deployment", configs, **options)


def begin(running: Deployment, folder: Path, experiment: Experiment, deadline_seconds: float = 300.0) -> int:
    (folder / "out").mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
    config = {
        "experiment": str(folder / "experiment.toml"),
        "strategy": experiment.strategy[0].label,
        "out": str(folder / "out"),
        "rounds": experiment.rounds,
        "deadline-seconds": deadline_seconds,
        "fixed-links": True,
    }
    return running.run_app(APP, config)


def rounds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "rounds.jsonl"
    written = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]


def wait(what: Callable[[], bool], running: Deployment, run: int | None = None) -> None:
    begun = looked = time.monotonic()
    while not what():
        now = time.monotonic()
        if run is not None and now - looked > 15.0:
            looked = now
            assert running.status(run) != "finished:failed", running.run_log(run)[-2000:]
        assert now - begun < PATIENCE, running.log("superlink")[-2000:]
        time.sleep(0.2)


def finish(running: Deployment, folder: Path, experiment: Experiment) -> list[dict[str, Any]]:
    run = begin(running, folder, experiment)
    wait(lambda: len(rounds(folder)) >= experiment.rounds, running, run)
    assert ending(running, run) == "finished:completed", running.run_log(run)[-2000:]
    return rounds(folder)


def online(running: Deployment) -> int:
    nodes = json.loads(running.flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def statuses(document: dict[str, Any]) -> dict[int, str]:
    return {client["client"]: client["status"] for client in document["clients"]}


def simulate(experiment: Experiment) -> list[RoundRecord]:
    with Simulation(build_world(experiment), workers=1) as simulation:
        return list(simulation.run(experiment.strategy[0].build(), experiment.rounds))


@pytest.mark.slow
def test_a_deployment_with_tls_and_keys_ends_with_the_simulators_masks_sizes_and_model(tmp_path: Path) -> None:
    plain, coded = small(3), small(3, value_bits=4)
    with deployment(tmp_path) as running:
        stranger = make_certificates(tmp_path / "stranger", ["127.0.0.1"], 1).node_keys[0]
        running.start_node(0, key=stranger, name="stranger")
        wait(lambda: running.exit_code("stranger") is not None, running)
        assert running.exit_code("stranger") != 0, "a key that nobody registered was let in"
        found = finish(running, tmp_path / "plain", plain)
        finish(running, tmp_path / "coded", small(2, value_bits=4))
        shutil.rmtree(tmp_path / "store-1")  # with the client's copy of what differences are taken to
        in_bits = finish(running, tmp_path / "coded", coded)
    for experiment, documents in ((plain, found), (coded, in_bits)):
        simulated = simulate(experiment)
        assert len(documents) == 3
        for record, document in zip(simulated, documents, strict=True):
            for row, client in zip(record.clients, document["clients"], strict=True):
                assert client["status"] == "ok"
                assert client["upload_bytes"] == row.upload.upload_bytes
                lost = experiment is coded and document["round"] == 3 and client["client"] == 1
                assert lost or client["download_bytes"] == row.upload.download_bytes
                # In a few bits a last digit may decide which way a number is rounded, and that which unit is sent.
                assert experiment is coded or bytes.fromhex(client["mask"]) == row.upload.mask
            assert record.evaluation is not None
            near = 1e-2 if experiment is coded else 1e-4
            assert document["evaluation"]["loss"] == pytest.approx(record.evaluation.loss, rel=near)
        assert record_of(documents[-1]).clients[0].upload.upload_bytes == simulated[-1].clients[0].upload.upload_bytes
    whole = in_bits[0]["clients"][1]["download_bytes"]
    assert in_bits[2]["clients"][1]["download_bytes"] > whole > 4 * in_bits[2]["clients"][0]["download_bytes"]


@pytest.mark.slow
def test_sparse_payloads_and_a_proximal_term_end_in_a_deployment_as_in_the_simulator(tmp_path: Path) -> None:
    # Top-k keeps what it owes at the clients; the proximal term is a rule that every answer has to confirm.
    experiment = small(2, "topk", share=0.02, local=[{"name": "proximal", "mu": 0.1}])
    with deployment(tmp_path, database=False) as running:
        found = finish(running, tmp_path, experiment)
    for record, document in zip(simulate(experiment), found, strict=True):
        for row, client in zip(record.clients, document["clients"], strict=True):
            assert client["status"] == "ok"
            assert client["download_bytes"] == row.upload.download_bytes > 20 * client["upload_bytes"]
            # A last digit may decide which number is among the greatest, and its place how many bytes it takes.
            assert client["upload_bytes"] == pytest.approx(row.upload.upload_bytes, rel=0.01)
        assert record.evaluation is not None
        assert document["evaluation"]["loss"] == pytest.approx(record.evaluation.loss, rel=1e-3)


@pytest.mark.slow
def test_a_killed_node_costs_one_round_its_share_and_a_killed_superlink_only_the_unfinished_round(
    tmp_path: Path,
) -> None:
    with deployment(tmp_path, wrap=hasty) as running:
        # Longer than a busy machine needs to start an app; of a killed node Flower says so after 20 seconds.
        run = begin(running, tmp_path, small(60), deadline_seconds=120.0)
        wait(lambda: len(rounds(tmp_path)) >= 1, running, run)
        running.kill("node-1")
        wait(lambda: any(statuses(r).get(1) != "ok" for r in rounds(tmp_path)), running, run)
        hurt = next(r for r in rounds(tmp_path) if statuses(r).get(1) != "ok")
        assert [status for client, status in statuses(hurt).items() if client != 1] == ["ok", "ok"]
        assert statuses(hurt)[1].startswith(("late", "lost"))
        wait(lambda: online(running) == CLIENTS - 1, running, run)  # until then the SuperLink refuses the same key
        running.start_node(1)
        back = hurt["round"]
        wait(lambda: any(r["round"] > back and statuses(r).get(1) == "ok" for r in rounds(tmp_path)), running, run)
        again = next(r for r in rounds(tmp_path) if r["round"] > back and statuses(r).get(1) == "ok")
        full = rounds(tmp_path)[0]["clients"][1]["download_bytes"]
        mine = next(client for client in again["clients"] if client["client"] == 1)
        assert mine["download_bytes"] == full

        running.kill("superlink")
        done = len(rounds(tmp_path))
        running.start_superlink()
        resumed = begin(running, tmp_path, small(done + 1), deadline_seconds=120.0)
        wait(lambda: len(rounds(tmp_path)) >= done + 1, running, resumed)
        assert ending(running, resumed) == "finished:completed", running.run_log(resumed)[-2000:]
    numbers = [r["round"] for r in rounds(tmp_path)]
    assert numbers == list(range(1, done + 2))
    # On a busy machine a node may not be back in time; nobody's answer is refused.
    last = list(statuses(rounds(tmp_path)[-1]).values())
    assert "ok" in last
    assert all(status.startswith(("ok", "late", "lost")) for status in last)


def test_private_files_are_private_and_certificates_name_the_address(tmp_path: Path) -> None:
    from cryptography import x509

    files = make_certificates(tmp_path / "certificates", ["10.231.0.1"], 2)
    for path in (files.server_key, *files.node_keys):
        assert path.stat().st_mode & 0o077 == 0
    server = x509.load_pem_x509_certificate(files.server_certificate.read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.231.0.1"]
    assert all(path.with_suffix(".pub").read_text().startswith("ecdsa-sha2-nistp384 ") for path in files.node_keys)


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_network_shapes_its_links_counts_its_bytes_and_leaves_nothing() -> None:
    name = f"feddd-test-{os.getpid()}"
    listen = (
        "import socket, time; s = socket.create_server(('10.231.0.1', 9), backlog=1); c, _ = s.accept(); "
        "n = 0\nwhile (d := c.recv(65536)): n += len(d)\nprint(n)"
    )
    send = "import socket; s = socket.create_connection(('10.231.0.1', 9)); s.sendall(bytes(100_000)); s.close()"
    with Network([(4e5, 4e6), (1e6, 1e6)], name=name) as network:
        server = subprocess.Popen(network.wrap(-1, [sys.executable, "-c", listen]), stdout=subprocess.PIPE, text=True)
        time.sleep(1.0)
        begun = time.monotonic()
        subprocess.run(network.wrap(0, [sys.executable, "-c", send]), check=True)
        assert server.communicate(timeout=30)[0].strip() == "100000"
        seconds = time.monotonic() - begun
        assert seconds > 1.5  # 800,000 bits at 400,000 a second, less the burst
        assert 100_000 < network.traffic(0).sent < 115_000
        assert network.traffic(1).sent < 5_000
        assert f"{name}-0" in _namespaces()
    assert name not in _namespaces()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_network_that_fails_halfway_leaves_nothing() -> None:
    name = f"feddd-fail-{os.getpid()}"
    with pytest.raises(Exception, match="rate"), Network([(1e6, 1e6), (0.0, 1e6)], name=name):
        pass
    assert name not in _namespaces()


def test_what_is_missing_for_shaped_links_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="at most 200"):
        check_possible(201)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="need root"):
        check_possible(3)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(InputError, match="iproute2"):
        check_possible(3)
