"""From an experiment to a world and a folder: held-out samples, and the page that is there from the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import feddd
from feddd.errors import InputError
from feddd.experiments.running import build_world
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
