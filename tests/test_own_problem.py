"""Every block of docs/own-problem.md is written to a folder and every command is run there, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import feddd
from feddd.experiments.problem import PARTITIONS
from feddd.world.objectives import LOSSES, METRICS

PAGE = (Path(__file__).parents[1] / "docs" / "own-problem.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.S | re.M)
NOT_RUN = "(not run by the test"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has followed the page."""
    folder = tmp_path_factory.mktemp("own-problem")
    for language, text in BLOCKS:
        if language != "sh":
            name = text.split()[1]
            (folder / name).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line)
            quick = ["--workers=1"] if arguments[0] == "run" else []
            command = [sys.executable, *(["-m", "feddd"] if program == "feddd" else []), *arguments, *quick]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, f"{line}: {done.stderr}"
    return folder


def test_every_block_is_a_file_or_commands() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "toml", "sh"}
    for language, text in BLOCKS:
        if language != "sh":
            assert re.match(r"# \w+\.(py|toml)( \(.*\))?\n", text)
        if language == "python":
            compile(text, "block", "exec")
    assert sum(NOT_RUN in text for _, text in BLOCKS) == 1


def test_the_table_is_learnt_by_carriers(followed: Path) -> None:
    results = feddd.load_results(followed / "flights-run")
    assert results.clients == tuple(f"airline {n}" for n in range(8))
    assert results.metric.name == "mae"
    for label in ("feddd", "fedavg"):
        found = results.summary["strategies"][label]
        assert found["final_metric"] < 10
        assert found["time_to_target"][0]["seconds"] is not None
    assert (followed / "flights.png").stat().st_size > 1000


def test_the_text_is_learnt_by_modules_and_the_worst_is_told(followed: Path) -> None:
    results = feddd.load_results(followed / "text-run")
    perplexities = [row["test_metric"] for row in results.rows("rounds", strategy="feddd")]
    assert perplexities[-1] < 0.8 * perplexities[0]
    assert results.clients[0] == "bisect"
    assert results.summary["strategies"]["feddd"]["worst_tenth_of_clients"] > 0


def test_a_split_and_a_loss_of_ones_own_are_used(followed: Path) -> None:
    split = feddd.load_results(followed / "split-run")
    assert {row["samples"] for row in split.rows("partition")} == {60}
    pinball = feddd.load_results(followed / "pinball-run")
    assert pinball.metric.name == "late"
    shares = [row["test_metric"] for row in pinball.rows("rounds", strategy="fedavg")]
    assert shares[-1] < 0.5 < shares[0]


def test_a_network_with_arguments_learns_by_adam(followed: Path) -> None:
    results = feddd.load_results(followed / "adam-run")
    assert results.config["model"]["arguments"] == {"hidden": 16}
    errors = [row["test_metric"] for row in results.rows("rounds", strategy="feddd")]
    assert errors[-1] < errors[0]


def test_settings_are_compared_over_seeds(followed: Path) -> None:
    rows = feddd.load_sweep(followed / "compared").summary["rows"]
    assert sum(row["strategy"] == "feddd" for row in rows) == 2
    assert all(row["metric"]["name"] == "mae" for row in rows)
    assert (followed / "compared" / "report.html").is_file()


def test_the_page_names_every_loss_metric_and_partition() -> None:
    for name in (*LOSSES, *METRICS, *PARTITIONS):
        assert f"`{name}`" in PAGE
