"""Presets: composed as presets.toml says, written out as files that can be run, and what `feddd presets` prints."""

from __future__ import annotations

import copy
import json
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from feddd import load_experiment
from feddd.cli import main
from feddd.errors import InputError
from feddd.experiments import presets as module
from feddd.experiments.config import parse_experiment
from feddd.experiments.presets import presets
from preset_pins import FILE, REGENERATE, defaults, digest

PINNED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["feddd", "presets", *arguments])
        main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A copy of presets.toml that a test may change; `composed` reads it."""
    changed = copy.deepcopy(module._book())
    monkeypatch.setattr(module, "_book", lambda: changed)
    return changed


def composed() -> dict[str, module.Preset]:
    return presets.__wrapped__()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("name", presets())
def test_a_preset_equals_its_toml_after_a_round_trip(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    assert parse_experiment(tomllib.loads(experiment.to_toml())) == experiment


@pytest.mark.parametrize("name", presets())
def test_what_show_prints_is_a_file_that_equals_the_preset(name: str, printed: Printed, tmp_path: Any) -> None:
    text = printed("show", name)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_experiment(tmp_path / "mine.toml") == load_experiment(name)
    assert text.startswith(f"# {presets()[name].about}\n")
    assert json.loads(printed("show", name, "--json"))["name"] == name


def test_a_preset_says_what_it_said() -> None:
    found = {name: digest(load_experiment(name)) for name in presets()}
    changed = sorted(
        name for name in found.keys() | PINNED["presets"] if found.get(name) != PINNED["presets"].get(name)
    )
    assert changed == [], f"results that are kept lose their presets; if that is meant: {REGENERATE}"


def test_defaults_that_presets_rest_on_are_what_they_were() -> None:
    found = defaults()
    for section, pinned in PINNED["defaults"].items():
        assert {key: found[section].get(key, "gone") for key in pinned} == pinned, f"if that is meant: {REGENERATE}"


def test_the_digest_notices_every_kind_of_change() -> None:
    before = digest(load_experiment("mnist-iid"))
    changes = ["rounds=119", "targets=[0.8]", "name=other", "training.epochs=2", "strategy.oort.budget=0.5"]
    assert before not in {digest(load_experiment("mnist-iid", [change])) for change in changes}
    assert digest(load_experiment("mnist-iid", ["strategy.oort.budget=0.6"])) == before  # its default


def test_a_comment_says_why_a_strategy_is_as_it_is(printed: Printed) -> None:
    reason = '# With their places 0.57 of the values take 0.60 of the bytes.\n[[strategy]]\nname = "topk"\n'
    assert reason in printed("show", "peers-mnist-iid")


# How presets.toml is put together


def test_one_more_partition_in_a_family_is_one_more_preset(book: dict[str, Any]) -> None:
    book["family"]["crosses"]["on"]["cifar10"] = ["noniid-a"]
    before, after = presets(), composed()
    assert after.keys() - before.keys() == {"cifar10-noniid-a-crosses"}
    added, model = after["cifar10-noniid-a-crosses"].document, before["cifar10-noniid-a"].document
    assert added["strategy"] == before["mnist-iid-crosses"].document["strategy"]
    assert {**added, "name": 0, "strategy": 0} == {**model, "name": 0, "strategy": 0}


def test_a_partition_brings_its_keys_into_the_data_section(book: dict[str, Any]) -> None:
    book["partition"]["dirichlet"] = {"about": "shares drawn by Dirichlet", "alpha": 0.1}
    book["family"]["compared"]["on"]["mnist"] = ["dirichlet"]
    preset = composed()["mnist-dirichlet"]
    assert preset.about.startswith("MNIST, MLP, shares drawn by Dirichlet: FedDD")
    assert parse_experiment(tomllib.loads(preset.toml)).data.alpha == 0.1


def test_a_world_like_another_differs_where_it_says_so(book: dict[str, Any]) -> None:
    book["world"]["slow"] = {
        "like": "mnist",
        "about": "slow",
        "training": {"epochs": 2},
        "set": {"oort": {"budget": 0.4}},
    }
    book["family"]["compared"]["on"]["slow"] = ["iid"]
    experiment = parse_experiment(tomllib.loads(composed()["slow-iid"].toml))
    assert (experiment.training.epochs, experiment.training.learning_rate) == (2, 0.01)
    assert [one.options.get("budget") for one in experiment.strategy] == [0.6, None, 0.6, 0.4]


def test_a_key_that_no_experiment_has_is_refused_by_name(book: dict[str, Any]) -> None:
    book["world"]["mnist"]["ronds"] = 3
    with pytest.raises(InputError, match="unknown key ronds; did you mean 'rounds'"):
        parse_experiment(tomllib.loads(composed()["mnist-iid"].toml))


# What is listed


def test_the_table_of_contents_names_every_preset_and_fits_a_screen(printed: Printed) -> None:
    lines = printed().splitlines()
    assert len(lines) < 53
    assert max(map(len, lines)) < 80
    named = set()
    for line in lines[: lines.index("What the parts of a name mean")]:
        first, *rest = line.split() if line.startswith("  ") else [""]
        named |= {first} | {first + word if word.startswith("-") else word for word in rest}
    assert named - {""} == set(presets())
    for ending in {preset.ending for preset in presets().values()} - {""}:
        assert any(line.startswith(f"  -{ending} ") for line in lines)
    assert all(preset.stem in presets() for preset in presets().values() if preset.ending)


def test_words_find_presets_by_name_and_description(printed: Printed) -> None:
    penalties = ["heterogeneous-a-noniid-a-penalty", "heterogeneous-b-noniid-a-penalty"]
    assert [line.split("  ")[0] for line in printed("PENALTY").splitlines()] == penalties
    assert [row["name"] for row in json.loads(printed("find", "penalty", "heterogeneous-b", "--json"))] == penalties[1:]
    assert printed("garbage", "10 %") == printed("find", "faults-mnist-iid-10-percent-garbage")
    assert json.loads(printed("--json", "penalty")) == json.loads(printed("penalty", "--json"))


def test_json_lists_every_preset_with_its_group_and_description(printed: Printed) -> None:
    rows = json.loads(printed("--json"))
    assert [row["name"] for row in rows] == list(presets())
    assert rows[0]["name"] == "quickstart"
    assert all(list(row) == ["name", "group", "about"] and all(row.values()) for row in rows)
