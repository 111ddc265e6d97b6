"""Trackers: the real packages are told what the tables say, round by round, also after an interruption."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import feddd
from feddd import InputError
from feddd.experiments.results import Results
from feddd.tracking import following
from feddd.tracking.following import find_tracker
from feddd.tracking.protocol import Tracked
from test_resume import FEDDD, NEVER, Stop, feddd_main, interrupted, stop_after, tiny

Curves = dict[str, dict[str, dict[int, float]]]
"""Strategy → number → round → value."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes anywhere but below the run's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def read_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curves = {}
    for place in folder.iterdir():
        events = EventAccumulator(str(place)).Reload()
        points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        assert all(len({one.step for one in curve}) == len(curve) for curve in points.values())
        found[place.name] = {tag: {one.step: one.value for one in curve} for tag, curve in points.items()}
    return found


def read_mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    found: Curves = {}
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        assert run.data.params["data.dataset"] == "synthetic-grey"
        assert "strategy.broadcast_every" in run.data.params
        curves = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        assert all(len({one.step for one in curve}) == len(curve) for curve in curves.values())
        found[run.info.run_name] = {key: {one.step: one.value for one in curve} for key, curve in curves.items()}
    return found


def read_wandb(folder: Path) -> Curves:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    names = {path.read_text(): path.name.removesuffix(".run-id") for path in folder.glob("*.run-id")}
    found: Curves = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        curves = found.setdefault(names[path.stem.removeprefix("run-")], {})
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for key, value in values.items():
                    if not key.startswith("_"):
                        curves.setdefault(key, {})[int(values["_step"])] = value
    return found


READERS: dict[str, Callable[[Path], Curves]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}
# What the packages themselves do, not we.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*noload.*")


def assert_tracked(found: Curves, results: Results) -> None:
    """Every round of every strategy with every number of the table that is known, and the sums of bytes."""
    assert set(found) == set(results.labels)
    for label, curves in found.items():
        up = 0
        rows = results.rows("rounds", strategy=label)
        assert set(curves["clock_seconds"]) == {row["round"] for row in rows}
        for row in rows:
            up += row["upload_bytes"]
            assert curves["total_upload_bytes"][row["round"]] == pytest.approx(up)
            assert "test_metric" not in curves  # it has a name
            for key in set(row) - {"strategy", "seed", "round", "test_metric"}:
                known = curves.get(key, {}).get(row["round"])
                assert known == (None if row[key] is None else pytest.approx(row[key], rel=1e-6)), (label, key)


@quiet
@pytest.mark.parametrize("name", READERS)
def test_a_run_that_was_interrupted_is_tracked_to_its_end_once(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"mlflow": "mlflow", "wandb": "wandb"}.get(name, name))
    one = tiny(FEDDD, NEVER, rounds=5, evaluate_every=2)
    folder = interrupted(tmp_path / "run", one, "feddd", 4, track=[name])
    begun = READERS[name](folder / "tracking" / name) if name == "tensorboard" else None
    assert begun is None or set(begun["feddd"]["clock_seconds"]) == {1, 2, 3, 4}
    results = feddd.resume(folder, workers=1)  # the trackers are remembered
    assert_tracked(READERS[name](folder / "tracking" / name), results)
    assert not (tmp_path / "mlruns").exists()
    assert not (tmp_path / "wandb").exists()
    longer = feddd.resume(folder, rounds=6, workers=1)
    # The round that was tested for being the last is no longer tested; what was told stays told.
    assert set(READERS[name](folder / "tracking" / name)["never"]["clock_seconds"]) == set(range(1, 7))
    assert longer.config["rounds"] == 6


