"""A selection score from outside the package: ranked like the built-in ones, named by its import path, or refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import feddd
from feddd.core.units import units
from feddd.errors import InputError
from feddd.experiments.config import parse_experiment
from feddd.strategies.feddd import FedDD
from feddd.wire.exchange import chain
from feddd.wire.select import Select
from worlds import experiment

NET = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
TABLE = units(NET)
PATH = f"{__name__}:movement"


def movement(before: Tensor, after: Tensor) -> Tensor:
    return (after - before).norm(dim=2)


def constant(before: Tensor, after: Tensor) -> Tensor:
    return torch.zeros(before.shape[:2])


def broken(before: Tensor, after: Tensor) -> Tensor:
    return torch.full(before.shape[:2], torch.nan)


def flattened(before: Tensor, after: Tensor) -> Tensor:
    return before.flatten()


def models() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    before, after = ({s.name: torch.randn(s.shape, generator=generator) for s in TABLE.slots} for _ in range(2))
    return before, after


def test_the_same_formula_from_outside_chooses_the_same_units() -> None:
    own, built_in = (feddd.select(*models(), 0.5, selector=rule, units=TABLE) for rule in (movement, "delta"))
    assert all(torch.equal(own[name], built_in[name]) for name in own)


def test_ties_go_by_index() -> None:
    mask = feddd.select(*models(), 0.5, selector=constant, units=TABLE)
    assert mask["0"].tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(("score", "message"), [(broken, "'broken' .* not finite"), (flattened, r"\[clients, units\]")])
def test_what_is_no_ranking_is_refused(score: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        feddd.select(*models(), 0.5, selector=score, units=TABLE)


def test_chains_are_named_and_compared_by_the_path() -> None:
    assert chain(Select(0.4, movement)).kind == chain(Select(0.6, movement)).kind
    assert chain(Select(0.4, movement)).kind != chain(Select(0.4, constant)).kind
    assert PATH in chain(Select(0.4, movement)).name


def test_a_toml_names_it_and_keeps_the_name() -> None:
    found = parse_experiment({"strategy": [{"name": "feddd", "selector": PATH}]})
    assert found.strategy[0].build() == FedDD(selector=movement)
    assert found.strategy[0].options["selector"] == PATH
    assert found.import_paths == [PATH]
    assert parse_experiment(tomllib.loads(found.to_toml())) == found


@pytest.mark.parametrize(
    ("selector", "message"),
    [("importence", "did you mean 'importance'"), (f"{__name__}:nothing", "cannot import"), (3, "selector")],
)
def test_what_is_no_score_is_one_line(selector: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_experiment({"strategy": [{"name": "feddd", "selector": selector}]}).strategy[0].build()
    assert "\n" not in str(caught.value)


def test_a_run_with_two_workers_gives_what_the_built_in_one_gives(tmp_path: Path) -> None:
    settings = {"fleet": {"clients": 4}, "data": {"train_limit": 100}, "rounds": 3}
    strategies = [{"name": "feddd", "label": label, "selector": rule} for label, rule in (("a", PATH), ("b", "delta"))]
    rounds = feddd.run(experiment(**settings, strategy=strategies), tmp_path / "run", workers=2).tables["rounds"]
    own, built_in = (rounds.filter(rounds["strategy"].to_numpy() == label) for label in "ab")
    assert own["test_loss"].to_pylist() == built_in["test_loss"].to_pylist()
