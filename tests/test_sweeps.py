"""Seeds and sweeps: what is run, that nothing is run twice, that they go on, and what is said of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomli_w

import feddd
from feddd import InputError
from feddd.experiments.config import Experiment
from feddd.experiments.report import render
from feddd.experiments.views import lines
from feddd.sweeps.folders import read_index
from feddd.sweeps.grid import Axis, make_grid, parse_axis
from feddd.sweeps.report import sentences, write_sweep_report
from feddd.sweeps.series import measures, series
from feddd.sweeps.tables import terminal_table
from test_report import browse, drawn_text, in_browser
from test_resume import FLEET, Stop, feddd_main, tiny

BUDGET = "strategy.feddd.budget"
Rounds = list[tuple[str, int, int]]


def small(**changes: Any) -> Experiment:
    """FedDD and FedAvg for two rounds."""
    return tiny({"name": "feddd"}, {"name": "fedavg"}, **{"rounds": 2, "targets": [0.05, 0.99]} | changes)


def swept(folder: Path, one: Experiment, **options: Any) -> tuple[feddd.SweepResults, Rounds]:
    """Run a sweep, and say which rounds were simulated."""
    done: Rounds = []

    def watch(cell: Any, record: Any) -> None:
        done.append((cell.label, cell.experiment.seed, record.round))

    return feddd.sweep(one, folder, workers=1, watch=watch, **options), done


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[feddd.SweepResults, Rounds]:
    """Two budgets, two partitions, two seeds."""
    values = {BUDGET: [0.6, 0.3], "data.partition": ["iid", "noniid-a"]}
    return swept(tmp_path_factory.mktemp("sweep") / "grid", small(), seeds=2, sweep=values)


# What is asked for


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"{BUDGET}=0.2,0.4", (0.2, 0.4)),
        ("data.partition=iid,noniid-a", ("iid", "noniid-a")),
        ("fleet.uplink_bits_per_s=[1e4,5e4],[1e5, 5e5], 3", ([1e4, 5e4], [1e5, 5e5], 3)),
        ("a=\"x,y\",'z'", ("x,y", "z")),
        ("a=true,1,1.5", (True, 1, 1.5)),
        ("strategy.feddd.local=[{name='momentum', beta=0.9}],[]", ([{"name": "momentum", "beta": 0.9}], [])),
        ("a=1", (1,)),
    ],
)
def test_values_are_toml_or_bare_words_between_commas(text: str, values: tuple[Any, ...]) -> None:
    assert parse_axis(text) == Axis(text.partition("=")[0], values)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--seeds", 0], "--seeds must be a whole number of at least 1"),
        (["--seeds", 10**12], "more than 10000"),
        (["--sweep", "x"], "--sweep takes key=value"),
        (["--sweep", "=1"], "--sweep takes key=value"),
        (["--sweep", f"{BUDGET}=0.3,"], "a value is missing"),
        (["--sweep", f"{BUDGET}=0.3,3 4"], "neither a TOML value nor a bare word"),
        (["--sweep", f"{BUDGET}=0.3,0.3"], "0.3 is given twice"),
        (["--sweep", f"{BUDGET}=0.3", "--sweep", f"{BUDGET}=0.4"], "is given twice; all its values go into one"),
        (["--sweep", f"{BUDGET}=0.3,1.5"], f"--sweep {BUDGET}=1.5: strategy.feddd"),
        (["--sweep", "strategy.fedd.budget=0.3"], "did you mean 'feddd'?"),
        (["--sweep", "data.partion=iid"], "did you mean 'partition'?"),
        (["--sweep", "seed=1,2"], "--seeds N runs N seeds"),
        (["--sweep", "name=a,b"], "a name changes no number"),
        (["--sweep", "rounds=" + ",".join(map(str, range(1, 10_003)))], "more than 10000 runs"),
        (["--sweep", "fleet.file=nowhere.csv"], "cannot read"),
        (["--seeds", 2, "--set", "data.dataset=mnist"], "mnist"),
        (["--resume", ".", "--seeds", 2], "--seeds cannot be given with --resume"),
        (["--resume", ".", "--sweep", "a=1"], "--sweep cannot be given with --resume"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(
    asked: Sequence[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FEDDD_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    document = small().model_dump(exclude_unset=True, exclude_none=True)
    Path("small.toml").write_text(tomli_w.dumps(document | {"fleet": {}}))
    given = ["run", "small.toml", "--out", "out", "--workers", 1] if "--resume" not in asked else ["run"]
    assert feddd_main(monkeypatch, *given, *asked) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("out").exists()


def test_a_default_that_another_value_rules_out_is_no_obstacle() -> None:
    shannon = {"bandwidth_hz": 1e6, "power_w": 0.1, "noise_w": 1e-9}
    base = feddd.load_experiment(
        "quickstart", [f"fleet.{key}={value}" for key, value in shannon.items()] + ["fleet.gain=1"]
    )
    found = make_grid(base, [Axis("fleet.gain", (0.1, 1.0))], [0])
    assert [point.experiment.fleet.gain for point in found.points] == [0.1, 1.0]
    assert make_grid(Experiment(name="bare"), [Axis("strategy.oort.budget", (0.5,))], [0]).points


# What is run


def test_each_cell_is_run_once_and_is_what_a_plain_run_would_be(
    grid: tuple[feddd.SweepResults, Rounds], tmp_path: Path
) -> None:
    results, done = grid
    assert len(done) == 2 * 2 * 2 * 2 + 2 * 2 * 2  # FedDD: budgets × partitions × seeds × rounds; FedAvg: no budgets
    row = next(row for row in results.summary["rows"] if row["settings"] == {BUDGET: 0.3, "data.partition": "noniid-a"})
    changed = small(seed=1, data={"partition": "noniid-a"}, strategy=[{"name": "feddd", "budget": 0.3}])
    alone = feddd.run(changed, tmp_path / "alone", workers=1).path
    cell = results.path / row["cells"][1]
    for name in ("rounds", "clients", "classes", "partition"):
        assert pq.read_table(cell / f"{name}.parquet").equals(pq.read_table(alone / f"{name}.parquet")), name
    assert (cell / "model-feddd.safetensors").read_bytes() == (alone / "model-feddd.safetensors").read_bytes()
    assert feddd.load_results(cell).labels == ["feddd"]


def test_the_summary_is_what_the_cells_say(grid: tuple[feddd.SweepResults, Rounds]) -> None:
    summary = json.loads((grid[0].path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(grid[0].summary))
    assert summary["sweep"] == {BUDGET: [0.6, 0.3], "data.partition": ["iid", "noniid-a"]}
    assert [
        (row["strategy"], row["settings"][BUDGET], row["settings"]["data.partition"]) for row in summary["rows"]
    ] == [
        (strategy, budget, partition)
        for partition in ("iid", "noniid-a")
        for strategy, budget in (("feddd", 0.6), ("feddd", 0.3), ("fedavg", [0.6, 0.3]))
    ]
    for row in summary["rows"]:
        rounds = [feddd.load_results(grid[0].path / cell).rows("rounds") for cell in row["cells"]]
        final = [rows[-1]["test_accuracy"] for rows in rounds]
        assert row["final_accuracy"]["values"] == final
        assert row["final_accuracy"]["mean"] == pytest.approx(fmean(final))
        half = 12.706 * abs(final[0] - final[1]) / 2  # Student's, one degree of freedom
        assert row["final_accuracy"]["high"] == pytest.approx(min(1, fmean(final) + half), abs=1e-4)
        assert row["upload_bytes"]["mean"] == fmean(sum(one["upload_bytes"] for one in rows) for rows in rounds)
        low, never = row["time_to_accuracy"]
        assert (low["reached"], never["reached"], never["seconds"]) == (2, 0, None)


def test_a_sweep_of_what_changes_no_number_runs_nothing_twice(tmp_path: Path) -> None:
    results, done = swept(tmp_path / "s", small(rounds=1), sweep={"targets": [[0.05], [0.1, 0.2]]})
    assert done == [("feddd", 0, 1), ("fedavg", 0, 1)]
    assert [row["label"] for row in results.summary["rows"]] == ["feddd", "fedavg"]
    assert [time["target"] for time in results.summary["rows"][0]["time_to_accuracy"]] == [0.05, 0.1, 0.2]


def test_seeds_alone_begin_at_the_experiments_own(tmp_path: Path) -> None:
    results, done = swept(tmp_path / "s", small(rounds=1, seed=5), seeds=3)
    assert results.summary["seeds"] == [5, 6, 7]
    assert len(done) == 6
    assert sentences(results) == ["3 seeds: 5, 6, 7."]
    single, _ = swept(tmp_path / "t", small(rounds=1))
    assert single.summary["rows"][0]["final_accuracy"]["low"] is None
    assert terminal_table(single)[0] == "test: 1 rounds, seed 0"


def test_a_diverging_setting_does_not_end_the_sweep(tmp_path: Path) -> None:
    results, _ = swept(tmp_path / "s", small(), sweep={"training.learning_rate": [0.05, 1e30]})
    assert [row["finished"] for row in results.summary["rows"]] == [True, True, False, False]
    assert [row[0] for row in terminal_table(results)[2]] == [
        "feddd",
        "fedavg",
        "feddd (diverged)",
        "fedavg (diverged)",
    ]
    assert results.finished


# Going on


def test_an_interrupted_sweep_goes_on_inside_its_cell(tmp_path: Path) -> None:
    values = {BUDGET: [0.3, 0.6]}
    expected, _ = swept(tmp_path / "expected", small(rounds=4), sweep=values)

    def stop(cell: Any, record: Any) -> None:
        if cell.label == "fedavg" and record.round == 3:
            raise Stop

    with pytest.raises(Stop) as stopped:
        feddd.sweep(small(rounds=4), tmp_path / "s", sweep=values, workers=1, watch=stop, checkpoint_seconds=0)
    assert "feddd run --resume" in "".join(stopped.value.__notes__)
    assert {row["finished"] for row in feddd.load_sweep(tmp_path / "s").summary["rows"]} == {True, False}
    moved = (tmp_path / "s").rename(tmp_path / "moved")
    done: Rounds = []
    found = feddd.resume_sweep(
        moved, workers=1, watch=lambda cell, record: done.append((cell.label, cell.experiment.seed, record.round))
    )
    assert done == [("fedavg", 0, 3), ("fedavg", 0, 4), *(("feddd", 0, number) for number in (1, 2, 3, 4))]
    assert found.summary == expected.summary
    assert feddd.resume_sweep(moved, watch=stop).summary == expected.summary


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_sweep_gets_more_rounds_as_if_it_had_been_begun_with_them(tmp_path: Path, interrupted: bool) -> None:
    values = {BUDGET: [0.3, 0.6]}
    expected, _ = swept(tmp_path / "expected", small(rounds=5, evaluate_every=2), sweep=values)

    def stop(cell: Any, record: Any) -> None:
        if interrupted and cell.label == "fedavg" and record.round == 2:
            raise Stop

    short, options = small(rounds=3, evaluate_every=2), {"workers": 1, "checkpoint_seconds": 0}
    if interrupted:
        with pytest.raises(Stop):
            feddd.sweep(short, tmp_path / "s", sweep=values, watch=stop, **options)
    else:
        feddd.sweep(short, tmp_path / "s", sweep=values, **options)
    with pytest.raises(InputError, match="has 3 rounds already"):
        feddd.resume_sweep(tmp_path / "s", rounds=2)
    done: Rounds = []
    found = feddd.resume_sweep(
        tmp_path / "s",
        rounds=5,
        workers=1,
        watch=lambda cell, record: done.append((cell.label, cell.experiment.seed, record.round)),
    )
    first = [("fedavg", 0, 2)] if interrupted else []
    assert [one for one in done if one[2] < 4][: len(first)] == first
    assert ("feddd", 0, 1) not in done or interrupted
    assert found.summary == expected.summary
    for row in found.summary["rows"]:
        for cell in row["cells"]:
            for table in ("rounds", "clients", "classes"):
                mine, theirs = (pq.read_table(path / cell / f"{table}.parquet") for path in (found.path, expected.path))
                assert mine.equals(theirs)
    assert read_index(found.path).before == (3,)
    assert len(list((found.path / "cells").glob("*/*"))) == 3


def test_a_sweep_over_rounds_cannot_get_more(tmp_path: Path) -> None:
    swept(tmp_path / "s", small(), sweep={"rounds": [1, 2]})
    with pytest.raises(InputError, match="compares numbers of rounds"):
        feddd.resume_sweep(tmp_path / "s", rounds=3)


def test_fleet_files_come_along_and_a_moved_sweep_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.csv").write_text(FLEET.replace("5,3,1", "5,1,1"), encoding="utf-8")
    Path("quick.csv").write_text(FLEET.replace("e4", "e6").replace("5,3,1", "5,1,1"), encoding="utf-8")
    document = small(rounds=1).model_dump(exclude_unset=True, exclude={"fleet"})
    one = Experiment.model_validate(document)
    results, _ = swept(tmp_path / "s", one, sweep={"fleet.file": ["slow.csv", "quick.csv"]})
    for path in tmp_path.glob("*.csv"):
        path.unlink()
    moved = results.path.rename(tmp_path / "moved")
    assert str(tmp_path) not in (moved / "sweep.toml").read_text()
    again = feddd.resume_sweep(moved, watch=lambda *_: pytest.fail("nothing is to be run"))
    assert [row["clock_seconds"] for row in again.summary["rows"]] == [
        row["clock_seconds"] for row in results.summary["rows"]
    ]
    assert [row[1] for row in terminal_table(again)[2]] == ["slow.csv", "slow.csv", "quick.csv", "quick.csv"]


def test_a_damaged_index_is_one_line(grid: tuple[feddd.SweepResults, Rounds], tmp_path: Path) -> None:
    for text in ("seeds = 3", "[", 'seeds = ["a"]\nrounds_before = []', "seeds = []\nrounds_before = []\naxis = 1"):
        (tmp_path / "sweep.toml").write_text(text)
        with pytest.raises(InputError, match="damaged"):
            feddd.load_sweep(tmp_path)
    with pytest.raises(InputError, match="not a sweep's folder"):
        feddd.load_sweep(tmp_path / "nowhere")


# What is said


def test_lines_are_not_repeated_and_settings_are_named_where_they_tell(
    grid: tuple[feddd.SweepResults, Rounds],
) -> None:
    shown = [line.label for line in lines(grid[0].runs)]
    own = ["feddd, budget=0.6", "feddd, budget=0.3", "fedavg"]
    assert shown == [f"{label} (partition={name})" for name in ("iid", "noniid-a") for label in own]
    assert all(len(line.runs) == 2 for line in lines(grid[0].runs))
    assert "fedavg is shown once for all values of strategy.feddd.budget: it makes no difference there." in sentences(
        grid[0]
    )


def test_series_over_a_key_are_the_rows_of_the_summary(grid: tuple[feddd.SweepResults, Rounds]) -> None:
    results = grid[0]
    budget, partition = results.grid.axes
    final, low, *_ = measures(results)
    assert (final.name, low.name) == ("final accuracy", "time to 5%")
    rows = results.summary["rows"]
    iid, iid_avg, far, far_avg = series(results, budget, final)
    assert (iid.label, iid.x, iid.flat) == ("feddd, partition=iid", (0.3, 0.6), False)
    assert iid.mean == (rows[1]["final_accuracy"]["mean"], rows[0]["final_accuracy"]["mean"])
    assert far_avg.flat
    assert set(iid_avg.mean) == {rows[2]["final_accuracy"]["mean"]}
    assert far.label == "feddd, partition=noniid-a"
    bars = series(results, partition, final)
    assert [one.label for one in bars] == ["feddd, budget=0.6", "feddd, budget=0.3", "fedavg"]
    assert bars[2].mean == (rows[2]["final_accuracy"]["mean"], rows[5]["final_accuracy"]["mean"])
    assert not bars[2].flat


def test_report_of_a_sweep_has_a_page_and_pictures_and_joins_others(
    grid: tuple[feddd.SweepResults, Rounds],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(grid[0].path, tmp_path / "s")
    (folder / "report.html").unlink()
    assert feddd_main(monkeypatch, "report", folder) == 0
    page = (folder / "report.html").read_text()
    assert "<h2>What differs</h2>" in page
    assert "Unfinished" not in page
    pictures = {path.stem for path in (folder / "figures").iterdir()}
    assert pictures >= {"sweep-budget-final-accuracy", "sweep-partition-time-to-5", "accuracy-time"}
    plain = feddd.run(small(name="other", rounds=1), tmp_path / "plain", workers=1)
    assert feddd_main(monkeypatch, "report", folder, plain.path, "--out", tmp_path / "both") == 0
    assert "(other)" in (tmp_path / "both" / "report.html").read_text()
    assert "What differs" not in render([plain])
    capsys.readouterr()


def test_the_command_line_runs_prints_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small().to_toml())
    asked = ["run", "small.toml", "--seeds", 2, "--sweep", f"{BUDGET}=0.3,0.6", "--workers", 1]
    assert feddd_main(monkeypatch, *asked, "--out", "s") == 0
    shown = capsys.readouterr()
    assert [line.split()[:2] for line in shown.out.splitlines() if "±" in line][1:] == [
        *(["feddd", "0.3"], ["feddd", "0.6"], ["fedavg", "–"])
    ]
    assert "report: s/report.html" in shown.out
    assert feddd_main(monkeypatch, *asked, "--out", "s") == 2
    assert "already holds something" in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")}
    assert feddd_main(monkeypatch, "run", "--resume", "s") == 0
    assert "is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")} == before
    assert feddd_main(monkeypatch, "run", "--resume", "s", "--rounds", 3, "--workers", 1, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["folder"] == "s"
    assert document["rows"][0]["rounds"] == [3, 3]
    assert feddd_main(monkeypatch, "run", "--resume", "s", "--quiet") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@in_browser
def test_page_of_a_sweep_draws_lines_and_bars_without_a_complaint(
    grid: tuple[feddd.SweepResults, Rounds], tmp_path: Path
) -> None:
    page = write_sweep_report(grid[0], tmp_path / "report.html")
    dom, complaints = browse(page)
    assert complaints == []
    assert {"strategy.feddd.budget", "final test accuracy", "feddd, partition=iid"} <= set(drawn_text(dom, "sweep"))
    dom, complaints = browse(page, "#over=data.partition&show=uploaded")
    assert complaints == []
    bars = set(drawn_text(dom, "sweep"))
    assert {"data.partition", "iid", "noniid-a", "feddd, budget=0.3"} <= bars
    assert any(text.startswith("uploaded, all rounds") for text in bars)


def test_hostile_text_in_a_sweep_is_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    one = small(rounds=1, strategy=[{"name": "feddd", "label": evil}])
    results, _ = swept(tmp_path / "s", one, sweep={f"strategy.{evil}.budget": [0.3, 0.6]})
    assert evil not in (results.path / "report.html").read_text()
    assert [row["strategy"] for row in results.summary["rows"]] == [evil, evil]