@quiet
def test_a_sweep_tracks_every_cell_once_under_a_name_of_its_own(tmp_path: Path) -> None:
    one = tiny({"name": "feddd"}, {"name": "fedavg"}, rounds=2)
    feddd.sweep(
        one, tmp_path / "s", seeds=2, sweep={"strategy.feddd.budget": [0.3, 0.6]}, workers=1, track=["tensorboard"]
    )
    found = read_tensorboard(tmp_path / "s" / "tracking" / "tensorboard")
    names = ("feddd, budget=0.3", "feddd, budget=0.6", "fedavg")
    assert set(found) == {f"{name}, seed {seed}" for name in names for seed in (0, 1)}
    assert all(set(curves["test_accuracy"]) == {1, 2} for curves in found.values())


class Mine:
    """A tracker as a user would write it."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    view = "here"

    def __init__(self, tracked: Tracked) -> None:
        self.label = tracked.label
        self.calls.append((tracked.label, "begin", tracked.after, tracked.settings["strategy.name"]))

    def log(self, number: int, values: Mapping[str, float]) -> None:
        if "broken" in self.label:
            raise ConnectionError("no line")
        self.calls.append((self.label, number))

    def close(self, *, finished: bool) -> None:
        self.calls.append((self.label, finished))


def test_a_tracker_of_ones_own_is_live_and_told_where_a_run_goes_on(tmp_path: Path) -> None:
    Mine.calls.clear()

    def watch(done: Any) -> None:
        assert Mine.calls[-1] == (done.label, done.record.round)
        stop_after("feddd", 2)(done)

    with pytest.raises(Stop):
        feddd.run(
            tiny(FEDDD, rounds=3),
            tmp_path / "run",
            workers=1,
            watch=watch,
            track=["test_tracking:Mine"],
            checkpoint_seconds=0,
        )
    assert Mine.calls == [("feddd", "begin", 0, "feddd"), ("feddd", 1), ("feddd", 2), ("feddd", False)]
    Mine.calls.clear()
    feddd.resume(tmp_path / "run", workers=1)
    assert Mine.calls == [("feddd", "begin", 1, "feddd"), ("feddd", 2), ("feddd", 3), ("feddd", True)]
    Mine.calls.clear()
    feddd.resume(tmp_path / "run", rounds=4, workers=1, track=())
    assert Mine.calls == []
    feddd.run(tiny(FEDDD, rounds=1), tmp_path / "class", workers=1, track=[Mine])
    assert ("feddd", True) in Mine.calls


def test_a_tracker_that_fails_later_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "feddd"):
        results = feddd.run(tiny({**FEDDD, "label": "broken"}, rounds=2), tmp_path / "run", workers=1, track=[Mine])
    assert results.summary["strategies"]["broken"]["rounds"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "--track test_tracking:Mine failed (no line); the run goes on without it"
    ]


def refuse(tracked: Tracked) -> Any:
    raise RuntimeError("no\nkey")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("nowhere:Tracker", "cannot import 'nowhere:Tracker'"),
        ("test_tracking:refuse", "--track test_tracking:refuse: no key"),
    ],
)
def test_a_tracker_that_cannot_be_had_is_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.toml").write_text(tiny(FEDDD, rounds=1).to_toml())
    assert feddd_main(monkeypatch, "run", "t.toml", "--out", "o", "--workers", 1, "--track", name) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", following.BUILT_IN)
def test_a_package_that_is_missing_is_named_with_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("feddd.tracking.following.importlib.import_module", missing)
    with pytest.raises(InputError, match=rf"--track {name} needs a package: pip install 'feddd\[{name}\]'"):
        find_tracker(name)


def test_the_command_line_says_where_it_was_tracked_and_none_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.toml").write_text(tiny(FEDDD, rounds=1).to_toml())
    Mine.calls.clear()
    run = ["run", "t.toml", "--out", "o", "--workers", 1]
    assert feddd_main(monkeypatch, *run, "--track", "test_tracking:Mine") == 0
    assert "tracked: o/tracking" in capsys.readouterr().out
    Mine.calls.clear()
    assert feddd_main(monkeypatch, "run", "--resume", "o", "--rounds", 2, "--workers", 1, "--track", "none") == 0
    assert Mine.calls == []
