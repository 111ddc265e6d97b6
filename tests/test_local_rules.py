"""Rules of local training: each against torch.optim or the published formula, in every trainer."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from feddd import FedAvg, InputError
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.simulation.trainers import make_trainer
from feddd.simulation.training import Local, Samples, Training, batches
from feddd.strategies.fedprox import FedProx, Proximal
from feddd.strategies.heterofl import HeteroFL
from feddd.strategies.with_rules import Momentum, WeightDecay, WithRules
from feddd.wire.local import LocalRound, Rule, start_rules
from feddd.world.models import build
from worlds import experiment

COUNTS = (45, 7, 70, 33)
TRAINING = Training(epochs=2, batch_size=16, learning_rate=0.05)


@dataclass(frozen=True)
class Slower(Rule):
    """A stranger's rule, with a number of its own for every client of a stack."""

    factor: float = 1.0
    each = ("factor",)

    def start(self, at: LocalRound) -> dict[str, Tensor]:
        return {"factor": at.each["factor"]}

    def step(self, gradients: Any, params: Any, memory: Any) -> Any:
        factor = memory["factor"]
        return {name: own * factor.view(-1, *[1] * (own.dim() - 1)) for name, own in gradients.items()}, memory


def by_hand(
    model: nn.Module,
    start: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
    settings: dict[str, float],
) -> dict[str, Tensor]:
    """Train one client with torch's own optimiser, the proximal term in the loss."""
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(
        model.parameters(),
        lr=TRAINING.learning_rate * settings.get("factor", 1.0),
        momentum=settings.get("beta", 0.0),
        weight_decay=settings.get("rate", 0.0),
    )
    rng.integers(2**63)
    for index in batches(len(labels), TRAINING, rng):
        loss = functional.cross_entropy(model(images[index]), labels[index])
        apart = sum((own - start[name]).square().sum() for name, own in model.named_parameters())
        optimiser.zero_grad()
        (loss + settings.get("mu", 0.0) / 2 * apart).backward()
        optimiser.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("trainer", ["reference", "channels_last", "stacked"])
@pytest.mark.parametrize("name", ["mlp", "cnn1"])
@pytest.mark.parametrize(
    ("rules", "settings"),
    [
        (lambda _: (Proximal(0.5),), {"mu": 0.5}),
        (lambda _: (Momentum(0.8),), {"beta": 0.8}),
        (lambda _: (WeightDecay(0.1),), {"rate": 0.1}),
        (lambda _: (WeightDecay(0.1), Momentum(0.8)), {"rate": 0.1, "beta": 0.8}),
        (lambda place: (Slower(0.1 + place),), {}),
    ],
    ids=["proximal", "momentum", "decay", "decay and momentum", "a number for each"],
)
def test_every_trainer_follows_a_rule_as_torch_does(
    name: str, trainer: str, rules: Callable[[int], tuple[Rule, ...]], settings: dict[str, float]
) -> None:
    model = build(name, (1, 28, 28), 10, seed=7)
    rng = np.random.default_rng(3)
    images = torch.from_numpy(rng.random((sum(COUNTS), 1, 28, 28), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, sum(COUNTS)))
    initial = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = {key: torch.stack([tensor + 0.01 * n for n in range(len(COUNTS))]) for key, tensor in initial.items()}
    local = [rules(place) for place in range(len(COUNTS))]
    clients, expected, first = [], [], 0
    for place, count in enumerate(COUNTS):
        own = slice(first, first + count)
        start = {key: stack[place] for key, stack in before.items()}
        factor = {"factor": local[place][0].factor} if isinstance(local[place][0], Slower) else {}
        expected.append(by_hand(model, start, images[own], labels[own], stream(0, place), settings | factor))
        clients.append(Local(first, count, stream(0, place), local[place]))
        first += count
    at = LocalRound(units(model), before, [{}] * len(COUNTS), {}, torch.ones(len(COUNTS)), TRAINING.learning_rate)
    train = make_trainer(model, units(model), trainer).train
    trained = train(before, Samples(images, labels), clients, TRAINING, start_rules(local, at))
    for place, after in enumerate(expected):
        for key, tensor in after.items():
            torch.testing.assert_close(trained.after[key][place], tensor, rtol=1e-4, atol=5e-6)


