"""What the paper says, number by number, and how ours is measured. Methods, presets and labels as in the presets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from feddd.paper.measures import (
    Answer,
    Measure,
    Paper,
    best_rule,
    early_gap,
    final,
    gap,
    never_reaches,
    of_class,
    off_by,
    over,
    round_time,
    tenths,
    time_saved,
)
from feddd.paper.panels import Panels

PARTITIONS = ("iid", "noniid-a", "noniid-b")
RULES = ("delta", "random", "ordered", "magnitude")
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
METHODS = {"fedavg": "FedAvg", "fedcs": "FedCS", "oort": "Oort", "feddd": "FedDD"}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with its number, under the figure it belongs to."""

    figure: str
    says: str
    paper: str
    number: Paper
    measure: Measure

    def answer(self, panels: Panels) -> tuple[Answer, str]:
        """Ours, and how far it is from the paper's."""
        found = self.measure(panels)
        return found, off_by(self.number, found.value)


def _saved(figure: str, preset: str, where: str, target: float, numbers: dict[str, float]) -> list[Claim]:
    goal = f"{100 * target:g} %"
    return [
        Claim(
            figure,
            f"{where}: less time to {goal} than {METHODS[other]}",
            f"{number} %",
            number,
            time_saved(preset, other, target),
        )
        for other, number in numbers.items()
    ]


def _saved_range(model: str, numbers: dict[str, tuple[float, float]]) -> list[Claim]:
    presets = [f"{model}-{partition}" for partition in PARTITIONS]
    return [
        Claim(
            "time-to-accuracy-heterogeneous",
            f"{model}: less time to the targets than {METHODS[other]}, over the partitions",
            f"{low}–{high} %",
            (low, high),
            over(presets, partial(time_saved, other=other, target=None)),
        )
        for other, (low, high) in numbers.items()
    ]


def _gaps(figure: str, preset: str, where: str, numbers: dict[str, float]) -> list[Claim]:
    """Final accuracy of FedDD above others; 0 stands for "similar"."""
    return [
        Claim(
            figure,
            f"{where}: final accuracy above {METHODS[other]}",
            f"{tenths(number)} points" if number else "similar",
            number,
            gap(preset, other),
        )
        for other, number in numbers.items()
    ]


def _rules(figure: str, world: str, name: str, says: dict[str, str]) -> list[Claim]:
    return [
        Claim(
            figure,
            f"{name} {partition}: importance above the best other rule",
            says[partition],
            None,
            best_rule(f"{world}-{partition}-selectors", "importance", RULES),
        )
        for partition in PARTITIONS
    ]


def _drops() -> list[Claim]:
    homogeneous = [f"{data}-{partition}-budgets" for data in DATASETS for partition in PARTITIONS[1:]]
    widths = [f"heterogeneous-{model}-{partition}-budgets" for model in "ab" for partition in PARTITIONS[1:]]
    numbers = {"feddd": (0.1, 11.5), "fedcs": (3.7, 47.5), "oort": (2.3, 43.0)}
    return [
        Claim(
            figure,
            f"{METHODS[method]}: points lost from a budget of 80 % to 20 %, over the settings",
            f"{numbers[method][0]}–{numbers[method][1]} (over both figures)",
            numbers[method],
            over(presets, partial(gap, other=f"{method} 20 %", ours=f"{method} 80 %")),
        )
        for figure, presets in (("budgets", homogeneous), ("budgets-heterogeneous", widths))
        for method in numbers
    ]


def _classes() -> list[Claim]:
    """Rare labels are 0, 1 and 2."""
    numbers: dict[str, dict[tuple[str, int], tuple[str, Paper]]] = {
        "mnist": {
            **{("feddd", label): ("85.0–96.2 % (all classes)", None) for label in range(10)},
            **{("fedcs", label): ("0 %", 0.0) for label in range(3)},
            ("oort", 1): ("36.7 %", 36.7),
            ("oort", 2): ("12.0 %", 12.0),
        },
        "fashion-mnist": {
            ("feddd", 0): ("83.1 %", 83.1),
            ("feddd", 1): ("94.9 %", 94.9),
            ("feddd", 2): ("59.3 %", 59.3),
            ("fedcs", 1): ("0 %", 0.0),
            ("fedcs", 2): ("1 %", 1.0),
            ("oort", 0): ("1.8 %", 1.8),
            ("oort", 1): ("27.8 %", 27.8),
        },
        "cifar10": {
            **{("feddd", label): ("23.6–57.2 %, above FedAvg", None) for label in range(3)},
            **{("fedavg", label): ("below FedDD", None) for label in range(3)},
            **{(other, label): ("near 0", 0.0) for other in ("fedcs", "oort") for label in range(3)},
        },
    }
    return [
        Claim(
            "imbalance",
            f"{DATASETS[data]}, labels 0–2 rare, budget 20 %: {METHODS[method]} on label {label}",
            paper,
            number,
            of_class(f"{data}-imbalanced", method, label),
        )
        for data, cells in numbers.items()
        for (method, label), (paper, number) in cells.items()
    ]


