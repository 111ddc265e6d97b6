"""What [training] says about steps: every optimiser against torch's own, in every trainer; what is refused; rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from feddd import FedAvg, InputError, load_experiment
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.experiments.cells import cells
from feddd.experiments.config import Experiment, parse_experiment
from feddd.experiments.running import build_world, run
from feddd.simulation.optimizers import check_optimizer, training_rules
from feddd.simulation.simulator import Simulation
from feddd.simulation.trainers import make_trainer
from feddd.simulation.training import Local, Samples, Training, batches
from feddd.strategies.fedprox import FedProx, Proximal
from feddd.strategies.heterofl import HeteroFL
from feddd.strategies.scaffold import SCAFFOLD
from feddd.wire.local import LocalRound, Rule, Scaler, start_rules
from feddd.world.models import build
from test_flower import grid_of, initial, strategy_of
from worlds import experiment

COUNTS = (45, 7, 70, 33)
CLOSE = 2e-5
"""A thousandth of a step of Adam, which makes whole steps of what is left where gradient and decay cancel out."""
PLAIN: dict[str, Any] = {"epochs": 2, "batch_size": 16, "learning_rate": 0.02}

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum and decay": (
        {"momentum": 0.9, "weight_decay": 0.01},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adam and decay": (
        {"optimizer": "adam", "weight_decay": 0.1},
        lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.1),
    ),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
    "clipped": ({"max_gradient_norm": 0.3}, torch.optim.SGD),
    "clipped adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1, "max_gradient_norm": 0.3},
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    ),
    "import path": ({"optimizer": "torch.optim:RMSprop"}, torch.optim.RMSprop),
}


class Gated(nn.Module):
    """A frozen layer, a layer that the loss never sees, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(12, 9), nn.Linear(9, 4)
        self.unused, self.rare = nn.Linear(3, 3), nn.Linear(9, 9)
        self.base.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(inputs.flatten(1)))
        if float(inputs[0].sum()) > 6.0:
            hidden = hidden + self.rare(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def by_hand(
    model: nn.Module,
    start: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
    training: Training,
    optimiser_of: Any,
    mu: float = 0.0,
) -> dict[str, Tensor]:
    """Train one client as a torch script would: the proximal term in the loss, clipping, then the optimiser."""
    model.load_state_dict(start)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = optimiser_of(learnt, training.learning_rate)
    rng.integers(2**63)
    for index in batches(len(labels), training, rng):
        loss = functional.cross_entropy(model(images[index]), labels[index])
        apart = sum((own - start[name]).square().sum() for name, own in model.named_parameters())
        optimiser.zero_grad()
        (loss + mu / 2 * apart if mu else loss).backward()
        if training.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(learnt, training.max_gradient_norm)
        optimiser.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained_both_ways(
    model: nn.Module, trainer: str, training: Training, optimiser_of: Any, rules: tuple[Rule, ...] = (), mu: float = 0.0
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Give every client's model, by the trainer and by hand; clients start from different weights."""
    shape = (12,) if isinstance(model, Gated) else (1, 28, 28)
    model, table = model.double(), units(model)
    rng = np.random.default_rng(3)
    images = torch.from_numpy(rng.random((sum(COUNTS), *shape)))
    labels = torch.from_numpy(rng.integers(0, 4, sum(COUNTS)))
    initial = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    learnt = [slot.name for slot in table.slots]
    before = {key: torch.stack([initial[key] + 0.01 * n for n in range(len(COUNTS))]) for key in learnt}
    clients, expected, first = [], [], 0
    for place, count in enumerate(COUNTS):
        own = slice(first, first + count)
        start = initial | {key: stack[place] for key, stack in before.items()}
        expected.append(by_hand(model, start, images[own], labels[own], stream(0, place), training, optimiser_of, mu))
        clients.append(Local(first, count, stream(0, place), rules))
        first += count
    model.load_state_dict(initial)
    model = model.float() if trainer == "stacked" else model  # it takes no other models; its sums stay double
    steps = torch.tensor([training.epochs * -(-count // training.batch_size) for count in COUNTS])
    at = LocalRound(table, before, [{}] * len(COUNTS), {}, steps, training.learning_rate)
    stepping = start_rules([rules + training_rules(training)] * len(COUNTS), at)
    found = make_trainer(model, table, trainer).train(before, Samples(images, labels), clients, training, stepping)
    return [({key: found.after[key][n] for key in learnt}, expected[n]) for n in range(len(COUNTS))]


IN_TRAINERS = [
    (which, trainer)
    for which in OPTIMIZERS
    for trainer in ("reference", "channels_last", "stacked")
    if which != "import path" or trainer != "stacked"  # it takes one client at a time
]


@pytest.mark.parametrize(("which", "trainer"), IN_TRAINERS)
@pytest.mark.parametrize("name", ["mlp", "cnn1"])
def test_every_optimizer_takes_the_steps_of_torch(which, name, trainer):
    settings, optimiser_of = OPTIMIZERS[which]
    training = Training(**PLAIN, **settings)
    for found, expected in trained_both_ways(build(name, (1, 28, 28), 10, seed=7), trainer, training, optimiser_of):
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=CLOSE)


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_frozen_and_unused_parameters_stay_and_rarely_used_ones_count_their_own_steps(which):
    settings, optimiser_of = OPTIMIZERS[which]
    training, model = Training(**PLAIN, **settings), Gated()
    initial = {key: tensor.double() for key, tensor in model.state_dict().items()}
    for place, (found, expected) in enumerate(trained_both_ways(model, "reference", training, optimiser_of)):
        assert "base.weight" not in found
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-9)
        assert torch.equal(found["unused.weight"], initial["unused.weight"] + 0.01 * place)


@pytest.mark.parametrize(("which", "trainer"), IN_TRAINERS)
def test_a_proximal_term_changes_the_gradient_before_the_optimizer(which, trainer):
    settings, optimiser_of = OPTIMIZERS[which]
    training, rules = Training(**PLAIN, **settings), (Proximal(0.5),)
    model = build("mlp", (1, 28, 28), 10, seed=7)
    for found, expected in trained_both_ways(model, trainer, training, optimiser_of, rules, mu=0.5):
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=CLOSE)


@pytest.mark.parametrize("trainer", ["reference", "stacked"])
def test_adam_follows_the_gradients_of_a_scaled_network(trainer):
    class Halved(nn.Module):
        """The hidden layers' outputs over two, as the scaler has it."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = build("mlp", (1, 28, 28), 10, seed=7)[1::2]  # type: ignore[index]

        def forward(self, images: Tensor) -> Tensor:
            hidden = (self.fc1(images.flatten(1)) / 2).relu()
            return self.fc3((self.fc2(hidden) / 2).relu())  # type: ignore[no-any-return]

    settings, optimiser_of = OPTIMIZERS["adam"]
    training = Training(**PLAIN, **settings)
    plain = build("mlp", (1, 28, 28), 10, seed=7)
    scaled = trained_both_ways(plain, trainer, training, optimiser_of, (Scaler(2.0),))
    halved = trained_both_ways(Halved(), "reference", training, optimiser_of)
    for (found, _), (_, expected) in zip(scaled, halved, strict=True):
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=CLOSE)


def test_plain_sgd_has_no_rules_at_all():
    assert training_rules(Training()) == ()


def test_the_rate_of_a_round_follows_the_table_and_the_factor():
    training = Training(learning_rate=0.1, learning_rate_later=((3, 0.05), (5, 0.01)))
    assert [training.in_round(n).learning_rate for n in range(1, 7)] == [0.1, 0.1, 0.05, 0.05, 0.01, 0.01]
    falling = Training(learning_rate=0.1, learning_rate_decay=0.5)
    assert [falling.in_round(n).learning_rate for n in (1, 2, 4)] == [0.1, 0.05, 0.0125]
    assert Training(learning_rate=0.3).in_round(77) == Training(learning_rate=0.3)


def records(strategy: Any = None, rounds: int = 3, **training: Any) -> list[Any]:
    world = build_world(experiment(training=training))
    with Simulation(world, workers=1) as simulation:
        return list(simulation.run(strategy or FedAvg(), rounds))


def test_a_later_rate_changes_nothing_before_its_round_and_something_from_it_on():
    plain, later = records(), records(learning_rate_later=[[3, 0.001]])
    for key, tensor in plain[1].state.model.items():
        assert torch.equal(tensor, later[1].state.model[key])
    moved = [
        sum(float((run[2].state.model[key] - run[1].state.model[key]).norm()) for key in run[2].state.model)
        for run in (plain, later)
    ]
    assert moved[1] < 0.1 * moved[0]


@pytest.mark.parametrize("strategy", [FedAvg(), FedProx(0.1), HeteroFL()])
def test_rounds_by_adam_learn_with_other_rules_beside(strategy):
    losses = [row.evaluation.loss for row in records(strategy, 4, optimizer="adam", learning_rate=0.0005)]
    assert losses[-1] < losses[0]


def test_local_state_starts_afresh_each_round():
    # Two rounds of momentum are one round, and one more from its model: nothing is left of the first one's speed.
    both = records(rounds=2, momentum=0.9)
    world = build_world(experiment(training={"momentum": 0.9}))
    with Simulation(world, workers=1) as simulation:
        first = next(iter(simulation.run(FedAvg(), 2)))
        kept = simulation.snapshot(first, [])
    with Simulation(world, workers=1) as simulation:
        (second,) = simulation.run(FedAvg(), 2, after=kept)
    assert all(torch.equal(tensor, second.state.model[key]) for key, tensor in both[1].state.model.items())


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "adam"}, {"momentum": 0.5}, {"max_gradient_norm": 1.0}, {"optimizer": "torch.optim:RMSprop"}],
)
def test_scaffold_refuses_every_step_but_plain_ones(settings):
    with pytest.raises(InputError, match="asks client 0 for ControlVariates beside"):
        records(SCAFFOLD(), 1, **settings)


WRONG = [
    ({"optimizer": "adamm"}, "training.optimizer: unknown optimizer 'adamm'; did you mean 'adam'"),
    ({"optimizer": "adam", "momentum": 0.9}, "momentum belongs to optimizer \"sgd\", not to 'adam'"),
    ({"optimizer": "torch.optim:SGD", "weight_decay": 0.1}, "weight_decay belongs to sgd, adam, adamw"),
    ({"momentum": 1.0}, "training.momentum: should be less than 1, not 1.0"),
    ({"weight_decay": -0.1}, "training.weight_decay: should be greater than or equal to 0, not -0.1"),
    ({"max_gradient_norm": 0.0}, "training.max_gradient_norm: should be greater than 0, not 0.0"),
    ({"learning_rate_later": [[5, 0.1], [3, 0.2]]}, "[round, rate] pairs with rounds that go up from 2"),
    ({"learning_rate_later": [[1, 0.1]]}, "[round, rate] pairs with rounds that go up from 2"),
    ({"learning_rate_decay": 1.5}, "training.learning_rate_decay: should be less than or equal to 1"),
]


@pytest.mark.parametrize(("settings", "expected"), WRONG)
def test_wrong_settings_are_one_line(settings, expected):
    with pytest.raises(InputError) as caught:
        parse_experiment({"training": settings})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def not_an_optimizer(parameters: Any, lr: float) -> int:
    return 3


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("test_optimizers:not_an_optimizer", "makes a int, not a torch.optim.Optimizer"),
        ("test_optimizers:nothing", "cannot import 'test_optimizers:nothing'"),
        ("torch.optim:LBFGS", "must take (parameters, lr) and step without more"),
        ("torch:zeros", "must take (parameters, lr) and step without more"),
    ],
)
def test_an_optimizer_of_ones_own_that_does_not_fit_is_one_line(path, expected):
    with pytest.raises(InputError) as caught:
        check_optimizer(Training(optimizer=path))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_ones_own_trains_one_client_at_a_time(caplog):
    world = build_world(experiment(training={"optimizer": "torch.optim:RMSprop", "learning_rate": 0.001}))
    assert world.training.trainer == "reference"
    assert "takes one client at a time" in caplog.text
    with pytest.raises(InputError, match="takes one client at a time"):
        build_world(experiment(training={"optimizer": "torch.optim:RMSprop", "trainer": "stacked"}))


def sized(hidden: int = 3, depth: int = 1) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), *[nn.ReLU()] * depth, nn.Linear(hidden, 10))


def test_a_model_gets_its_arguments_in_the_simulator_and_in_workers(tmp_path):
    mine = experiment(model={"name": "test_optimizers:sized", "arguments": {"hidden": 5}}, rounds=1)
    assert build_world(mine).build_model()[1].out_features == 5  # type: ignore[index]
    results = run(mine, tmp_path / "run", workers=2)
    assert load_experiment(tmp_path / "run" / "config.toml").model.arguments == {"hidden": 5}
    assert results.tables["rounds"].num_rows


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "test_optimizers:sized", "arguments": {"hiden": 5}}, "unexpected keyword argument 'hiden'; it takes"),
        ({"name": "test_optimizers:by_hand"}, "must be callable without arguments: missing a required argument"),
        ({"name": "mlp", "arguments": {"hidden": 5}}, "arguments belong to a model by package.module:function"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(model, expected):
    with pytest.raises(InputError) as caught:
        build_world(experiment(model=model))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kept_cells_are_found_under_the_names_they_had_before_there_were_optimizers():
    plain = parse_experiment({"data": {"dataset": "fashion-mnist-mini"}})
    assert [cell.folder for cell in cells(plain, [0])][:2] == [
        "fashion-mnist-mini-noniid-b-mlp/feddd-seed-0-92e7e5c6a86c",
        "fashion-mnist-mini-noniid-b-mlp/fedavg-seed-0-f3cc81f6dd74",
    ]
    spelt_out = plain.model_copy(update={"training": plain.training.model_copy(update={"optimizer": "sgd"})})
    assert [cell.folder for cell in cells(spelt_out, [0])] == [cell.folder for cell in cells(plain, [0])]
    other = parse_experiment({"data": {"dataset": "fashion-mnist-mini"}, "training": {"optimizer": "adam"}})
    assert not {cell.folder for cell in cells(other, [0])} & {cell.folder for cell in cells(plain, [0])}


def test_an_experiment_with_everything_is_equal_to_its_toml_after_a_round_trip(tmp_path):
    full = experiment(
        training={
            **{"optimizer": "adamw", "weight_decay": 0.1, "max_gradient_norm": 2.0, "learning_rate_decay": 0.99},
            **{"learning_rate_later": [[3, 0.01], [4, 0.001]]},
        },
        model={"name": "test_optimizers:sized", "arguments": {"hidden": 4, "depth": 2}},
    )
    (tmp_path / "full.toml").write_text(full.to_toml())
    assert load_experiment(tmp_path / "full.toml") == full
    assert isinstance(full, Experiment)


def test_a_deployment_of_an_experiment_takes_the_same_steps(tmp_path):
    changing = {"learning_rate_decay": 0.5, "max_gradient_norm": 1.0, "trainer": "reference"}
    world = build_world(experiment(fleet={"clients": 6}, training={"momentum": 0.9, "weight_decay": 0.01, **changing}))
    with Simulation(world, workers=1) as simulation:
        *_, last = simulation.run(FedAvg(), 3)
    result = strategy_of(world, FedAvg(), []).start(grid_of(world, tmp_path), initial(world), 3)
    for key, tensor in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, last.state.model[key], rtol=1e-5, atol=1e-6)
