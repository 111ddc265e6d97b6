"""A real SuperLink with a SuperNode that is in trouble: it says nothing, or its train function raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments import ending
from feddd.testbed.deployment import Deployment

APP = Path(__file__).parent / "deployed_app"


def deploy(folder: Path, **config: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """How a run of three nodes ended, what it said, and the facts of its rounds."""
    configs = [{"partition-id": n, "feddd-store": str(folder / f"store-{n}")} for n in range(3)]
    with Deployment(folder / "deployment", configs, secure=False, database=False) as running:
        run = running.run_app(APP, {"out": str(folder), **config})
        status = ending(running, run)
        said = running.run_log(run)
    path = folder / "rounds.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return status, said, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_mute_node_holds_up_no_round_of_a_deployment(tmp_path: Path) -> None:
    deadline = 120.0
    config = {"rounds": 3, "quorum": 2, "min-clients": 2, "deadline-seconds": deadline, "trouble": "mute"}
    status, said, rounds = deploy(tmp_path, **config)
    assert status == "finished:completed", said[-2000:]
    assert [one["statuses"] for one in rounds] == [["ok", "ok"]] * 3
    passed = rounds[-1]["moment"] - rounds[0]["moment"]
    assert passed < deadline
    assert sum(one["seconds"] for one in rounds[1:]) == pytest.approx(passed, abs=2.0)
    assert all(list(one["failures"].values()) == ["it does not say who it is"] for one in rounds)
    assert "round 3 of 3: 2 of 2 clients counted" in said


@pytest.mark.slow
def test_a_deployment_below_its_quorum_fails_with_the_reasons_by_client(tmp_path: Path) -> None:
    config = {"rounds": 1, "quorum": 3, "min-clients": 3, "deadline-seconds": 120.0, "trouble": "raise", "patience": 2}
    status, said, rounds = deploy(tmp_path, **config)
    assert status == "finished:failed", said[-2000:]
    assert rounds == []
    words = "only 2 of 3 clients counted in round 1, and 3 are needed"
    assert f"{words}: it is asked again" in said, said[-3000:]
    last = next(line for line in said.splitlines() if f"{words}; it was asked 2 times" in line)
    assert "client 2: lost: " in last
    assert "the data of this client is gone" in last
