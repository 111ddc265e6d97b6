"""Stacks of clients by autograd: the same models as one client at a time, and which models get them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddd import FedAvg, FedDD, InputError
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.experiments.running import build_world
from feddd.simulation.batched import batch_trainer
from feddd.simulation.optimizers import training_rules
from feddd.simulation.simulator import Simulation
from feddd.simulation.trainers import choose_trainer, make_trainer
from feddd.simulation.training import Local, Samples, Training
from feddd.strategies.fedprox import Proximal
from feddd.wire.local import LocalRound, Rule, Scaler, start_rules
from worlds import experiment

COUNTS = (45, 7, 70, 33)


class Residual(nn.Module):
    """A forward of its own, a frozen layer, and one that the loss never sees."""

    def __init__(self, features: int = 12) -> None:
        super().__init__()
        self.base, self.norm, self.one = nn.Linear(features, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(16, 4)
        self.base.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(inputs.flatten(1)))
        return self.head(hidden + nn.functional.gelu(self.one(self.norm(hidden))))  # type: ignore[no-any-return]


class TwoInputs(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(9, 5), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words).mean(1) + self.numbers(numbers)))  # type: ignore[no-any-return]


def plain_tanh() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))


def mean_of_the_batch() -> nn.Module:
    class Centred(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs - inputs.mean(0)

    return nn.Sequential(nn.Flatten(), Centred(), nn.Linear(784, 10))


def tanh_pictures() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Tanh(), nn.Linear(20, 10))


def noise_pictures() -> nn.Module:
    class Noise(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + 0.1 * torch.randn_like(inputs)

    return nn.Sequential(nn.Flatten(), Noise(), nn.Linear(784, 10))


def both_ways(
    model: nn.Module, training: Training, rules: tuple[Rule, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give all clients' models, by stacks and one by one; also check that their losses agree."""
    model, table = model.double(), units(model)
    rng = np.random.default_rng(3)
    samples = Samples(
        torch.from_numpy(rng.random((sum(COUNTS), 12))), torch.from_numpy(rng.integers(0, 4, sum(COUNTS)))
    )
    tensors = model.state_dict()
    before = {s.name: torch.stack([tensors[s.name] + 0.01 * n for n in range(len(COUNTS))]) for s in table.slots}
    given = {name: own.clone() for name, own in before.items()}
    runs = []
    for train in (batch_trainer(model, table), make_trainer(model, table, "reference").train):
        firsts = np.cumsum((0, *COUNTS[:-1])).tolist()
        own = [Local(first, count, stream(0, first), rules) for first, count in zip(firsts, COUNTS, strict=True)]
        at = LocalRound(table, before, [{}] * len(COUNTS), {}, torch.ones(len(COUNTS)), training.learning_rate)
        stepping = start_rules([rules + training_rules(training)] * len(COUNTS), at)
        runs.append(train(before, samples, own, training, stepping))
    assert all(torch.equal(before[name], given[name]) for name in given)
    np.testing.assert_allclose(runs[0].mean_loss, runs[1].mean_loss, rtol=1e-6)
    np.testing.assert_allclose(runs[0].oort_statistic, runs[1].oort_statistic, rtol=1e-6)
    return runs[0].after, runs[1].after


@pytest.mark.parametrize("make", [plain_tanh, Residual])
@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({}, ()),
        ({"momentum": 0.9, "weight_decay": 0.01}, ()),
        ({"optimizer": "adamw", "weight_decay": 0.1, "max_gradient_norm": 0.3}, ()),
        ({}, (Proximal(0.5),)),
        ({"optimizer": "adam"}, (Scaler(2.0), Proximal(0.5))),
    ],
)
def test_stacks_train_every_client_as_if_it_were_alone(make, settings, rules):
    training = Training(epochs=2, batch_size=16, learning_rate=0.05, **settings)
    found, expected = both_ways(make(), training, rules)
    assert set(found) == set(expected)
    for name, own in expected.items():
        torch.testing.assert_close(found[name], own, rtol=1e-5, atol=1e-6)


def test_inputs_by_name_reach_the_model_by_name():
    model = TwoInputs()
    table, rng = units(model), np.random.default_rng(0)
    words, numbers = torch.from_numpy(rng.integers(0, 9, (40, 6))), torch.randn(40, 3)
    labels = torch.from_numpy(rng.integers(0, 4, 40))
    samples = Samples({"words": words, "numbers": numbers}, labels)
    before = {slot.name: torch.stack([model.state_dict()[slot.name]] * 2) for slot in table.slots}
    clients = [Local(0, 25, stream(0, 0)), Local(25, 15, stream(0, 1))]
    training = Training(batch_size=10, learning_rate=0.1)
    found = batch_trainer(model, table)(before, samples, clients, training)
    start = {name: own[1] for name, own in before.items()}
    model.load_state_dict(start)
    rng = stream(0, 1)
    rng.integers(2**63)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for index in torch.from_numpy(rng.permutation(15) + 25).split(10):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(words=words[index], numbers=numbers[index]), labels[index]).backward()
        optimiser.step()
    for name, own in model.state_dict().items():
        torch.testing.assert_close(found.after[name][1], own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "trainer", "reason"),
    [
        (plain_tanh, "batched", "is a Tanh"),
        (Residual, "batched", "it is a Residual"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10)),
            "reference",
            "79,510",
        ),
        (lambda: nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)), "reference", "module '0' is a LSTM"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)), "reference", "is a Dropout"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), "reference", "is a BatchNorm1d"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.Tanh(), nn.Flatten()), "channels_last", "is a Tanh"),
    ],
)
def test_which_models_get_stacks_is_a_rule_on_their_layers(make, trainer, reason):
    choice = choose_trainer(make())
    assert choice.name == trainer
    assert reason in choice.reason


def own(name: str, **training: object) -> object:
    return build_world(experiment(model={"name": f"test_batched:{name}"}, training=training))


def test_a_round_is_the_same_by_stacks_and_one_by_one_and_with_any_number_of_workers():
    models = []
    for trainer, workers in (("auto", 1), ("auto", 2), ("reference", 1)):
        world = own("tanh_pictures", trainer=trainer)
        assert world.training.trainer == ("batched" if trainer == "auto" else "reference")
        with Simulation(world, workers=workers) as simulation:
            *_, last = simulation.run(FedDD(broadcast_every=2), 3)
        models.append(last.state.model)
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name])
        torch.testing.assert_close(tensor, models[2][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mean_of_the_batch", "it trains '2.weight' otherwise than autograd does"),
        ("noise_pictures", "it fails with vmap: called random"),
    ],
)
def test_a_model_that_stacks_would_train_otherwise_takes_one_client_at_a_time(name, reason, caplog):
    world = own(name)
    assert world.training.trainer == "reference"
    assert f'with "batched" {reason}' in caplog.text
    with Simulation(world, workers=1) as simulation:
        (record,) = simulation.run(FedAvg(), 1)
    assert record.evaluation is not None
    with pytest.raises(InputError, match='trainer "batched" does not fit this model'):
        own(name, trainer="batched")
