"""Sweeps over problems of one's own: they speak of the run's metric, go on, and do not mix other data in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import feddd
import own_data
from feddd.experiments.cells import cells
from feddd.experiments.config import Experiment, parse_experiment
from feddd.experiments.metrics import Metric
from feddd.sweeps.report import sentences
from feddd.sweeps.series import goals_of, measures, series
from feddd.sweeps.tables import metric_text, terminal_table
from test_own_data import document, write_images, write_table
from test_resume import Stop, assert_same, feddd_main

RATE = "training.learning_rate"


def prices(path: Path, **changes: Any) -> Experiment:
    """Three rounds of linear regression on a table, by mean absolute error."""
    data = {"dataset": str(path), "target": "price", "client": "owner", "partition": "natural", "test_share": 0.25}
    made = document(data=data, task={"loss": "mse", "evaluate_clients": True}, model={"name": "own_data:linear"})
    made |= {"fleet": {}, "name": "prices", "rounds": 3, "targets": [120.0, 90.0, 1.0]}
    return parse_experiment(made | changes)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "table.csv"
    write_table(path)
    return path


@pytest.fixture(scope="module")
def regression(table: Path, tmp_path_factory: pytest.TempPathFactory) -> feddd.SweepResults:
    folder = tmp_path_factory.mktemp("sweep") / "s"
    return feddd.sweep(prices(table), folder, seeds=2, sweep={RATE: [0.05, 0.01]}, workers=1)


def test_the_summary_has_the_metric_and_no_accuracy(regression: feddd.SweepResults) -> None:
    summary = json.loads((regression.path / "summary.json").read_text())
    assert summary["metric"] == {"name": "mae", "higher_is_better": False}
    for row in summary["rows"]:
        runs = [feddd.load_results(regression.path / cell) for cell in row["cells"]]
        assert row["final_metric"]["values"] == [run.rows("rounds")[-1]["test_metric"] for run in runs]
        assert row["best_metric"]["mean"] <= row["final_metric"]["mean"]
        assert row["final_metric"]["low"] >= 0
        assert row["worst_tenth_of_clients"]["mean"] >= row["best_metric"]["mean"]
        assert (row["final_accuracy"], row["time_to_accuracy"]) == (None, [])
        assert [time["target"] for time in row["time_to_target"]] == [120.0, 90.0, 1.0]
        assert row["time_to_target"][-1]["reached"] == 0
    assert summary["rows"][0]["time_to_target"][0]["reached"] == 2


def test_tables_series_and_words_speak_of_the_metric(regression: feddd.SweepResults) -> None:
    assert goals_of(regression)[0] == 120.0
    assert 1.0 not in goals_of(regression)
    final, hardest, *_ = measures(regression)
    assert (final.name, final.title, final.share) == ("final mae", "final test mae, lower is better", False)
    assert hardest.name == f"time to mae {goals_of(regression)[-1]:g}"
    slow, quick = series(regression, regression.grid.axes[0], final)[0].mean
    assert slow is not None
    assert quick is not None
    assert slow > quick > 1
    assert "mae: lower is better." in sentences(regression)
    _, head, rows = terminal_table(regression)
    assert head[2] == "mae"
    assert head[-1] == f"to mae {goals_of(regression)[-1]:g}"
    assert all("%" not in cell for row in rows for cell in row)
    assert metric_text({"mean": 0.782, "low": 0.769, "high": 0.795}, Metric()) == "78.2 ± 1.3 %"
    assert metric_text({"mean": 3.14159, "low": 3.0, "high": 3.3}, Metric("mae", False)) == "3.142 ± 0.15"


def test_report_of_a_regression_names_its_metric(
    regression: feddd.SweepResults, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert feddd_main(monkeypatch, "report", regression.path) == 0
    capsys.readouterr()
    page = (regression.path / "report.html").read_text()
    section = page[page.index('<section id="differs">') :]
    assert "final mae" in section[: section.index("</section>")]
    assert "accuracy" not in section[: section.index("</section>")]
    pictures = {path.stem for path in (regression.path / "figures").iterdir()}
    assert {"sweep-learning_rate-final-mae", "sweep-learning_rate-time-to-mae-120"} <= pictures


def test_next_tokens_are_swept_by_perplexity_and_metrics_may_differ(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = document(
        data={"dataset": "own_data:tokens", "partition": "natural"},
        task={"loss": "next-token"},
        model={"name": "own_data:Lines"},
        targets=[10.9],
    )
    one = parse_experiment(made | {"fleet": {}, "rounds": 1, "strategy": [{"name": "fedavg"}]})
    results = feddd.sweep(one, tmp_path / "text", sweep={RATE: [0.05, 1.0]}, workers=1)
    assert results.metric == Metric("perplexity", higher_is_better=False)
    slow, quick = results.summary["rows"]
    assert slow["final_metric"]["mean"] > quick["final_metric"]["mean"] > 1
    assert feddd_main(monkeypatch, "run", "--resume", tmp_path / "text") == 0
    assert "perplexity" in capsys.readouterr().out
    both = feddd.sweep(prices(table, rounds=1), tmp_path / "both", sweep={"task.metric": ["mae", "r2"]}, workers=1)
    assert both.summary["metric"]["name"] == "metric"
    assert [row["metric"]["name"] for row in both.summary["rows"]] == ["mae", "mae", "r2", "r2"]
    assert measures(both)[0].title == "final test metric"


class Told:
    """A tracker that remembers."""

    calls: ClassVar[list[tuple[int, Mapping[str, float]]]] = []
    view = "here"

    def __init__(self, tracked: Any) -> None:
        pass

    def log(self, number: int, values: Mapping[str, float]) -> None:
        self.calls.append((number, values))

    def close(self, *, finished: bool) -> None:
        pass


def test_a_longer_run_forgets_what_was_tested_for_being_the_last_and_trackers_know_the_metric(
    table: Path, tmp_path: Path
) -> None:
    long = prices(table, rounds=5, evaluate_every=2)
    expected = feddd.run(long, tmp_path / "long", workers=1)
    feddd.run(long.model_copy(update={"rounds": 3}), tmp_path / "short", workers=1, track=[Told])
    number, values = Told.calls[2]
    assert number == 3
    last = feddd.load_results(tmp_path / "short").rows("rounds", strategy="feddd", round=3)[0]
    assert values["test_mae"] == last["test_metric"]
    assert not {"test_metric", "test_accuracy"} & set(values)
    found = feddd.resume(tmp_path / "short", rounds=5, workers=1, track=())
    assert {row["round"] for row in found.rows("client_metrics")} == {2, 4, 5}
    assert [row["test_metric"] is None for row in found.rows("rounds", strategy="feddd")] == [True, False] * 2 + [False]
    shutil.rmtree(found.path / "tracking")
    assert_same(found.path, expected.path)


def stop(cell: Any, record: Any) -> None:
    if cell.label == "fedavg":
        raise Stop


def test_a_sweep_does_not_go_on_with_another_table_but_is_read_without_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.csv"
    write_table(path)
    with pytest.raises(Stop):
        feddd.sweep(prices(path, rounds=1), tmp_path / "s", sweep={RATE: [0.05, 0.01]}, workers=1, watch=stop)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"red", b"grey"))
    with pytest.raises(feddd.InputError, match=r"cannot be resumed: the data set '.*own\.csv' changed$"):
        feddd.resume_sweep(tmp_path / "s", workers=1)
    path.write_bytes(text)
    assert feddd.resume_sweep(tmp_path / "s", workers=1).finished
    path.unlink()
    again = feddd.resume_sweep((tmp_path / "s").rename(tmp_path / "moved"))
    assert again.finished
    assert str(tmp_path) not in " ".join(cell for row in again.summary["rows"] for cell in row["cells"])
    with pytest.raises(feddd.InputError, match="there is no such file or folder"):
        feddd.resume_sweep(tmp_path / "moved", rounds=2)
    index = tmp_path / "moved" / "sweep.toml"
    index.write_text(index.read_text().replace("own.csv", "secret.csv", 1))
    with pytest.raises(feddd.InputError, match="does not say what the data set"):
        feddd.load_sweep(tmp_path / "moved")


def test_a_sweep_does_not_go_on_with_what_a_function_makes_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = parse_experiment(document(data={"arguments": {"samples": 80}}, rounds=1))
    with pytest.raises(Stop):
        feddd.sweep(one, tmp_path / "s", seeds=2, workers=1, watch=stop)
    made = own_data.classes
    monkeypatch.setattr(own_data, "classes", lambda samples: made(samples + 4))
    with pytest.raises(feddd.InputError, match="cannot be resumed: the data set 'own_data:classes"):
        feddd.resume_sweep(tmp_path / "s", workers=1)
    monkeypatch.undo()
    assert feddd.resume_sweep(tmp_path / "s", workers=1).finished


def test_a_cell_of_other_content_is_another_cell_wherever_it_lies(tmp_path: Path) -> None:
    def key(path: Path, **section: Any) -> str:
        data = {"dataset": str(path), **section}
        return cells(parse_experiment(document(data=data)), [0])[0].folder

    write_table(tmp_path / "a.csv")
    before = key(tmp_path / "a.csv", target="price")
    (tmp_path / "there").mkdir()
    there = (tmp_path / "a.csv").rename(tmp_path / "there" / "a.csv")
    assert key(there, target="price") == before
    there.write_bytes(there.read_bytes().replace(b"red", b"grey"))
    assert key(there, target="price") != before
    write_images(tmp_path / "pictures")
    before = key(tmp_path / "pictures")
    (tmp_path / "pictures" / "notes.txt").write_text("not read")
    assert key(tmp_path / "pictures") == before
    image = tmp_path / "pictures" / "train" / "dark" / "0.png"
    image.write_bytes((image.parent / "1.png").read_bytes())
    assert key(tmp_path / "pictures") != before


def test_tables_are_swept_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.csv", "b.csv"):
        write_table(tmp_path / name, split=name == "b.csv")
    (tmp_path / "one.toml").write_text(
        'rounds = 1\n[data]\ndataset = "a.csv"\ntarget = "kind"\npartition = "iid"\n[fleet]\nclients = 3\n'
        '[[strategy]]\nname = "fedavg"\n'
    )
    asked = ["run", tmp_path / "one.toml", "--out", tmp_path / "s", "--workers", 1]
    assert feddd_main(monkeypatch, *asked, "--sweep", "data.dataset=a.csv,b.csv") == 0
    assert "b.csv" in capsys.readouterr().out
    assert len(feddd.load_sweep(tmp_path / "s").summary["rows"]) == 2
