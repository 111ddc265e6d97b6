"""The same experiment at three scales: the paper's setting, what two cores do in about an hour a figure, seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from feddd.experiments.config import Experiment, StrategySection

ScaleName = Literal["smoke", "small", "full"]


@dataclass(frozen=True)
class Scale:
    """Seeds, and per data set what is changed; `words` say what a reader must know.

    divide: by how much the widths of models are divided whose name begins so
    """

    name: ScaleName
    seeds: tuple[int, ...]
    changes: Mapping[str, Mapping[str, Any]]
    words: Mapping[str, str]


_SMOKE = {"rounds": 2, "train_limit": 120, "clients": 6, "epochs": 1, "targets": (0.05, 0.1), "divide": {"": 4}}
_SMOKE_WORDS = "a smoke test: {source}, 6 clients, 120 samples, 2 rounds, narrow models; the numbers mean nothing"

SCALES: Mapping[ScaleName, Scale] = {
    "full": Scale("full", (0, 1, 2), {}, {}),
    "small": Scale(
        "small",
        (0, 1, 2),
        {
            "fashion-mnist": {"train_limit": 12_000},
            "cifar10": {
                "train_limit": 2_500,
                "clients": 25,
                "rounds": 40,
                "targets": (0.15, 0.2, 0.25, 0.3, 0.35),
                "divide": {"heterogeneous": 4},
            },
        },
        {
            "fashion-mnist": "12,000 of the 60,000 training images",
            "cifar10": "25 clients, 2,500 of the 50,000 training images, 40 rounds instead of 100; "
            "heterogeneous models at a quarter of their widths",
        },
    ),
    "smoke": Scale(
        "smoke",
        (0,),
        {
            "mnist": {**_SMOKE, "dataset": "fashion-mnist-mini"},
            "fashion-mnist": {**_SMOKE, "dataset": "fashion-mnist-mini"},
            "cifar10": {**_SMOKE, "dataset": "synthetic-colour", "divide": {"heterogeneous": 16, "cnn2": 4}},
        },
        {
            "mnist": _SMOKE_WORDS.format(source="the bundled Fashion-MNIST subset"),
            "fashion-mnist": _SMOKE_WORDS.format(source="the bundled Fashion-MNIST subset"),
            "cifar10": _SMOKE_WORDS.format(source="images made on the fly"),
        },
    ),
}


def scaled(experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment at this scale."""
    change = scale.changes.get(experiment.data.dataset)
    if change is None:
        return experiment
    rounds = min(change.get("rounds", experiment.rounds), experiment.rounds)
    data = {key: change[key] for key in ("dataset", "train_limit") if key in change}
    fleet = {"clients": change["clients"]} if "clients" in change else {}
    training = {"epochs": change["epochs"]} if "epochs" in change else {}
    parts: dict[str, Any] = {
        "rounds": rounds,
        "targets": change.get("targets", experiment.targets),
        "data": experiment.data.model_copy(update=data),
        "fleet": experiment.fleet.model_copy(update=fleet),
        "model": experiment.model.model_copy(
            update={"name": _narrowed(experiment.model.name, change.get("divide", {}))}
        ),
        "training": experiment.training.model_copy(update=training),
        "strategy": tuple(_in_time(section, rounds / experiment.rounds) for section in experiment.strategy),
    }
    return experiment.model_copy(update=parts)


def _narrowed(model: str, divide: Mapping[str, int]) -> str:
    divisor = next((number for prefix, number in divide.items() if model.startswith(prefix)), 1)
    return model if divisor == 1 else f"{model}/{divisor}"


def _in_time(section: StrategySection, share: float) -> StrategySection:
    """A schedule that turns at some round turns as early in a shorter run."""
    later = section.options.get("broadcast_later")
    if not later or share == 1:
        return section
    turns = [max(2, round(turn * share)) for turn, _ in later]
    turns = [max(turn, 2 + place) for place, turn in enumerate(turns)]
    moved = tuple((turn, every) for turn, (_, every) in zip(turns, later, strict=True))
    return StrategySection.model_validate({**section.model_dump(), "broadcast_later": moved})
