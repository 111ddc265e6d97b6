"""HeteroFL, FjORD, FedRolex and Federated Dropout: the published units, blocks on the wire, a mean by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import feddd
from feddd.core.aggregation import Aggregator, add_sums
from feddd.core.units import Mask, Params, Units, units
from feddd.errors import InputError
from feddd.experiments.methods import construct
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.simulation.trainers import make_trainer
from feddd.simulation.training import Local, Samples, Training, train
from feddd.strategies.checks import Limits, Refused, read_upload
from feddd.strategies.federated_dropout import FederatedDropout
from feddd.strategies.fedrolex import FedRolex
from feddd.strategies.fjord import FjORD
from feddd.strategies.heterofl import HeteroFL
from feddd.strategies.protocol import Fleet, Plan, ServerState, Task, make_fleet, start
from feddd.wire.blocks import block_elements, element_masks
from feddd.wire.chosen import ChosenBlocks, one
from feddd.wire.down import SubModel
from feddd.wire.exchange import chain, encode, write
from feddd.wire.format import PayloadError, pack_mask, unpack_mask
from feddd.wire.local import Scaler as HiddenScaler
from feddd.wire.select import Blocks
from feddd.wire.stage import At, Known
from feddd.world import models
from worlds import experiment

METHODS: dict[str, Any] = {
    "heterofl": HeteroFL(),
    "fjord": FjORD(greatest="capacity"),
    "fedrolex": FedRolex(assignment="round-robin"),
    "federated-dropout": FederatedDropout(0.5, scale=True, participation=0.5),
}


def network(channels: bool) -> nn.Sequential:
    """With 3-4-5 units below the output; with channels, two of them are convolutions."""
    torch.manual_seed(0)
    if not channels:
        layers = (nn.Flatten(), nn.Linear(36, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(5, 2))
    convolutions = (nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 2))


def narrowed(wide: nn.Sequential, mask: Mask, table: Units) -> nn.Sequential:
    """The sub-model as a network of its own, layer by layer."""
    layers: list[nn.Module] = []
    inputs: Tensor | None = None
    for name, module in wide.named_children():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            layers.append(module)
            continue
        weight = module.weight.detach()[mask[name]]
        if inputs is not None:
            weight = weight[:, inputs.repeat_interleave(weight.shape[1] // len(inputs))]
        small: nn.Linear | nn.Conv2d
        if isinstance(module, nn.Linear):
            small = nn.Linear(weight.shape[1], weight.shape[0])
        else:
            small = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
        small.load_state_dict({"weight": weight, "bias": module.bias.detach()[mask[name]]})  # type: ignore[index]
        layers.append(small)
        inputs = mask[name]
    return nn.Sequential(*layers)


def some_mask(table: Units, seed: int) -> Mask:
    rng = np.random.default_rng(seed)
    mask = {layer.name: torch.from_numpy(rng.random(layer.units) < 0.6) for layer in table.layers}
    for layer in table.layers:
        mask[layer.name][int(rng.integers(layer.units))] = True
    return mask | {table.layers[-1].name: torch.ones(table.layers[-1].units, dtype=torch.bool)}


class Scaler(nn.Module):
    """HeteroFL's, as published."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / self.width


@pytest.mark.parametrize("trainer", ["reference", "stacked"])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("seed", "width"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.3)])
def test_training_inside_the_full_model_is_training_the_small_network(
    channels: bool, seed: int, width: float, trainer: str
) -> None:
    wide = network(channels)
    table = units(wide)
    mask = some_mask(table, seed)
    small = narrowed(wide, mask, table)
    layers = list(small)
    for place in [at for at, layer in enumerate(layers) if isinstance(layer, nn.Linear | nn.Conv2d)][-2::-1]:
        layers.insert(place + 1, Scaler(width))
    scaled = nn.Sequential(*layers)
    stack = {slot.name: wide.state_dict()[slot.name][None].clone() for slot in table.slots}
    down = SubModel(pack_mask(mask, table))
    down.local(stack, [down], [{}], table)
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.normal(size=(40, 1, 6, 6)).astype(np.float32))
    samples = Samples(images, torch.from_numpy(rng.integers(2, size=40)))
    training = Training(epochs=3, batch_size=8, learning_rate=0.1)
    client = Local(0, 40, np.random.default_rng(2), (HiddenScaler(width),))
    trained = make_trainer(wide, table, trainer).train(stack, samples, [client], training)
    losses = train(scaled, samples, Local(0, 40, np.random.default_rng(2)), training)
    assert float(trained.mean_loss[0]) == pytest.approx(float(losses.mean()), abs=1e-5)
    chosen = element_masks({name: one[None] for name, one in mask.items()}, table)
    for slot, own in zip(table.slots, units(small).slots, strict=True):
        inside = chosen[slot.name][0]
        full, alone = trained.after[slot.name][0], small.state_dict()[own.name]
        assert torch.allclose(full[inside], alone.flatten(), atol=1e-5)
        assert not full[~inside].any()
    assert sum(p.numel() for p in small.parameters()) == block_elements(
        {name: one[None] for name, one in mask.items()}, table
    )


