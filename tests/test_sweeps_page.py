"""Every command and every block of code of docs/sweeps.md runs, on an experiment made small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import feddd
from test_resume import feddd_main, tiny

PAGE = (Path(__file__).parents[1] / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True)
def my(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`my.toml` beside the commands."""
    monkeypatch.chdir(tmp_path)
    small = tiny({"name": "feddd"}, {"name": "fedavg"}, name="my", rounds=2, data={"train_limit": 200})
    Path("my.toml").write_text(small.to_toml())


def test_the_commands_run_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("feddd ")]
    assert len(ours) == len(COMMANDS) - 1 == 7  # the other one is TensorBoard itself
    for arguments in ours:
        assert feddd_main(monkeypatch, *arguments, "--workers", 1) == 0, (arguments, capsys.readouterr().err)
    assert feddd.load_sweep("runs/seeds").summary["rows"][0]["rounds"] == [4, 4, 4]
    logs = shlex.split(next(command for command in COMMANDS if command.startswith("tensorboard")))[-1]
    assert list(Path(logs).glob("feddd/events.*"))
    capsys.readouterr()
    assert feddd_main(monkeypatch, "report", "runs/budgets", "--json") == 0
    named = re.findall(r"^\| `([^`…/]*)", PAGE.partition("What is left behind")[2].partition("\n`feddd")[0], re.M)
    assert set(named) == {path.name for path in Path("runs/budgets").iterdir()} - {"figures"}


def test_the_sweep_from_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0].replace("seeds=2", "seeds=2, workers=1"), {})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["feddd", "feddd", "fedavg"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_search_has_ten_lines_and_finds_the_best_of_its_trials() -> None:
    optuna: Any = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    code = BLOCKS[1]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 10
    names: dict[str, Any] = {}
    exec(code.replace('trial-{trial.number}")', 'trial-{trial.number}", workers=1)'), names)
    study = names["study"]
    finals = [
        feddd.load_results(f"runs/trial-{number}").summary["strategies"]["feddd"]["final_accuracy"]
        for number in range(3)
    ]
    assert study.best_value == max(finals)
    assert 0.3 <= study.best_params["budget"] <= 0.9


def test_the_tracker_of_the_page_is_told_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_tracker.py").write_text(BLOCKS[2])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(BLOCKS) == 3
    assert feddd_main(monkeypatch, "run", "my.toml", "--out", "o", "--workers", 1, "--track", "my_tracker:Lines") == 0
    lines = (tmp_path / "o" / "tracking" / "my_tracker.Lines" / "lines.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"my {label} seed 0 round {number}" for label in ("feddd", "fedavg") for number in (1, 2)
    ]
    capsys.readouterr()
