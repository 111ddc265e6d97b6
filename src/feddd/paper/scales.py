"""The same experiment at three scales: the paper's setting, what two cores do in about an hour a figure, seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from feddd.experiments.config import Experiment, StrategySection

ScaleName = Literal["smoke", "small", "full"]


WORLDS = {
    "testbed": "The testbed's setting, CIFAR-10",
    "heterogeneous": "CIFAR-10, models of five widths",
    "fashion-mnist": "Fashion-MNIST",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
}
"""What scales tell apart, by the word for it in an experiment's name; the first that fits counts."""


@dataclass(frozen=True)
class Scale:
    """Seeds, and per world what is changed; `words` say what a reader must know."""

    name: ScaleName
    seeds: tuple[int, ...]
    changes: Mapping[str, Mapping[str, Any]]
    words: Mapping[str, str]


_SMOKE = {"rounds": 2, "train_limit": 120, "clients": 6, "epochs": 1, "targets": (0.05, 0.1), "divide": 4}
_SMOKE_GREY = {**_SMOKE, "dataset": "fashion-mnist-mini"}
_SMOKE_COLOUR = {**_SMOKE, "dataset": "synthetic-colour"}
_SMOKE_WORDS = "a smoke test: {source}, 6 clients, 120 samples, 2 rounds, narrow models; the numbers mean nothing"
_SMOKE_GREY_WORDS = _SMOKE_WORDS.format(source="the bundled Fashion-MNIST subset")
_SMOKE_COLOUR_WORDS = _SMOKE_WORDS.format(source="images made on the fly")
_SMALL_TARGETS = (0.15, 0.2, 0.25, 0.3, 0.35)

SCALES: Mapping[ScaleName, Scale] = {
    "full": Scale("full", (0, 1, 2), {}, {}),
    "small": Scale(
        "small",
        (0, 1, 2),
        {
            "fashion-mnist": {"train_limit": 12_000},
            "cifar10": {"train_limit": 2_500, "clients": 25, "rounds": 40, "targets": _SMALL_TARGETS},
            "testbed": {"train_limit": 5_000, "rounds": 20, "targets": (*_SMALL_TARGETS, 0.4, 0.45, 0.5)},
            # Deeper, they need some thousand steps before they learn anything: fewer clients, with as many images each
            # as in the paper.
            "heterogeneous": {
                "train_limit": 5_000,
                "clients": 10,
                "rounds": 30,
                "targets": _SMALL_TARGETS,
                "divide": 4,
            },
        },
        {
            "fashion-mnist": "12,000 of the 60,000 training images",
            "cifar10": "25 clients, 2,500 of the 50,000 training images, 40 rounds instead of 100",
            "testbed": "5,000 of the 50,000 training images, 20 rounds instead of 30",
            "heterogeneous": "10 clients, two of each width, with 5,000 of the 50,000 training images, 30 rounds "
            "instead of 100, a quarter of the widths",
        },
    ),
    "smoke": Scale(
        "smoke",
        (0,),
        {
            "mnist": _SMOKE_GREY,
            "fashion-mnist": _SMOKE_GREY,
            "cifar10": _SMOKE_COLOUR,
            "testbed": _SMOKE_COLOUR,
            "heterogeneous": {**_SMOKE_COLOUR, "divide": 16},
        },
        {
            "mnist": _SMOKE_GREY_WORDS,
            "fashion-mnist": _SMOKE_GREY_WORDS,
            "cifar10": _SMOKE_COLOUR_WORDS,
            "testbed": _SMOKE_COLOUR_WORDS,
            "heterogeneous": _SMOKE_COLOUR_WORDS,
        },
    ),
}


def world_of(experiment: Experiment) -> str:
    """Return which of WORLDS an experiment of the paper's belongs to; "" for any other."""
    return next((world for world in WORLDS if world in experiment.name), "")


def scaled(experiment: Experiment, scale: Scale) -> Experiment:
    """Return the experiment at this scale."""
    change = scale.changes.get(world_of(experiment))
    if change is None:
        return experiment
    rounds = min(change.get("rounds", experiment.rounds), experiment.rounds)
    data = {key: change[key] for key in ("dataset", "train_limit") if key in change}
    fleet = {"clients": change["clients"]} if "clients" in change else {}
    model = {"name": f"{experiment.model.name}/{change['divide']}"} if "divide" in change else {}
    training = {"epochs": change["epochs"]} if "epochs" in change else {}
    parts: dict[str, Any] = {
        "rounds": rounds,
        "targets": change.get("targets", experiment.targets),
        "data": experiment.data.model_copy(update=data),
        "fleet": experiment.fleet.model_copy(update=fleet),
        "model": experiment.model.model_copy(update=model),
        "training": experiment.training.model_copy(update=training),
        "strategy": tuple(_in_time(section, rounds / experiment.rounds) for section in experiment.strategy),
    }
    return experiment.model_copy(update=parts)


def _in_time(section: StrategySection, share: float) -> StrategySection:
    """Return a schedule that turns at some round turns as early in a shorter run."""
    later = section.options.get("broadcast_later")
    if not later or share == 1:
        return section
    turns = [max(2, round(turn * share)) for turn, _ in later]
    turns = [max(turn, 2 + place) for place, turn in enumerate(turns)]
    moved = tuple((turn, every) for turn, (_, every) in zip(turns, later, strict=True))
    return StrategySection.model_validate({**section.model_dump(), "broadcast_later": moved})