def asked(mask: Mask, table: Units) -> Task:
    packed = pack_mask(mask, table)
    return Task(0, chain(Blocks(packed)), SubModel(packed))


def sent(params: Params, mask: Mask, table: Units) -> bytes:
    """A sub-model as a client uploads it."""
    line, stack = asked(mask, table).up, {slot.name: params[slot.name][None] for slot in table.slots}
    update, _ = encode([line], [{}], At(table, [0], 1, 0, Known({}, {}), [None], stack, stack, wire=True))
    return write(line, update, 0, table)


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_sub_model_arrives_as_it_was_sent_and_costs_its_own_numbers(seed: int, channels: bool) -> None:
    model = network(channels)
    table, params = units(model), model.state_dict()
    mask = some_mask(table, seed)
    data = sent(params, mask, table)
    numbers = sum(p.numel() for p in narrowed(model, mask, table).parameters())
    header = 16 + 4 * -(-table.total_units // 32)
    assert len(data) == header + 4 * numbers
    found = read_upload(data, asked(mask, table), table, Limits())
    assert isinstance(found.chosen, ChosenBlocks)
    values, told = one(found.values, 0), one(found.chosen.masks, 0)
    chosen = element_masks({name: one[None] for name, one in mask.items()}, table)
    assert all(torch.equal(told[name], mask[name]) for name in mask)
    assert all(torch.equal(values[name], torch.where(chosen[name][0], params[name], 0.0)) for name in values)


def test_blocks_of_the_wrong_size_model_or_encoding_are_refused() -> None:
    model = network(False)
    table, params = units(model), model.state_dict()
    mask = some_mask(table, 0)
    data = sent(params, mask, table)
    nan = np.float32("nan").tobytes()
    for bad in (data[:-4], data + b"\0", data[:10], feddd.encode(params, table.full_mask()), data[:-4] + nan):
        with pytest.raises((PayloadError, Refused)):
            read_upload(bad, asked(mask, table), table, Limits())


def test_every_element_is_the_mean_over_those_that_sent_it() -> None:
    model = network(True)
    table, previous = units(model), model.state_dict()
    rng = np.random.default_rng(0)
    masks = [some_mask(table, seed) | {"0": torch.tensor([True, seed > 1, False])} for seed in range(5)]
    stack = {layer.name: torch.stack([mask[layer.name] for mask in masks]) for layer in table.layers}
    chosen = element_masks(stack, table)
    values = {
        slot.name: torch.from_numpy(rng.normal(size=(5, *slot.shape)).astype(np.float32)) * chosen[slot.name]
        for slot in table.slots
    }
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    parts = []
    for some in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part = Aggregator(previous, units=table)
        part.add_blocks({n: t[some] for n, t in values.items()}, {n: t[some] for n, t in chosen.items()}, weights[some])
        parts.append(part.sums())
    total = Aggregator(previous, units=table)
    total.merge(add_sums(add_sums(parts[0], parts[1]), parts[2]))
    result = total.result()
    kept = 0
    for slot in table.slots:
        for place in np.ndindex(*slot.shape):
            senders = [client for client in range(5) if chosen[slot.name][client][place]]
            if senders:
                weight = sum(float(weights[client]) for client in senders)
                mean = sum(float(weights[c]) * float(values[slot.name][c][place]) for c in senders) / weight
                assert float(result[slot.name][place]) == pytest.approx(mean, rel=1e-5, abs=1e-6)
            else:
                kept += 1
                assert result[slot.name][place] == previous[slot.name][place]
    assert kept > 0


# The published rules


def fleet_of(clients: int, table: Units) -> Fleet:
    links = np.linspace(5e4, 1e4, clients)  # the first client is the quickest
    return make_fleet(links, links, np.ones(clients), [table] * clients, table)


def planned(method: Any, number: int, clients: int = 10, seed: int = 0) -> tuple[list[Mask], Plan]:
    """The units that a method gives to each client in a round of the paper's MLP (hidden layers of 100 and 64)."""
    model = models.build("mlp", (1, 28, 28), 10)
    table = units(model)
    state = start(dict(model.state_dict()), clients)
    state = ServerState(**{**vars(state), "round": number - 1})
    plan = method.plan(state, fleet_of(clients, table), np.random.default_rng(seed))
    return [unpack_mask(task.up.sub_model, table) for task in plan.tasks], plan


def first(count: int, of: int) -> list[bool]:
    return [unit < count for unit in range(of)]


def test_heterofl_gives_each_client_the_same_first_units_in_every_round() -> None:
    for number in (1, 2, 50):
        masks, plan = planned(HeteroFL(), number)
        for client, mask in enumerate(masks):
            wanted = ((100, 64), (50, 32), (25, 16), (13, 8), (7, 4))[
                client // 2
            ]  # ⌈width · N⌉, widest to the quickest
            assert (mask["fc1"].tolist(), mask["fc2"].tolist()) == (first(wanted[0], 100), first(wanted[1], 64))
            assert mask["fc3"].all()
    sizes = [785 * a + (a + 1) * b + (b + 1) * 10 for a, b in ((100, 64), (50, 32), (25, 16), (13, 8), (7, 4))]
    assert [1 - task.dropout for task in plan.tasks] == pytest.approx([size / 85_614 for size in sizes for _ in "ab"])
    masks, _ = planned(HeteroFL((0.25, 1.0), "round-robin"), 1)
    assert [int(mask["fc1"].sum()) for mask in masks] == [25, 100] * 5


def test_fjord_draws_a_prefix_uniformly_among_the_widths_up_to_a_clients_greatest() -> None:
    widths = (1.0, 0.8, 0.6, 0.4, 0.2)
    counts = np.zeros(6)
    for seed in range(200):
        masks, _ = planned(FjORD(widths), 1, seed=seed)
        for mask in masks:
            kept = int(mask["fc1"].sum())
            assert mask["fc1"].tolist() == first(kept, 100)
            assert int(mask["fc2"].sum()) == -(-64 * kept // 100)
            counts[kept // 20] += 1
    assert counts[0] == 0
    # 2000 draws of probability 1/5: a deviation of 18 each, five of them to spare
    assert np.abs(counts[1:] - 400).max() < 90
    seen: list[set[int]] = [set() for _ in range(10)]
    for seed in range(100):
        for client, mask in enumerate(planned(FjORD(widths, "capacity"), 1, seed=seed)[0]):
            seen[client].add(int(mask["fc1"].sum()))
    assert seen[0] == {100, 80, 60, 40, 20}
    assert seen[5] == {60, 40, 20}
    assert seen[9] == {20}


def test_fedrolex_moves_its_window_by_one_unit_a_round_and_around_the_end() -> None:
    method = FedRolex((0.5, 0.29))
    for number in (1, 2, 65, 90, 101):
        masks, _ = planned(method, number)
        for client, mask in enumerate(masks):
            share = 0.5 if client < 5 else 0.29
            for name, count in (("fc1", 100), ("fc2", 64)):
                wanted = {(number - 1 + step) % count for step in range(int(share * count + 1e-9))}
                assert set(np.flatnonzero(mask[name].numpy()).tolist()) == wanted


def test_federated_dropout_draws_as_many_units_for_everybody_each_equally_likely() -> None:
    often = np.zeros(100)
    for seed in range(50):
        masks, _ = planned(FederatedDropout(0.6), 1, seed=seed)
        assert all(int(mask["fc1"].sum()) == 60 and int(mask["fc2"].sum()) == 38 for mask in masks)
        assert not torch.equal(masks[0]["fc1"], masks[1]["fc1"])
        often += sum(mask["fc1"].numpy() for mask in masks)
    # 500 draws of probability 0.6: a deviation of 11 each, five of them to spare
    assert np.abs(often - 300).max() < 55


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("heterofl", {"widths": []}),
        ("heterofl", {"widths": [1.5]}),
        ("fedrolex", {"assignment": "size"}),
        ("fjord", {"greatest": "size"}),
        ("federated-dropout", {"width": 0.0}),
        ("federated-dropout", {"participation": 0.0}),
    ],
)
def test_wrong_options_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        construct(name, wrong)


def test_only_where_it_is_asked_for_outputs_are_scaled_by_the_width() -> None:
    scaled = [HeteroFL((1.0, 0.5)), FedRolex((1.0, 0.5)), FederatedDropout(0.5, scale=True)]
    plain = [HeteroFL((1.0, 0.5), scale=False), FedRolex(scale=False), FederatedDropout(0.5), FjORD()]
    for method, widths in zip(scaled, ((1.0, 0.5), (1.0, 0.5), (0.5, 0.5)), strict=True):
        rules = [task.local for task in planned(method, 1)[1].tasks]
        assert rules == [(HiddenScaler(widths[0]),)] * 5 + [(HiddenScaler(widths[1]),)] * 5
    assert {task.local for method in plain for task in planned(method, 1)[1].tasks} == {()}


# In the simulator


@pytest.fixture(scope="module")
def simulations() -> Iterator[Callable[[str], list[Simulation]]]:
    """Of a model: on one worker, with every payload sent for real, on two workers; for all methods."""
    with ExitStack() as stack:

        @cache
        def of(model: str) -> list[Simulation]:
            world = build_world(experiment(model={"name": model}, data={"train_limit": 240}))
            ways: list[dict[str, Any]] = [{"workers": 1}, {"workers": 1, "wire": True}, {"workers": 2}]
            return [stack.enter_context(Simulation(world, **way)) for way in ways]

        yield of


@pytest.mark.parametrize("model", ["mlp", "cnn1/2"])
@pytest.mark.parametrize("name", METHODS)
def test_workers_and_the_wire_change_nothing(
    name: str, model: str, simulations: Callable[[str], list[Simulation]]
) -> None:
    plain, *others = (list(simulation.run(METHODS[name], 3)) for simulation in simulations(model))
    for other in others:
        assert [record.clients for record in other] == [record.clients for record in plain]
        assert all(torch.equal(t, other[-1].state.model[key]) for key, t in plain[-1].state.model.items())


@pytest.mark.parametrize("name", METHODS)
def test_bytes_both_ways_are_those_of_the_sub_models_sent(name: str) -> None:
    world = build_world(experiment(data={"train_limit": 240}))
    with Simulation(world, workers=1) as simulation:
        table = simulation.units
        for record in simulation.run(METHODS[name], 2):
            rng = feddd.core.streams.stream(world.seed, "strategy", record.round)
            before = ServerState(**{**vars(record.state), "round": record.round - 1})
            plan = METHODS[name].plan(before, simulation.fleet, rng)
            for task, row in zip(plan.tasks, record.clients, strict=True):
                data = sent(record.state.model, unpack_mask(task.up.sub_model, table), table)
                assert (task.client, len(data), len(data)) == (
                    row.upload.client,
                    row.upload.upload_bytes,
                    row.upload.download_bytes,
                )
                assert row.upload.kept_share == pytest.approx(1 - row.dropout)
            assert record.mask_error is None


def test_everybody_at_full_width_is_fedavg() -> None:
    world = build_world(experiment(data={"train_limit": 240}))
    with Simulation(world, workers=1) as simulation:
        ours, plain = (list(simulation.run(method, 3))[-1] for method in (HeteroFL((1.0,)), feddd.FedAvg()))
    assert ours.clock_seconds == plain.clock_seconds
    for name, tensor in plain.state.model.items():
        assert torch.allclose(ours.state.model[name], tensor, atol=1e-6)


def test_units_that_nobody_has_stay_as_they_are() -> None:
    world = build_world(experiment(data={"train_limit": 240}))
    with Simulation(world, workers=1) as simulation:
        (record,) = simulation.run(HeteroFL((0.5,)), 1)
        for name, axis in (("fc1.weight", 0), ("fc2.weight", 1)):
            old, new = (m[name].movedim(axis, 0) for m in (simulation.initial, record.state.model))
            assert torch.equal(old[50:], new[50:])
            assert not torch.equal(old[:50], new[:50])


def residual() -> nn.Module:
    """Its shapes are a chain's, but what is left out of one layer is seen by others."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(784, 8), nn.Linear(8, 8), nn.Linear(8, 10)

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.sigmoid(self.one(images.flatten(1)))
            return self.three(hidden + self.two(hidden))  # type: ignore[no-any-return]

    return Skips()


@pytest.mark.parametrize("model", ["heterogeneous-b/16", "test_submodel_methods:residual"])
def test_models_without_sub_models_are_refused_in_one_line(model: str, tmp_path: Any) -> None:
    data = {"dataset": "synthetic-colour"} if model.startswith("het") else {}
    wrong = experiment(model={"name": model}, data={**data, "train_limit": 120}, strategy=[{"name": "heterofl"}])
    with pytest.raises(InputError, match="sub-models") as problem:
        feddd.run(wrong, tmp_path / "run", workers=1)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "run").exists()


def test_absent_clients_are_charged_and_damage_is_refused() -> None:
    changes = {"data": {"train_limit": 240}, "faults": {"crashed": 0.4, "lost": 0.2}}
    with Simulation(build_world(experiment(**changes)), workers=1) as simulation:
        (record,) = simulation.run(HeteroFL(), 1)
        states = {row.upload.status for row in record.clients}
        assert "ok" in states
        assert len(states) > 1
        crashed = [row.upload for row in record.clients if "crashed" in row.upload.status]
        assert all(upload.download_bytes > 0 and upload.upload_bytes == 0 for upload in crashed)
    damaged = build_world(experiment(data={"train_limit": 240}, faults={"garbage": 0.5}))
    with Simulation(damaged, workers=1) as simulation:
        (record,) = simulation.run(HeteroFL(), 1)
        states = [row.upload.status for row in record.clients]
        assert 0 < states.count("ok") < len(states)
        assert {state for state in states if state != "ok"} == {
            "refused: this is not a payload: its magic number is wrong"
        }
