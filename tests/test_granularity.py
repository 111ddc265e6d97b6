"""Units of another size, by a function from outside: what they hold, what is refused, and both engines with them."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

import feddd
from feddd.core.granularity import tables_of
from feddd.core.units import Layer, Slot, Units, units
from feddd.errors import InputError, RunError
from feddd.experiments.config import parse_experiment
from feddd.experiments.methods import construct
from feddd.experiments.running import build_world
from feddd.flower import FedDDStrategy, RoundFacts
from feddd.simulation.simulator import Simulation
from feddd.strategies.feddd import FedDD
from feddd.testbed.apps import build_model, links_of
from flower_apps import client_app
from flower_grid import MemoryGrid
from test_units import owners
from worlds import experiment

NET = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3))
PATH = f"{__name__}:pairs"


def pairs(model: nn.Module) -> Units:
    """Two neighbours are a unit where a layer has an even number of them."""
    table = units(model)
    return replace(table, layers=tuple(one.joined(2) if one.units % 2 == 0 else one for one in table.layers))


def pairs_of_channels(model: nn.Module) -> Units:
    """Two neighbouring channels are a unit, and neurons stay alone."""
    table = units(model)
    return replace(table, layers=tuple(one.joined(2) if "conv" in one.name else one for one in table.layers))


def other_pairs(model: nn.Module) -> Units:
    """As many units as `pairs`, but of neurons that are half a layer apart."""
    table = pairs(model)
    layers = (
        replace(one, slots=tuple(replace(slot, blocks=slot.span, span=1) for slot in one.slots)) for one in table.layers
    )
    return replace(table, layers=tuple(layers))


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Linear(5, 12), 3),
    "convolution": (lambda: nn.Conv2d(2, 8, 3), 4),
    "a layer with batch normalisation": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8)), 2),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 2), 2),
    "grouped transposed convolution": (lambda: nn.ConvTranspose2d(4, 12, 2, groups=2), 3),
    "gates of a recurrent cell": (lambda: nn.LSTM(3, 6), 3),
    "a layer as one unit": (lambda: nn.Linear(5, 4), 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_joined_units_hold_what_their_neighbours_held(name: str) -> None:
    make, count = MODULES[name]
    model = make()
    fine, state = units(model), model.state_dict()
    coarse = replace(fine, layers=tuple(layer.joined(count) for layer in fine.layers))
    assert coarse.digest != fine.digest
    before, after = owners(fine, state), owners(coarse, state)
    for tensor, (layers, numbers) in before.items():
        assert np.array_equal(after[tensor][0], layers)
        assert np.array_equal(after[tensor][1], numbers // count), tensor


@pytest.mark.parametrize("name", MODULES)
def test_what_is_selected_written_read_and_averaged_is_what_a_loop_over_elements_gives(name: str) -> None:
    make, count = MODULES[name]
    model = make()
    table = replace(units(model), layers=tuple(layer.joined(count) for layer in units(model).layers))
    like = {slot.name: torch.zeros(slot.shape) for slot in table.slots}
    generator = torch.Generator().manual_seed(3)
    before, after = ({key: torch.randn(one.shape, generator=generator) for key, one in like.items()} for _ in "wv")
    mask = feddd.select(before, after, 0.5, selector="delta", units=table)
    where = owners(table, like)
    for layer in table.layers:
        squares = np.zeros(layer.units)
        for slot in layer.slots:
            if not slot.buffer:
                for place in itertools.product(*map(range, slot.shape)):
                    moved = float(after[slot.name][place]) - float(before[slot.name][place])
                    squares[where[slot.name][1][place]] += moved**2
        kept = max(1, int(layer.units * 0.5 + 0.5))
        assert set(np.flatnonzero(mask[layer.name])) == set(np.argsort(-squares, kind="stable")[:kept])
    values, read = feddd.decode(feddd.encode(after, mask, units=table), like, units=table)
    average = feddd.Aggregator(before, units=table)
    average.add(values, read, 2.0)
    mean = average.result()
    for slot in table.slots:
        own = mask[next(layer.name for layer in table.layers if slot in layer.slots)].numpy()
        sent = torch.from_numpy(own[where[slot.name][1]])
        assert torch.equal(mean[slot.name], torch.where(sent, after[slot.name], before[slot.name]))


def test_heads_of_attention_can_be_units() -> None:
    attention = nn.MultiheadAttention(8, 2)

    def heads(model: nn.Module) -> Units:
        table = units(model)
        slots = {slot.name: slot for layer in table.layers for slot in layer.slots}
        inside = [replace(slots[f"in_proj_{kind}"], span=4) for kind in ("weight", "bias")]
        outward = replace(slots["out_proj.weight"], axis=1, span=4)
        bias = Layer("bias", 8, (slots["out_proj.bias"],))
        return replace(table, layers=(Layer("heads", 2, (*inside, outward)), bias))

    (table,) = tables_of([attention], heads)
    held = owners(table, attention.state_dict())
    assert np.array_equal(held["in_proj_weight"][1][:, 0], np.tile(np.repeat([0, 1], 4), 3))
    assert np.array_equal(held["out_proj.weight"][1][0], np.repeat([0, 1], 4))


def _slot(name: str, **changes: Any) -> Slot:
    return replace(next(slot for slot in units(NET).slots if slot.name == name), **changes)


def _instead(**changes: Any) -> Callable[[nn.Module], Any]:
    """The table with another first layer."""
    return lambda model: replace(
        units(model), layers=(replace(units(model).layers[0], **changes), *units(model).layers[1:])
    )


BAD: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "no table": (lambda model: {"0": 8}, "they are a dict"),
    "no layers": (lambda model: replace(units(model), layers=(1, 2)), "tuple of layers"),
    "it raises": (lambda model: units(model).layers[7], "raised IndexError: tuple index"),
    "it cannot be called so": (lambda: None, "raised TypeError"),
    "a layer forgotten": (lambda model: replace(units(model), layers=units(model).layers[:2]), "'3.weight' is in no"),
    "a tensor twice": (_instead(slots=(_slot("0.weight"),) * 2), "'0.weight' is there twice"),
    "a foreign tensor": (_instead(slots=(Slot("mine", (8,)),)), "'mine' is there twice, is not the model's"),
    "another shape": (_instead(slots=(_slot("0.weight", shape=(8, 4)), _slot("0.bias"))), "another shape"),
    "a wrong number": (_instead(units=4), "has 4 units, its tensor '0.weight' has 8"),
    "no units of this size": (_instead(slots=(_slot("0.weight", span=3), _slot("0.bias"))), "does not divide"),
    "no such axis": (_instead(slots=(_slot("0.weight", axis=2), _slot("0.bias"))), "does not divide"),
    "groups of a plain layer": (_instead(slots=(_slot("0.weight", groups=2), _slot("0.bias"))), "does not divide"),
    "one name for two": (_instead(name="2"), "two layers have the same name"),
    "no tensors": (
        lambda model: replace(units(model), layers=(*units(model).layers, Layer("none", 1, ()))),
        "holds no tensor",
    ),
    "frozen tensors": (lambda model: replace(units(model), frozen=("0.bias",)), "tied and frozen"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_does_not_fit_is_one_line(name: str) -> None:
    rule, words = BAD[name]
    with pytest.raises(ValueError, match=words) as caught:
        tables_of([NET], rule)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_joined_is_refused() -> None:
    for count in (0, 3, 16):
        with pytest.raises(ValueError, match=f"8 units of layer '0' cannot be joined {count} at a time"):
            units(NET).layers[0].joined(count)


def test_narrower_models_must_be_divided_alike() -> None:
    narrow = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="must divide narrower models as they divide the global one"):
        tables_of([NET, narrow], lambda model: pairs(model) if model is NET else units(model))
    wide = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    small = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert [table.layers[0].units for table in tables_of([wide, small], pairs)] == [4, 2]


def test_a_toml_names_it_and_keeps_the_name() -> None:
    found = parse_experiment({"model": {"units": PATH}})
    assert found.import_paths == [PATH]
    assert parse_experiment(tomllib.loads(found.to_toml())) == found
    assert "units" not in parse_experiment({}).to_toml()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pairs", "model.units: 'pairs' is not of the form package.module:function"),
        (f"{__name__}:nothing", "cannot import"),
        (f"{__name__}:owners", "model.units 'owners' raised TypeError"),
        ("worlds:experiment", "model.units 'experiment' raised TypeError"),
    ],
)
def test_what_is_no_rule_is_refused_before_anything_is_written(path: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        feddd.run(experiment(model={"units": path}), tmp_path / "run", workers=1)
    assert not (tmp_path / "run").exists()


def test_a_run_is_the_same_with_two_workers_and_when_every_payload_is_written(tmp_path: Path) -> None:
    settings = {"fleet": {"clients": 4}, "data": {"train_limit": 100}, "rounds": 3, "model": {"units": PATH}}
    strategies = [{"name": "feddd"}, {"name": "feddd", "label": "bits", "value_bits": 4, "error_feedback": "all"}]
    own = experiment(**settings, strategy=strategies)
    one, two = (
        feddd.run(own, tmp_path / str(workers), workers=workers, wire=workers == 2).tables for workers in (1, 2)
    )
    assert one["clients"].equals(two["clients"])
    assert one["rounds"].equals(two["rounds"])
    plain = feddd.run(own.model_copy(update={"model": parse_experiment({}).model}), tmp_path / "plain", workers=1)
    assert not plain.tables["clients"].equals(one["clients"])


def test_an_interrupted_run_goes_on_with_its_units_and_not_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"fleet": {"clients": 4}, "data": {"train_limit": 100}, "rounds": 4, "model": {"units": PATH}}
    own = experiment(**settings, strategy=[{"name": "feddd", "broadcast_every": 0}])

    def stop(progress: Any) -> None:
        if progress.record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feddd.run(own, tmp_path / "run", workers=1, watch=stop, checkpoint_seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.pairs", units)
        with pytest.raises(InputError, match="cannot be resumed"):
            feddd.resume(tmp_path / "run", workers=1)
    rounds: list[int] = []
    resumed = feddd.resume(tmp_path / "run", workers=1, watch=lambda progress: rounds.append(progress.record.round))
    assert rounds[0] > 1
    whole = feddd.run(own, tmp_path / "whole", workers=1)
    assert resumed.tables["clients"].equals(whole.tables["clients"])


def test_models_of_several_widths_take_them_too() -> None:
    data = {"dataset": "synthetic-colour", "train_limit": 60}
    model = {"name": "heterogeneous-b/16", "units": f"{__name__}:pairs_of_channels"}
    with Simulation(build_world(experiment(fleet={"clients": 5}, data=data, model=model)), workers=1) as simulation:
        *_, record = simulation.run(FedDD(), 2)
    assert all(row.upload.status == "ok" for row in record.clients)
    assert {row.upload.kept_share < 1.0 for row in record.clients} == {True, False}


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedrolex", "federated-dropout"])
def test_methods_of_sub_models_refuse_them(name: str, tmp_path: Path) -> None:
    own = experiment(model={"units": PATH}, strategy=[{"name": name}])
    with pytest.raises(
        InputError, match=f"strategy '{name}': .*single channels and neurons: not with units of one's own"
    ):
        feddd.run(own, tmp_path / "run", workers=1)
    world = build_world(own)
    server = FedDDStrategy(construct(name, {}), build_model(world), units=pairs, poll_seconds=0.01, deadline_seconds=5)
    app = client_app(world, tmp_path, units=pairs)
    with pytest.raises(ValueError, match="not with units of one's own"):
        server.start(
            MemoryGrid({7 + n: (app, {"partition-id": n}) for n in range(2)}),
            ArrayRecord(dict(build_model(world).state_dict())),
            1,
        )


def test_a_grid_gives_the_simulators_masks_and_refuses_a_client_with_another_table(tmp_path: Path) -> None:
    training = {"trainer": "reference", "batch_size": 16, "learning_rate": 0.05}
    settings = {"fleet": {"clients": 4}, "data": {"train_limit": 120}, "training": training}
    world = build_world(experiment(**settings, model={"units": PATH}))
    with Simulation(world, workers=1) as simulation:
        records = list(simulation.run(FedDD(), 3))
    start = ArrayRecord(dict(build_model(world).state_dict()))

    def deployed(rules: list[Any], folder: str) -> list[RoundFacts]:
        facts: list[RoundFacts] = []
        server = FedDDStrategy(
            FedDD(),
            build_model(world),
            units=pairs,
            seed=world.seed,
            links=links_of(world),
            deadline_seconds=5,
            poll_seconds=0.01,
            on_round=facts.append,
        )
        apps = [client_app(world, tmp_path / folder / str(n), units=rule) for n, rule in enumerate(rules)]
        server.start(MemoryGrid({7 + n: (app, {"partition-id": n}) for n, app in enumerate(apps)}), start, 3)
        return facts

    for record, fact in zip(records, deployed([pairs] * 4, "alike"), strict=True):
        simulated = sorted(record.clients, key=lambda row: row.upload.client)
        assert [upload.mask for upload in fact.uploads] == [row.upload.mask for row in simulated]
        assert [upload.upload_bytes for upload in fact.uploads] == [row.upload.upload_bytes for row in simulated]
    other = deployed([pairs, pairs, other_pairs, pairs], "other")
    assert "another layer table" in other[0].failures["client 2"]
    with pytest.raises(RunError, match="another layer table"):
        deployed([None] * 4, "none")
