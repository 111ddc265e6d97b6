"""The masked mean: against a loop, with its properties, streaming, merged and over sub-models."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import feddd
from feddd.core.units import units

Params = dict[str, Tensor]
Client = tuple[Params, dict[str, Tensor], float]
ROWS, COLUMNS = 4, 3


def model(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {"l.weight": torch.randn(rows, columns, generator=g), "l.bias": torch.randn(rows, generator=g)}


def mask(*bits: int) -> dict[str, Tensor]:
    return {"l": torch.tensor(bits, dtype=torch.bool)}


def aggregate(previous: Params, clients: list[Client]) -> Params:
    aggregator = feddd.Aggregator(previous)
    for client in clients:
        aggregator.add(*client)
    return aggregator.result()


def oracle(previous: Params, clients: list[Client]) -> Params:
    """Element by element: the weighted mean over those whose tensor reaches the element and whose unit was sent."""
    result = {}
    for name, old in previous.items():
        new = old.double().numpy().copy()
        for index in np.ndindex(new.shape):
            senders = [
                (float(values[name][index]), weight)
                for values, sent, weight in clients
                if all(i < size for i, size in zip(index, values[name].shape, strict=True)) and sent["l"][index[0]]
            ]
            if senders:
                new[index] = sum(v * w for v, w in senders) / sum(w for _, w in senders)
        result[name] = torch.from_numpy(new)
    return result


def assert_close(one: Params, two: Params, tolerance: float = 1e-6) -> None:
    assert set(one) == set(two)
    for name in one:
        assert torch.allclose(one[name].double(), two[name].double(), rtol=tolerance, atol=tolerance), name


@st.composite
def fleets(draw: st.DrawFn, *, full: bool = False, narrow: bool = False) -> list[Client]:
    clients = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, ROWS)) if narrow else ROWS
        columns = draw(st.integers(1, COLUMNS)) if narrow else COLUMNS
        bits = draw(st.lists(st.just(True) if full else st.booleans(), min_size=rows, max_size=rows))
        weight = draw(st.floats(0.5, 1000))
        clients.append((model(draw(st.integers(0, 10_000)), rows, columns), {"l": torch.tensor(bits)}, weight))
    return clients


@settings(max_examples=60, deadline=None)
@given(clients=fleets(narrow=True), seed=st.integers(0, 99))
def test_the_masked_mean_is_what_a_loop_over_elements_gives(clients: list[Client], seed: int) -> None:
    previous = model(seed)
    assert_close(aggregate(previous, clients), oracle(previous, clients))


def test_a_mean_worked_out_on_paper() -> None:
    previous = {"l.weight": torch.tensor([[7.0], [8.0], [9.0]])}
    one = {"l.weight": torch.tensor([[1.0], [2.0], [3.0]])}
    two = {"l.weight": torch.tensor([[5.0], [6.0], [7.0]])}
    new = aggregate(previous, [(one, mask(1, 0, 0), 10), (two, mask(1, 1, 0), 30)])
    assert new["l.weight"].flatten().tolist() == [4.0, 6.0, 9.0]  # (10·1 + 30·5)/40, 30·6/30, nobody


def test_element_sent_by_nobody_keeps_its_value() -> None:
    previous = model(0)
    new = aggregate(previous, [(model(1), mask(1, 0, 0, 1), 3), (model(2), mask(1, 0, 1, 0), 4)])
    for name, old in previous.items():
        assert torch.equal(new[name][1], old[1])
        assert all(not torch.equal(new[name][k], old[k]) for k in (0, 2, 3))


def test_with_no_client_at_all_everything_keeps_its_value() -> None:
    previous = model(0) | {"gain": torch.tensor(2.0)}
    new = feddd.Aggregator(previous).result()
    assert all(torch.equal(new[name], previous[name]) for name in previous)


@settings(max_examples=30, deadline=None)
@given(clients=fleets(full=True))
def test_full_masks_give_the_weighted_mean_of_fedavg(clients: list[Client]) -> None:
    weights = np.array([weight for _, _, weight in clients])
    new = aggregate(model(0), clients)
    for name in new:
        stacked = np.stack([values[name].double().numpy() for values, _, _ in clients])
        np.testing.assert_allclose(new[name].numpy(), np.average(stacked, axis=0, weights=weights), 1e-6, 1e-6)


@settings(max_examples=30, deadline=None)
@given(clients=fleets())
def test_the_mean_lies_between_its_senders(clients: list[Client]) -> None:
    new = aggregate(model(0), clients)
    for k in range(ROWS):
        rows = [values["l.weight"][k] for values, sent, _ in clients if sent["l"][k]]
        if rows:
            assert (new["l.weight"][k] >= torch.stack(rows).amin(0) - 1e-6).all()
            assert (new["l.weight"][k] <= torch.stack(rows).amax(0) + 1e-6).all()


@settings(max_examples=30, deadline=None)
@given(clients=fleets(narrow=True), data=st.data())
def test_permuting_the_clients_changes_nothing(clients: list[Client], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(clients))
    assert_close(aggregate(model(0), clients), aggregate(model(0), shuffled))


@settings(max_examples=30, deadline=None)
@given(clients=fleets(narrow=True), cut=st.integers(0, 5), by_sums=st.booleans())
def test_merging_partial_aggregators_equals_one(clients: list[Client], cut: int, by_sums: bool) -> None:
    previous = model(0)
    left, right = feddd.Aggregator(previous), feddd.Aggregator(previous)
    for number, client in enumerate(clients):
        (left if number < cut else right).add(*client)
    left.merge(right.sums() if by_sums else right)
    assert left.total_weight == pytest.approx(sum(weight for _, _, weight in clients))
    assert_close(left.result(), aggregate(previous, clients))


def test_sums_survive_a_trip_between_processes() -> None:
    previous = model(0)
    clients: list[Client] = [(model(1), mask(1, 0, 1, 1), 2.0), (model(2, 2, 2), mask(1, 1), 5.0)]
    worker = feddd.Aggregator(previous)
    for client in clients:
        worker.add(*client)
    server = feddd.Aggregator(previous)
    server.merge(pickle.loads(pickle.dumps(worker.sums())))
    assert_close(server.result(), oracle(previous, clients))
    assert server.total_weight == 7.0


def test_aggregators_of_different_models_cannot_be_merged() -> None:
    one = feddd.Aggregator(model(0))
    for other in (feddd.Aggregator({"l.weight": torch.ones(2, 2)}), feddd.Aggregator({"k.w": torch.ones(16)})):
        other.add({s.name: torch.ones(s.shape) for s in other.units.slots}, other.units.full_mask(), 1)
        with pytest.raises(ValueError, match="same model"):
            one.merge(other)
        with pytest.raises(ValueError, match="same model"):
            one.merge(other.sums())
    assert torch.equal(one.result()["l.weight"], model(0)["l.weight"])


def test_a_narrow_client_counts_only_inside_its_prefix() -> None:
    previous = {"l.weight": torch.full((3, 3), 9.0)}
    wide = {"l.weight": torch.full((3, 3), 4.0)}
    narrow = {"l.weight": torch.full((2, 1), 1.0)}
    new = aggregate(previous, [(wide, mask(1, 0, 1), 1), (narrow, mask(1, 1), 2)])
    assert new["l.weight"].tolist() == [[2.0, 4.0, 4.0], [1.0, 9.0, 9.0], [4.0, 4.0, 4.0]]


class Mixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, width, 2)
        self.bn = nn.BatchNorm1d(width)
        self.up = nn.ConvTranspose1d(width, 2 * width, 1, groups=2)
        self.lstm = nn.LSTM(2, width)
        self.scale = nn.Parameter(torch.tensor(1.0))


def ones_like(module: nn.Module, value: float) -> Params:
    return {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor + 5
        for name, tensor in module.state_dict().items()
    }


def test_gates_and_groups_of_a_narrow_client_meet_those_of_the_wide_one() -> None:
    wide, narrow = Mixed(4), Mixed(2)
    table = units(wide)
    aggregator = feddd.Aggregator(ones_like(wide, 9.0), units=table)
    aggregator.add(ones_like(wide, 4.0), table.full_mask(), 1)
    aggregator.add(ones_like(narrow, 1.0), units(narrow).full_mask(), 2)
    new = aggregator.result()
    # LSTM: rows are gate × hidden unit; hidden units 0 and 1 of every gate are shared.
    shared = torch.arange(16) % 4 < 2
    assert new["lstm.bias_hh_l0"].tolist() == [2.0 if x else 4.0 for x in shared]
    # Grouped transposed convolution [in 4, out/groups 4]: each group's first input and first two outputs are shared.
    expected = torch.full((4, 4), 4.0)
    for i in (0, 2):
        expected[i, :2] = 2.0
    assert torch.equal(new["up.weight"][:, :, 0], expected)
    assert new["bn.running_var"].tolist() == [2.0, 2.0, 4.0, 4.0]
    assert float(new["scale"]) == 2.0


def test_integer_tensors_keep_the_servers_value() -> None:
    wide = Mixed(4)
    table = units(wide)
    previous = ones_like(wide, 9.0)
    aggregator = feddd.Aggregator(previous, units=table)
    sent = ones_like(wide, 4.0) | {"bn.num_batches_tracked": torch.tensor(1234)}
    aggregator.add(sent, table.full_mask(), 1)
    new = aggregator.result()
    assert int(new["bn.num_batches_tracked"]) == int(previous["bn.num_batches_tracked"]) == 5
    assert new["bn.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_in_masked_out_units_does_no_harm(bad: float) -> None:
    table = units(Mixed(4))
    values = ones_like(Mixed(4), 2.0)
    kept = {x.name: torch.arange(x.units) % 2 == 0 for x in table.layers}
    values["conv.weight"][1] = bad
    values["lstm.weight_ih_l0"][1::4] = bad
    values["up.weight"][:2, 1] = bad  # group 0, output 1
    aggregator = feddd.Aggregator(ones_like(Mixed(4), 9.0), units=table)
    aggregator.add(values, kept, 3)
    new = aggregator.result()
    assert all(torch.isfinite(tensor).all() for tensor in new.values())
    assert new["conv.bias"].tolist() == [2.0, 9.0, 2.0, 9.0]
    assert new["lstm.bias_ih_l0"].tolist() == [2.0, 9.0, 2.0, 9.0] * 4


@pytest.mark.parametrize("weight", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_and_finite_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        feddd.Aggregator(model(0)).add(model(1), mask(1, 1, 1, 1), weight)


@pytest.mark.parametrize(
    ("values", "sent"),
    [
        (model(1), {}),
        (model(1), {"k": torch.ones(4, dtype=torch.bool)}),
        (model(1), mask(1, 1, 1)),
        (model(1), {"l": torch.ones(4)}),
        (model(1, 2), mask(1, 1, 1, 1)),
        (model(1, 5), mask(1, 1, 1, 1, 1)),
        (model(1, 4, 5), mask(1, 1, 1, 1)),
        ({"l.weight": torch.ones(4, 3)}, mask(1, 1, 1, 1)),
    ],
    ids=["no layer", "wrong layer", "short", "not boolean", "wide mask", "wider rows", "wider columns", "no bias"],
)
def test_a_client_that_does_not_fit_is_refused_and_leaves_no_trace(values: Params, sent: dict[str, Any]) -> None:
    aggregator = feddd.Aggregator(model(0))
    aggregator.add(model(2), mask(1, 0, 1, 0), 2)
    before = aggregator.result()
    with pytest.raises(ValueError):
        aggregator.add(values, sent, 1)
    assert aggregator.total_weight == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in aggregator.result().items())


def test_neither_the_previous_model_nor_the_values_are_changed_and_the_result_is_fresh() -> None:
    previous, values = model(0), model(1)
    aggregator = feddd.Aggregator(previous)
    aggregator.add(values, mask(1, 1, 0, 0), 2)
    new = aggregator.result()
    new["l.weight"].zero_()
    assert_close(aggregator.result(), oracle(previous, [(values, mask(1, 1, 0, 0), 2)]))
    assert torch.equal(previous["l.weight"], model(0)["l.weight"])
    assert torch.equal(values["l.weight"], model(1)["l.weight"])


def test_the_result_has_the_previous_dtype() -> None:
    previous = {"l.weight": torch.ones(2, 2, dtype=torch.float64), "k.weight": torch.ones(2, dtype=torch.bfloat16)}
    aggregator = feddd.Aggregator(previous)
    aggregator.add({name: tensor * 3 for name, tensor in previous.items()}, aggregator.units.full_mask(), 1)
    new = aggregator.result()
    assert {name: tensor.dtype for name, tensor in new.items()} == {n: t.dtype for n, t in previous.items()}
    assert all((tensor == 3).all() for tensor in new.values())


def test_many_equal_clients_leave_no_rounding_behind() -> None:
    aggregator = feddd.Aggregator(model(0))
    for _ in range(500):
        aggregator.add(model(1), mask(1, 1, 1, 1), 0.1)
    assert all(torch.equal(tensor, model(1)[name]) for name, tensor in aggregator.result().items())


def held_bytes(thing: object) -> int:
    """Bytes of all tensors that can be reached through attributes and containers."""
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return sum(held_bytes(value) for value in thing.values())
    if isinstance(thing, list | tuple | set):
        return sum(held_bytes(value) for value in thing)
    return held_bytes(vars(thing)) if hasattr(thing, "__dict__") else 0


def test_memory_does_not_grow_with_the_number_of_clients() -> None:
    aggregator = feddd.Aggregator({"l.weight": torch.zeros(50, 50), "l.bias": torch.zeros(50)})
    usage = []
    for number in range(41):
        width = 25 if number % 2 else 50
        values = {"l.weight": torch.ones(width, width), "l.bias": torch.ones(width)}
        aggregator.add(values, {"l": torch.arange(width) % 3 != number % 3}, 1)
        del values
        if number in (2, 40):
            usage.append((held_bytes(aggregator), len(pickle.dumps(aggregator.sums()))))
    assert usage[0] == usage[1]
    assert usage[0][0] > 8 * 2550
