"""From an experiment to a world and a folder: held-out samples, and the page that is there from the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import feddd
from feddd.errors import InputError
from feddd.experiments.running import build_world
from feddd.files import distinct_names, portable_name
from worlds import experiment


def test_a_validation_split_is_held_out_of_training_and_takes_the_test_sets_place() -> None:
    plain, held = (build_world(experiment(data=change)) for change in ({}, {"validation_share": 0.25}))
    trained = np.concatenate(held.parts)
    assert len(trained) == 450
    assert len(held.dataset.test_labels) == 150
    assert set(trained) < set(np.concatenate(plain.parts))
    left = sorted(set(np.concatenate(plain.parts)) - set(trained))
    assert np.array_equal(held.dataset.test_images, plain.dataset.train_images[left])
    assert np.array_equal(held.dataset.test_labels, plain.dataset.train_labels[left])


def test_a_validation_split_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="leaves none"):
        build_world(experiment(data={"train_limit": 2, "validation_share": 0.9}))


def test_the_page_of_a_run_is_there_while_it_goes_on(tmp_path: Path) -> None:
    pages = []

    def look(_: object) -> None:
        pages.append((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))

    feddd.run(experiment(rounds=2), tmp_path / "run", workers=1, watch=look)
    assert 'http-equiv="refresh"' in pages[0]
    assert "Unfinished" in pages[0]
    assert "feddd 0 of 2 rounds" in pages[0]
    final = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in final
    assert "Unfinished" not in final.split("<script")[0]


@pytest.mark.parametrize("text", ["feddd", "budget 0.4", "ä ö", "v1.2", "console", "-rf", "x" * 80])
def test_a_name_that_is_legal_everywhere_stays_as_it_is(text: str) -> None:
    assert portable_name(text) == text


AWKWARD = [
    "a/b",
    "a:b",
    "a*b",
    "a?b",
    'a"b',
    "a<b",
    "a>b",
    "a|b",
    "a\\b",
    "a\nb",
    "a.",
    "a ",
    "...",
    "CON",
    "nul.txt",
    "com1",
    "",
]


def test_names_that_some_system_refuses_become_legal_and_stay_distinct() -> None:
    names = distinct_names([*AWKWARD, "a_b", "A_B", portable_name("a/b")])
    assert len({name.casefold() for name in names.values()}) == len(AWKWARD) + 3
    assert names["a_b"] == "a_b"
    for name in names.values():
        assert name
        assert not set(name) & set('<>:"/\\|?*\n')
        assert name == name.rstrip(". ")
        assert name.split(".")[0].lower() not in ("con", "nul", "com1")
        assert portable_name(name) == name


def test_models_are_files_of_their_own_whatever_the_labels(tmp_path: Path) -> None:
    labels = ["fedavg", "FedAvg", "1:2", "1*2"]
    strategies = [{"name": "fedavg", "label": label} for label in labels]
    feddd.run(experiment(rounds=1, strategy=strategies), tmp_path / "run", workers=1)
    found = sorted(path.name for path in (tmp_path / "run").glob("model-*"))
    assert "model-fedavg.safetensors" in found
    assert len({name.casefold() for name in found}) == 4
    assert not any(set(name) & set(":*") for name in found)
