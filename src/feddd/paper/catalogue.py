"""The figures of the paper's evaluation by name: what they show, and the experiments they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from feddd.errors import InputError, nearest
from feddd.experiments.config import Experiment, StrategySection
from feddd.experiments.loading import load_experiment
from feddd.paper.claims import DATASETS, PARTITIONS
from feddd.paper.panels import Need
from feddd.paper.scales import Scale, scaled

Kind = Literal[
    "curves", "targets", "exchange", "budgets", "classes", "widths", "label-share", "theorem", "learning-rates"
]

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEED = 100
"""Learning rates are chosen on a seed that no figure uses."""
TUNING_ROUNDS = {"mnist": 120, "fashion-mnist": 15, "cifar10": 20}
BEST_ON_MNIST = 0.1


@dataclass(frozen=True)
class PaperFigure:
    """number: in the paper, "" for what it does not draw    strategies: only these of the presets; all if empty"""

    name: str
    number: str
    title: str
    kind: Kind
    presets: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()

    def needs(self, scale: Scale, only: Sequence[str] = (), seeds: int | None = None) -> list[Need]:
        """The experiments to run, of which `only` keeps those whose name begins with one of its words (* for any)."""
        if self.kind == "learning-rates":
            found = _learning_rates(scale, seeds)
        else:
            chosen = [self._experiment(preset) for preset in self.presets]
            found = [Need(scaled(experiment, scale), scale.seeds[:seeds]) for experiment in chosen]
        return [need for need in found if not only or any(fnmatch(need.experiment.name, f"{word}*") for word in only)]

    def _experiment(self, preset: str) -> Experiment:
        experiment = load_experiment(preset)
        kept = tuple(s for s in experiment.strategy if not self.strategies or s.label in self.strategies)
        return experiment.model_copy(update={"strategy": kept})


def _learning_rates(scale: Scale, seeds: int | None) -> list[Need]:
    """FedAvg on a validation split with every rate, one experiment each; then MNIST's four methods at the best one."""
    fedavg = (StrategySection.model_validate({"name": "fedavg"}),)
    needs = []
    for dataset in DATASETS:
        preset = load_experiment(f"{dataset}-noniid-b")
        rounds = TUNING_ROUNDS[dataset]
        data = preset.data.model_copy(update={"validation_share": 0.1})
        for rate in LEARNING_RATES:
            training = preset.training.model_copy(update={"learning_rate": rate})
            change = {"strategy": fedavg, "data": data, "training": training, "rounds": rounds, "evaluate_every": 5}
            tuned = preset.model_copy(update={**change, "name": f"{preset.name}-rate-{rate:g}"})
            needs.append(Need(scaled(tuned, scale), (TUNING_SEED,)))
    for partition in PARTITIONS:
        preset = load_experiment(f"mnist-{partition}")
        training = preset.training.model_copy(update={"learning_rate": BEST_ON_MNIST})
        change = {"training": training, "targets": (0.88, 0.9, 0.93, 0.95), "name": f"{preset.name}-best-rate"}
        needs.append(Need(scaled(preset.model_copy(update=change), scale), scale.seeds[:seeds]))
    return needs


def _all(
    suffix: str = "", partitions: Sequence[str] = PARTITIONS, worlds: Sequence[str] = tuple(DATASETS)
) -> tuple[str, ...]:
    return tuple(f"{world}-{partition}{suffix}" for world in worlds for partition in partitions)


_WIDTHS = ("heterogeneous-a", "heterogeneous-b")
_TESTBED = ("testbed-cifar10",)

