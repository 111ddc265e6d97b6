"""What the documents say is true: their code runs, their commands exist, their defaults and names are the real ones."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from feddd.experiments.config import Experiment, parse_experiment
from feddd.experiments.presets import presets

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHOD = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/method.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def verbs() -> list[str]:
    """The examples of the table of verbs."""
    return re.findall(r"\| `(feddd [^`]*)` \|$", README, flags=re.MULTILINE)


def example(verb: str) -> list[str]:
    """The arguments of a verb's example."""
    return next(shlex.split(line)[1:] for line in verbs() if line.startswith(f"feddd {verb} "))


def feddd(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "feddd", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


SMALL = ("--rounds", "2", "--workers", "1", "--set", "fleet.clients=5", "--set", "data.train_limit=200")


def test_experiment_of_the_readme_runs_on_fewer_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks("python")[0]
    small = code.replace('["rounds=20", "fleet.clients=20"]', '["rounds=2", "fleet.clients=5", "data.train_limit=200"]')
    small = small.replace("feddd.run(experiment)", "feddd.run(experiment, workers=1)").replace("round=20", "round=2")
    assert small.count("=2") == 3
    names: dict[str, object] = {}
    exec(small, names)
    assert set(names["results"].summary["strategies"]) == {"feddd", "feddd, 4 bits", "fedavg", "fedcs", "oort"}  # type: ignore[attr-defined]
    assert names["slowest"]["round"] == 2  # type: ignore[index]


def test_parts_of_the_readme_fit_together() -> None:
    names: dict[str, dict[str, object]] = {}
    exec(blocks("python")[1], names)
    rates, mask = names["rates"], names["mask"]
    assert rates.dropout[0] == max(rates.dropout) > 0  # type: ignore[attr-defined]
    kept = mask["0"]
    new, before, after = (names[name]["0.weight"] for name in ("new_model", "before", "after"))
    assert 0 < kept.sum() < 16  # type: ignore[attr-defined]
    assert new[kept].equal(after[kept])  # type: ignore[index]
    assert new[~kept].equal(before[~kept])  # type: ignore[index, operator]


def test_toml_of_the_readme_holds_the_defaults() -> None:
    assert parse_experiment(tomllib.loads(blocks("toml")[0])) == Experiment(name="my")


def test_every_verb_has_an_example_and_every_example_is_a_verb(tmp_path: Path) -> None:
    shown = [shlex.split(example)[1:] for example in verbs()]
    groups = {verb for verb, *_ in shown}
    listed = feddd(tmp_path, "--help").partition("Commands")[2]
    assert groups == set(re.findall(r"^│ ([a-z]+) ", listed, re.MULTILINE))
    below = feddd(tmp_path, "data", "--help").partition("Commands")[2]
    assert {second for verb, second, *_ in shown if verb == "data"} == set(
        re.findall(r"^│ ([a-z]+) ", below, re.MULTILINE)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's files, and its first verb run twice in it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "fleet.csv").write_text(blocks("csv")[0], encoding="utf-8")
    text = blocks("toml")[0].replace('dataset = "mnist"', 'dataset = "fashion-mnist-mini"')
    (folder / "my.toml").write_text(text, encoding="utf-8")
    for name in ("a", "b"):
        feddd(folder, *shlex.split(verbs()[0])[1:], *SMALL, "--out", f"runs/{name}")
    return folder


def test_examples_of_the_quick_verbs_run(runs: Path) -> None:
    assert feddd(runs, *example("presets")) == presets()["quickstart"].toml
    assert "sensor" in feddd(runs, *example("plan"))
    assert "NAME" in feddd(runs, *example("data fetch")[:2], "--help")  # a download is not for a test


@pytest.mark.slow
def test_examples_of_the_verbs_that_draw_run(runs: Path) -> None:
    feddd(runs, *example("data show"))
    assert (runs / "partition.png").stat().st_size > 0
    feddd(runs, *example("report"))
    assert (runs / "comparison" / "report.html").is_file()


def test_a_run_leaves_the_files_of_the_readme_behind(runs: Path) -> None:
    section = README.partition("## What a run leaves behind")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([^`]*)` \|", section, re.MULTILINE))
    left = {re.sub(r"^model-\w+", "model-LABEL", path.name) for path in (runs / "runs" / "a").iterdir()}
    # This run has no fleet.file, no data of its own, and does not test its clients.
    assert left == documented - {"fleet.csv", "data.json", "client_metrics.parquet"}


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    named = {t for name in DOCUMENTS for t in re.findall(r"(?:`|^ {4})make ([a-z-]+)", text_of(name), re.MULTILINE)}
    assert {"demo", "test", "check", "test-all"} <= named <= targets


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", text_of(document)):
        assert target.startswith("https://") or (ROOT / document).parent.joinpath(target).is_file(), target


def test_tests_named_in_the_method_exist() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", METHOD)
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_code_named_in_the_method_exists() -> None:
    named = re.findall(r"`(feddd\.[a-z_.]+)\.(\w+(?:\.\w+)*)(?:\(\))?`", METHOD)
    assert named
    for module, attributes in named:
        found: object = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