def models_of(strategy: Any, rounds: int = 2, **changes: Any) -> dict[str, Tensor]:
    with Simulation(build_world(experiment(**changes)), workers=1) as simulation:
        return dict(list(simulation.run(strategy, rounds))[-1].state.model)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_fedprox_with_mu_0_is_fedavg_and_a_larger_mu_stays_closer_to_the_start() -> None:
    plain = models_of(FedAvg())
    for name, tensor in models_of(FedProx(mu=0.0)).items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-5, atol=1e-6)
    start = {name: tensor.clone() for name, tensor in build("mlp", (1, 28, 28), 10, seed=0).state_dict().items()}
    far = [sum(float((m[n] - start[n]).norm()) for n in m) for m in (plain, models_of(FedProx(1.0)))]
    assert far[1] < 0.98 * far[0]


def test_fedprox_takes_part_and_bits_as_fedavg_does() -> None:
    left = models_of(FedProx(0.1, participation=0.5, value_bits=8))
    right = models_of(WithRules(FedAvg(0.5, 8), (Proximal(0.1),)))
    assert same(left, right)


def test_rules_leave_a_sub_model_a_sub_model() -> None:
    rules = (WeightDecay(0.1), Momentum(0.5), Proximal(0.1))
    assert not same(models_of(WithRules(HeteroFL(), rules)), models_of(HeteroFL()))


def test_what_a_train_function_is_told_names_the_rule() -> None:
    rules: Sequence[Rule] = (Proximal(0.3), Momentum(0.8), WeightDecay(0.01))
    assert [rule.config for rule in rules] == [{"proximal-mu": 0.3}, {"momentum": 0.8}, {"weight-decay": 0.01}]


def strategy_with(local: Any, name: str = "fedavg", **more: Any) -> Any:
    return parse_experiment({"strategy": [{"name": name, "local": local, **more}]})


def test_any_strategy_takes_rules_from_its_toml_and_gives_them_back() -> None:
    given = tomllib.loads(
        """
        [[strategy]]
        name = "fedavg"
        participation = 0.5
        local = [{ name = "weight-decay" }, { name = "momentum", beta = 0.5 },
                 { name = "test_local_rules:Slower", factor = 0.5 }]
        """
    )
    found = parse_experiment(given)
    assert parse_experiment(tomllib.loads(found.to_toml())) == found
    assert "rate = 0.0001" in found.to_toml()
    assert found.import_paths == ["test_local_rules:Slower"]
    built: Any = found.strategy[0].build()
    assert built.method == FedAvg(0.5)
    assert built.rules[:2] == (WeightDecay(1e-4), Momentum(0.5))
    assert type(built.rules[2]).__name__ == "Slower"


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ([{"name": "momentun"}], "unknown rule 'momentun'; did you mean 'momentum'?"),
        ([{"name": "momentum", "beat": 0.5}], "unknown key beat; did you mean 'beta'?"),
        ([{"name": "momentum", "beta": 1.0}], "beta must lie at 0 or above and below 1"),
        ([{"name": "weight-decay", "rate": -1}], "rate must be finite and at least 0"),
        ([{"name": "proximal", "mu": "much"}], "mu: should be a valid number"),
        ("momentum", "local takes rules with their names"),
        ([{"name": ["a:b"]}], "local takes rules with their names"),
        ([{"name": "feddd:FedAvg"}], "'feddd:FedAvg' makes a FedAvg, not a rule of local training"),
        ([{"beta": 0.5}], "local takes rules with their names"),
        ([{"name": "test_local_rules:Slower", "speed": 1}], "rule 'test_local_rules:Slower' cannot be made"),
    ],
)
def test_a_wrong_rule_is_one_line_that_says_what_would_be_right(local: Any, expected: str) -> None:
    with pytest.raises((InputError, ValueError)) as caught:
        strategy_with(local).strategy[0].build()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_rule_twice_is_refused() -> None:
    with pytest.raises(InputError, match="client 0 for Proximal beside another Proximal"):
        models_of(WithRules(FedProx(), (Proximal(1.0),)))