FIGURES: tuple[PaperFigure, ...] = (
    PaperFigure(
        "label-share", "2", "A label's accuracy against its share of the data", "label-share", _all("", ("iid",))
    ),
    PaperFigure(
        "loss-by-size", "3", "Training loss by size of the sub-model", "widths", ("heterogeneous-b-iid",), ("fedavg",)
    ),
    PaperFigure("accuracy-iid", "4", "Accuracy over time, IID", "curves", _all("", ("iid",))),
    PaperFigure("accuracy-noniid-a", "5", "Accuracy over time, Non-IID-a", "curves", _all("", ("noniid-a",))),
    PaperFigure("accuracy-noniid-b", "6", "Accuracy over time, Non-IID-b", "curves", _all("", ("noniid-b",))),
    PaperFigure("time-to-accuracy", "7", "Time to target accuracies, equal models", "targets", _all()),
    PaperFigure("testbed", "8", "Accuracy over time, the testbed's setting", "curves", _all("", worlds=_TESTBED)),
    PaperFigure("heterogeneous", "9", "Accuracy over time, models of five widths", "curves", _all("", worlds=_WIDTHS)),
    PaperFigure(
        "time-to-accuracy-heterogeneous",
        "10",
        "Time to target accuracies, models of five widths",
        "targets",
        _all("", worlds=_WIDTHS),
    ),
    PaperFigure("selection-mnist", "11", "Selection rules on MNIST", "curves", _all("-selectors", worlds=("mnist",))),
    PaperFigure(
        "selection-fashion-mnist",
        "12",
        "Selection rules on Fashion-MNIST",
        "curves",
        _all("-selectors", worlds=("fashion-mnist",)),
    ),
    PaperFigure(
        "selection-cifar10", "13", "Selection rules on CIFAR-10", "curves", _all("-selectors", worlds=("cifar10",))
    ),
    PaperFigure(
        "selection-testbed",
        "14",
        "Selection rules, the testbed's setting",
        "curves",
        _all("-selectors", worlds=_TESTBED),
    ),
    PaperFigure(
        "selection-heterogeneous",
        "15",
        "Selection rules, models of five widths",
        "curves",
        _all("-selectors", worlds=_WIDTHS),
    ),
    PaperFigure("budgets", "16", "Final accuracy by budget, equal models", "budgets", _all("-budgets", PARTITIONS[1:])),
    PaperFigure(
        "budgets-heterogeneous",
        "17",
        "Final accuracy by budget, models of five widths",
        "budgets",
        _all("-budgets", PARTITIONS[1:], _WIDTHS),
    ),
    PaperFigure("penalty", "18", "The penalty δ", "curves", _all("-penalty", ("noniid-a",), _WIDTHS)),
    PaperFigure(
        "broadcast", "19", "The broadcast period h, equal models", "curves", _all("-broadcast", worlds=("cifar10",))
    ),
    PaperFigure(
        "broadcast-heterogeneous",
        "20",
        "The broadcast period h, models of five widths",
        "curves",
        _all("-broadcast", ("noniid-a",), _WIDTHS),
    ),
    PaperFigure("imbalance", "21", "Accuracy per label when three are rare", "classes", _all("", ("imbalanced",))),
    PaperFigure("crosses", "", "Allocation and selection, each alone", "curves", _all("-crosses", worlds=("mnist",))),
    PaperFigure(
        "bits",
        "",
        "Beyond the paper: values in 8, 4 and 2 bits",
        "exchange",
        (*_all("-bits", ("iid", "noniid-b"), ("mnist", "fashion-mnist")), "cifar10-noniid-b-bits"),
    ),
    PaperFigure(
        "choices",
        "",
        "Beyond the paper: budgets, broadcasts and absences chosen while it runs",
        "curves",
        _all("-choices", worlds=("mnist", "fashion-mnist")),
    ),
    PaperFigure(
        "peers",
        "",
        "Beyond the paper: sub-model and sparse methods beside FedDD",
        "exchange",
        ("peers-mnist-iid", "peers-mnist-noniid-b"),
    ),
    PaperFigure("theorem", "", "Theorem 2's bound beside measured gradients", "theorem"),
    PaperFigure("learning-rates", "", "How the learning rates were chosen", "learning-rates"),
)


def figure_named(name: str) -> PaperFigure:
    """Return a figure by its name; an unknown one is an error that suggests the nearest."""
    found = next((figure for figure in FIGURES if figure.name == name), None)
    if found is None:
        raise InputError(f"unknown figure {name!r}; {nearest(name, [figure.name for figure in FIGURES])}")
    return found