def _penalty() -> list[Claim]:
    return [
        claim
        for model in ("heterogeneous-a", "heterogeneous-b")
        for preset in [f"{model}-noniid-a-penalty"]
        for claim in (
            Claim(
                "penalty",
                f"{model} noniid-a: final accuracy with penalty 0.1 above penalty 0",
                "higher",
                None,
                gap(preset, "penalty 0", "penalty 0.1"),
            ),
            Claim(
                "penalty",
                f"{model} noniid-a: time of a round with penalty 0.1 above penalty 0",
                "longer",
                None,
                round_time(preset, "penalty 0", "penalty 0.1"),
            ),
        )
    ]


def _testbed() -> list[Claim]:
    """Return the paper gives seconds: 2000 against 3500, 3000 and 2300 against more than 3500."""
    numbers: dict[str, tuple[str, float, dict[str, tuple[str, Paper]]]] = {
        "iid": ("IID", 0.71, dict.fromkeys(("fedavg", "oort"), ("about 43 %", 43.0))),
        "noniid-a": ("Non-IID-a", 0.69, dict.fromkeys(("fedavg", "fedcs", "oort"), ("more than 14 %", None))),
        "noniid-b": ("Non-IID-b", 0.60, dict.fromkeys(("fedavg", "fedcs", "oort"), ("more than 34 %", None))),
    }
    return [
        Claim(
            "testbed",
            f"testbed {where}: less time to {100 * target:g} % than {METHODS[other]}",
            paper,
            number,
            time_saved(f"testbed-cifar10-{partition}", other, target),
        )
        for partition, (where, target, others) in numbers.items()
        for other, (paper, number) in others.items()
    ]


