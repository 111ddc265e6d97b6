"""A trainer never trains another model than the user's: what is not exactly a plain chain goes through autograd."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import feddd
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.errors import InputError
from feddd.experiments.running import build_world
from feddd.simulation import proof
from feddd.simulation.proof import Trial, disagreement, settle_trainer
from feddd.simulation.simulator import Simulation
from feddd.simulation.stacked import is_chain
from feddd.simulation.trainers import make_trainer
from feddd.simulation.training import Local, Samples, Training
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.feddd import FedDD
from own_models import NOT_PLAIN, plain_with_odd_settings
from worlds import experiment


def own_experiment(model: str, **training: Any) -> Any:
    return experiment(
        rounds=2,
        data={"train_limit": 160},
        fleet={"clients": 4},
        model={"name": f"own_models:{model}"},
        training=training,
    )


def last_model(one: Any, strategy: Any = None) -> dict[str, torch.Tensor]:
    with Simulation(build_world(one), workers=1) as simulation:
        *_, record = simulation.run(strategy or FedAvg(), 2)
    return dict(record.state.model)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_model_that_is_no_plain_chain_is_trained_as_autograd_trains_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = last_model(own_experiment(name))
    (line,) = [record.getMessage() for record in caplog.records]
    assert NOT_PLAIN[name][1] in line or "with " in line
    assert "own_models:" in line
    assert "autograd" in line
    expected = last_model(own_experiment(name, trainer="reference"))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_stacked_by_name_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match=r"training.trainer, model 'own_models:.*does not fit") as caught:
        build_world(own_experiment(name, trainer="stacked"))
    assert NOT_PLAIN[name][1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_with_settings_that_are_implemented_are_stacked() -> None:
    model = plain_with_odd_settings()
    assert is_chain(model)
    world = build_world(own_experiment("plain_with_odd_settings"))
    assert world.training.trainer == "stacked"
    found, expected = (
        last_model(own_experiment("plain_with_odd_settings", trainer=trainer)) for trainer in ("auto", "reference")
    )
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_view_that_needs_channels_first_falls_back_to_the_plain_layout(caplog: pytest.LogCaptureFixture) -> None:
    assert build_world(own_experiment("KeepsItsMode")).training.trainer == "reference"
    assert 'with "channels_last" it fails' in caplog.text


@pytest.mark.parametrize("name", ["evaluation_mode", "KeepsItsMode"])
def test_a_layer_in_evaluation_mode_stays_there_though_the_model_is_evaluated(name: str) -> None:
    world = build_world(own_experiment(name))
    with Simulation(world, workers=1) as simulation:
        *_, record = simulation.run(FedAvg(), 3)
        (running,) = [key for key in record.state.model if key.endswith("running_mean")]
        assert torch.equal(record.state.model[running], torch.zeros(4))
        moved = [key for key, tensor in record.state.model.items() if not torch.equal(tensor, simulation.initial[key])]
    assert "head.weight" in moved or "5.weight" in moved


def test_the_choice_is_recorded_and_not_made_again_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        feddd.run(own_experiment("plain_with_odd_settings"), tmp_path / "run", workers=1, watch=stop)
    assert 'trainer = "stacked"' in (tmp_path / "run" / "config.toml").read_text()
    monkeypatch.setattr(proof, "disagreement", lambda *_: pytest.fail("tried again"))
    assert feddd.resume(tmp_path / "run", workers=1).labels


def test_a_trainer_that_disagrees_falls_back_by_default_and_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from feddd.simulation.layers import StackedReLU

    right = StackedReLU.backward
    monkeypatch.setattr(StackedReLU, "backward", lambda *given, **named: right(*given, **named) * 1.01)
    assert build_world(experiment()).training.trainer == "reference"
    assert "otherwise than autograd" in caplog.text
    with pytest.raises(InputError, match="does not fit this model: it trains"):
        build_world(experiment(training={"trainer": "stacked"}))


def test_only_trained_parameters_travel_count_and_cost() -> None:
    whole, some = (own_experiment(name) for name in ("plain_with_odd_settings", "frozen_first_layer"))
    with Simulation(build_world(some), workers=2) as simulation:
        *_, record = simulation.run(FedDD(broadcast_every=2), 3)
        table = simulation.units
        assert [slot.name for slot in table.slots] == ["two.weight", "two.bias"]
        assert table.frozen == ("one.weight", "one.bias")
        for name in table.frozen:
            assert torch.equal(record.state.model[name], simulation.initial[name])
        assert not torch.equal(record.state.model["two.weight"], simulation.initial["two.weight"])
        assert simulation.fleet.droppable_bits[0] == 32 * (24 * 10 + 10)
        assert max(row.upload.upload_bytes for row in record.clients) < 4 * 250 + 64
    with Simulation(build_world(whole), workers=1) as simulation:
        assert simulation.units.frozen == ()


def test_workers_train_on_the_frozen_values_that_the_model_was_made_with() -> None:
    changed = {}
    for seed in (0, 7):
        one = own_experiment("frozen_first_layer").model_copy(update={"seed": seed})
        with Simulation(build_world(one), workers=1) as simulation:
            *_, record = simulation.run(FedAvg(), 1)
            changed[seed] = record.evaluation.loss
            # The oracle: one client after the other in plain torch.
            world, numerator = simulation.world, 0.0
            for client, part in enumerate(world.parts):
                module = NOT_PLAIN["frozen_first_layer"][0]()
                module.load_state_dict(simulation.initial)
                numerator += len(part) * _by_optimiser(module, world, client).state_dict()["two.weight"]
            mean = numerator / sum(len(part) for part in world.parts)
        torch.testing.assert_close(record.state.model["two.weight"], mean, rtol=1e-4, atol=1e-5)
    assert changed[0] != changed[7]


def _by_optimiser(module: nn.Module, world: Any, client: int) -> nn.Module:
    from feddd.simulation.training import batches

    data, part = world.dataset, world.parts[client]
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=world.training.learning_rate)
    rng = stream(world.seed, "batches", 1, client)
    rng.integers(2**63)
    for index in batches(len(part), world.training, rng):
        chosen = part[index]
        images = torch.from_numpy(data.inputs(data.train_images[chosen]))
        loss = nn.functional.cross_entropy(module(images), torch.from_numpy(data.train_labels[chosen]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return module


def test_a_model_with_nothing_to_train_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        units(nn.Linear(2, 2).requires_grad_(False))
    assert len(units(nn.Linear(2, 2).requires_grad_(False).state_dict()).slots) == 2  # a bare state_dict cannot know
    with pytest.raises(InputError, match="nothing to train"):
        build_world(experiment(model={"name": "test_own_models:all_frozen"}))


def all_frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).requires_grad_(False)


def test_normalisation_buffers_keep_their_rule_though_their_weights_are_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    model[1].requires_grad_(False)
    (layer,) = units(model).layers
    assert [slot.name for slot in layer.slots] == ["0.weight", "0.bias", "1.running_mean", "1.running_var"]
    assert units(model).frozen == ("1.weight", "1.bias")


# Random small modules


@st.composite
def small_models(draw: st.DrawFn) -> nn.Module:
    """Convolutions and linear layers in a row; sometimes a subclass, an odd setting, a reused, frozen or hooked one."""

    class Scaled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * 1.5

    torch.manual_seed(draw(st.integers(0, 99)))
    layers: list[nn.Module] = []
    side, channels = 10, 2
    for _ in range(draw(st.integers(0, 2))):
        if side < 3:
            break
        outputs = draw(st.integers(2, 4))
        stride, padding = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([0, 1]))
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect"])) if padding else "zeros"
        layers += [nn.Conv2d(channels, outputs, 3, stride=stride, padding=padding, padding_mode=mode), nn.ReLU()]
        side, channels = (side + 2 * padding - 3) // stride + 1, outputs
        if side >= 4 and draw(st.booleans()):
            up = draw(st.booleans())
            layers.append(nn.MaxPool2d(2, ceil_mode=up))
            side = -(-side // 2) if up else side // 2
    layers.append(nn.Flatten())
    inputs, linear = channels * side * side, draw(st.sampled_from([nn.Linear, nn.Linear, nn.Linear, Scaled]))
    relu = nn.ReLU() if draw(st.booleans()) else None
    for _ in range(draw(st.integers(0, 2))):
        layers += [linear(inputs, 6), relu or nn.ReLU()]
        inputs = 6
    layers.append(nn.Linear(inputs, 3, bias=draw(st.integers(0, 4)) > 0))
    model = nn.Sequential(*layers)
    trained = [layer for layer in model if isinstance(layer, nn.Linear | nn.Conv2d)]
    chosen = draw(st.sampled_from(trained))
    trick = draw(st.sampled_from(["", "", "", "freeze", "hook", "pre-hook", "double", "eval"]))
    if trick == "freeze" and len(trained) > 1:
        chosen.requires_grad_(False)
    elif trick == "hook":
        chosen.register_forward_hook(lambda _, __, outputs: outputs * 0.5)
    elif trick == "pre-hook":
        chosen.register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
    elif trick == "double":
        model.double()
    elif trick == "eval":
        chosen.eval()
    return model


def toy_data() -> Any:
    from feddd.world.datasets import ImageDataset

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 2, 10, 10), dtype=np.uint8)
    labels = rng.integers(0, 3, 24)
    return ImageDataset(images, labels, images[:2], labels[:2], classes=3, mean=(0.0, 0.0), deviation=(1.0, 1.0))


@settings(max_examples=60, deadline=None)
@given(small_models())
def test_whatever_trainer_a_random_model_gets_it_agrees_with_autograd(model: nn.Module) -> None:
    if next(model.parameters()).dtype == torch.float64:
        assert not is_chain(model)
        return
    data, training = toy_data(), Training(batch_size=8, learning_rate=0.05, trainer="auto")

    def build() -> nn.Module:
        return copy.deepcopy(model)

    trial = Trial(build, data, np.arange(24))
    settled, reason = settle_trainer(build(), training, trial)
    assert bool(reason) == (settled.trainer != "stacked")
    if settled.trainer != "reference":
        assert disagreement(trial, settled) is None
    # Without the trial the rule alone must be right as well.
    alone, _ = settle_trainer(build(), training, None)
    if alone.trainer == "stacked":
        assert settled.trainer == "stacked"
    images = torch.from_numpy(data.train_images).float() / 255
    samples = Samples(images, torch.from_numpy(data.train_labels))
    results = []
    for trainer in (settled.trainer, "reference"):
        module = build()
        before = {slot.name: module.state_dict()[slot.name].clone()[None] for slot in units(module).slots}
        local = [Local(0, 24, stream(0, "x"))]
        results.append(make_trainer(module, units(module), trainer).train(before, samples, local, training).after)
    for name, tensor in results[1].items():
        torch.testing.assert_close(results[0][name], tensor, rtol=1e-3, atol=1e-5)
