"""More rounds for a run: it ends as one that had them from the start, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import feddd
from feddd.experiments import checkpoints
from feddd.experiments.config import Experiment
from test_resume import FEDDD, FLEET, NEVER, assert_same, feddd_main, flip, interrupted, resumed_rounds, tiny

METHODS: list[dict[str, Any]] = [
    FEDDD,
    NEVER,
    {"name": "fedavg", "value_bits": 4, "error_feedback": "all"},
    {"name": "oort"},
    {"name": "scaffold"},
    {"name": "stc"},
    {"name": "fedavg", "label": "adam", "server": {"name": "fedadam"}},
    {"name": "feddd", "label": "moves", "value_bits": 4},
]


@pytest.fixture(scope="module")
def long() -> Experiment:
    return tiny(*METHODS, rounds=7, evaluate_every=3)


@pytest.fixture(scope="module")
def expected(long: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return feddd.run(long, tmp_path_factory.mktemp("long") / "run", workers=1).path


@pytest.fixture(scope="module")
def finished(long: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds: the last one was tested although it is not a third."""
    short = long.model_copy(update={"rounds": 4})
    return feddd.run(short, tmp_path_factory.mktemp("short") / "run", workers=1).path


@pytest.fixture
def short(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "short")


def test_a_finished_run_gets_more_rounds_as_if_it_had_been_begun_with_them(short: Path, expected: Path) -> None:
    done = resumed_rounds(short, rounds=7)
    labels = [method.get("label", method["name"]) for method in METHODS]
    assert done == [(label, number) for label in labels for number in (5, 6, 7)]
    assert_same(short, expected)
    assert resumed_rounds(short, rounds=7) == []


def test_a_run_may_get_more_rounds_twice_and_be_interrupted_meanwhile(short: Path, expected: Path) -> None:
    resumed_rounds(short, rounds=5)
    stopped: list[int] = []

    def stop(done: Any) -> None:
        stopped.append(done.record.round)
        if len(stopped) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feddd.resume(short, rounds=7, workers=1, watch=stop)
    assert stopped == [6, 7, 6]
    assert resumed_rounds(short)[0] == (NEVER["label"], 6)
    assert_same(short, expected)


def test_an_interrupted_run_gets_more_rounds_in_all_strategies(
    long: Experiment, expected: Path, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path / "run", long.model_copy(update={"rounds": 5}), "oort", 3)
    done = resumed_rounds(folder, rounds=7)
    assert done[:3] == [("feddd", 6), ("feddd", 7), ("never", 6)]
    assert ("oort", 3) in done
    assert_same(folder, expected)


@pytest.mark.parametrize("lost", ["last", "last of one", "too large", "tables"])
def test_what_was_not_kept_is_run_again(
    lost: str, short: Path, long: Experiment, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lost == "last":
        shutil.rmtree(short / "last")
    elif lost == "last of one":
        flip(next((short / "last").glob("1-*")))
    elif lost == "tables":
        (short / "rounds.parquet").write_bytes(b"")
    else:
        monkeypatch.setattr(checkpoints, "LAST_BYTES", 0)
        shutil.rmtree(short)
        feddd.run(long.model_copy(update={"rounds": 4}), short, workers=1)
    done = resumed_rounds(short, rounds=7)
    assert ("never", 1) in done
    assert (("adam", 1) in done) == (lost in ("last", "tables"))
    assert_same(short, expected)


def test_a_run_that_was_killed_before_it_was_lengthened_is_what_it_was(
    short: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddd.experiments import extending

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(extending, "move_last", die)
    with pytest.raises(KeyboardInterrupt):
        feddd.resume(short, rounds=7, workers=1)
    assert resumed_rounds(short) == []
    assert_same(short, finished)


def test_a_run_with_a_fleet_file_gets_more_rounds(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text(FLEET, encoding="utf-8")
    one = tiny(FEDDD, rounds=3, fleet={"clients": 5, "file": str(tmp_path / "links.csv")})
    expected = feddd.run(one, tmp_path / "expected", workers=1).path
    folder = feddd.run(one.model_copy(update={"rounds": 2}), tmp_path / "short", workers=1).path
    (tmp_path / "links.csv").unlink()
    assert resumed_rounds(folder, rounds=3) == [("feddd", 3)]
    assert_same(folder, expected)


def test_the_command_line_lengthens_a_run_and_refuses_to_shorten_it(
    short: Path, expected: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rounds, message in ((3, "has 4 rounds already"), (0, "has 4 rounds already")):
        assert feddd_main(monkeypatch, "run", "--resume", short, "--rounds", rounds) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (short / "checkpoint").exists()
    assert feddd_main(monkeypatch, "run", "--resume", short, "--rounds", 4) == 0
    assert "is finished" in capsys.readouterr().out
    assert feddd_main(monkeypatch, "run", "--resume", short, "--rounds", 7, "--workers", 1) == 0
    assert "7 rounds" in capsys.readouterr().out
    assert_same(short, expected)