def _broadcast() -> list[Claim]:
    settings = [("broadcast", f"cifar10-{partition}-broadcast", f"CIFAR-10 {partition}") for partition in PARTITIONS]
    settings += [
        ("broadcast-heterogeneous", f"{model}-noniid-a-broadcast", f"{model} noniid-a")
        for model in ("heterogeneous-a", "heterogeneous-b")
    ]
    schedule = "h = 20, then 5, then 1"
    return [
        claim
        for figure, preset, where in settings
        for claim in (
            Claim(
                figure,
                f"{where}: final accuracy with h = 20 above h = 1",
                "lower",
                None,
                gap(preset, "h = 1", "h = 20"),
            ),
            Claim(
                figure,
                f"{where}: accuracy after a quarter of the rounds, h = 20 above h = 1",
                "little influence",
                None,
                early_gap(preset, "h = 1", "h = 20", 0.25),
            ),
            Claim(
                figure,
                f"{where}: final accuracy with h large early, small late, above h = 20",
                "suggested, not measured",
                None,
                gap(preset, "h = 20", schedule),
            ),
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    *_saved("time-to-accuracy", "mnist-iid", "MNIST IID", 0.88, {"fedavg": 73.5, "fedcs": 51.5, "oort": 41.5}),
    *_saved("time-to-accuracy", "cifar10-noniid-b", "CIFAR-10 Non-IID-b", 0.56, {"fedavg": 59.9}),
    *(
        Claim(
            "time-to-accuracy",
            f"CIFAR-10 Non-IID-b: {METHODS[other]} on the way to 56 %",
            "never reaches it",
            None,
            never_reaches("cifar10-noniid-b", other, 0.56),
        )
        for other in ("fedcs", "oort")
    ),
    *_gaps("accuracy-iid", "mnist-iid", "MNIST IID", {"fedavg": 0.0, "fedcs": 0.0, "oort": 0.0}),
    *_gaps("accuracy-iid", "fashion-mnist-iid", "Fashion-MNIST IID", {"fedavg": 0.0, "fedcs": 0.0, "oort": 0.0}),
    *_gaps("accuracy-iid", "cifar10-iid", "CIFAR-10 IID", {"fedcs": 0.0, "oort": 3.6}),
    *_gaps("accuracy-noniid-a", "mnist-noniid-a", "MNIST Non-IID-a", {"fedavg": 0.0, "fedcs": 1.5, "oort": 0.0}),
    *_gaps("accuracy-noniid-a", "fashion-mnist-noniid-a", "Fashion-MNIST Non-IID-a", {"fedcs": 2.2, "oort": 1.7}),
    *_gaps("accuracy-noniid-a", "cifar10-noniid-a", "CIFAR-10 Non-IID-a", {"fedcs": 3.8, "oort": 0.0}),
    *_gaps("accuracy-noniid-b", "mnist-noniid-b", "MNIST Non-IID-b", {"fedcs": 5.5, "oort": 1.5}),
    *_gaps("accuracy-noniid-b", "fashion-mnist-noniid-b", "Fashion-MNIST Non-IID-b", {"fedcs": 4.7, "oort": 2.5}),
    *_gaps("accuracy-noniid-b", "cifar10-noniid-b", "CIFAR-10 Non-IID-b", {"fedcs": 8.3, "oort": 2.1}),
    *_saved_range("heterogeneous-a", {"fedavg": (75.6, 79.7), "fedcs": (47.1, 83.5), "oort": (56.2, 78.6)}),
    *_saved_range("heterogeneous-b", {"fedavg": (66.2, 81.7), "fedcs": (50.6, 60.2), "oort": (23.0, 62.7)}),
    *_gaps("heterogeneous", "heterogeneous-a-iid", "heterogeneous-a IID", {"fedavg": 0.0, "fedcs": 0.0, "oort": 0.0}),
    *_gaps("heterogeneous", "heterogeneous-a-noniid-a", "heterogeneous-a Non-IID-a", {"fedcs": 17.5, "oort": 0.0}),
    *_gaps("heterogeneous", "heterogeneous-b-noniid-a", "heterogeneous-b Non-IID-a", {"fedcs": 30.6, "oort": 4.9}),
    Claim(
        "heterogeneous",
        "heterogeneous-a Non-IID-b: final accuracy of FedDD",
        "60.6 %",
        60.6,
        final("heterogeneous-a-noniid-b", "feddd"),
    ),
    *_gaps(
        "heterogeneous",
        "heterogeneous-a-noniid-b",
        "heterogeneous-a Non-IID-b",
        {"fedavg": -3.6, "fedcs": 17.2, "oort": 20.9},
    ),
    *_gaps("heterogeneous", "heterogeneous-b-noniid-b", "heterogeneous-b Non-IID-b", {"fedcs": 33.6, "oort": 26.2}),
    *_rules(
        "selection-mnist",
        "mnist",
        "MNIST",
        {"iid": "all similar", "noniid-a": "all similar", "noniid-b": "best with delta; max and ordered worst"},
    ),
    *_rules(
        "selection-fashion-mnist",
        "fashion-mnist",
        "Fashion-MNIST",
        {"iid": "all similar", "noniid-a": "all similar", "noniid-b": "best; ordered, delta, random, max follow"},
    ),
    *_rules(
        "selection-cifar10",
        "cifar10",
        "CIFAR-10",
        {"iid": "best, max second", "noniid-a": "best, delta second", "noniid-b": "best, delta second"},
    ),
    *_testbed(),
    *_rules(
        "selection-testbed",
        "testbed-cifar10",
        "testbed",
        {
            "iid": "all similar",
            "noniid-a": "with delta fastest; max lowest",
            "noniid-b": "best",
        },
    ),
    *_rules("selection-heterogeneous", "heterogeneous-a", "heterogeneous-a", dict.fromkeys(PARTITIONS, "best")),
    *_rules(
        "selection-heterogeneous",
        "heterogeneous-b",
        "heterogeneous-b",
        {"iid": "best", "noniid-a": "best, random similar", "noniid-b": "best"},
    ),
    *_drops(),
    *_penalty(),
    *_broadcast(),
    *_classes(),
)
