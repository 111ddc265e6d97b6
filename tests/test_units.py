"""The layer table: which element of which tensor belongs to which unit, for every kind of module."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import feddd
from feddd.core.units import Units, units

Where = Callable[[tuple[int, ...]], int]
first: Where = lambda i: i[0]  # noqa: E731
second: Where = lambda i: i[1]  # noqa: E731


def modulo(count: int) -> Where:
    return lambda i: i[0] % count


def owners(table: Units, like: Mapping[str, Tensor]) -> dict[str, tuple[NDArray[Any], NDArray[np.int64]]]:
    """Per tensor the layer name and unit number of every element, found by writing one unit at a time.

    It also asserts that no element belongs to two units.
    """
    names = {s.name for layer in table.layers for s in layer.slots}
    found = {n: (np.full(like[n].shape, None, object), np.full(like[n].shape, -1)) for n in names}
    nothing = {layer.name: torch.zeros(layer.units, dtype=torch.bool) for layer in table.layers}
    for layer in table.layers:
        for unit in range(layer.units):
            one = nothing[layer.name].clone()
            one[unit] = True
            written = table.zeros_like(like)
            mask = nothing | {layer.name: one}
            table.put(written, mask, torch.ones(layer.unit_elements), fixed=False)
            for name in names:
                hit = written[name].numpy() == 1
                assert (found[name][1][hit] == -1).all(), f"two units hold an element of {name}"
                found[name][0][hit] = layer.name
                found[name][1][hit] = unit
    return found


def assert_units_cover(model: nn.Module) -> None:
    """Every floating element of the state_dict is in exactly one unit, fixed, or under an alias of such a tensor."""
    table, state = units(model), model.state_dict()
    held = owners(table, state)
    fixed = {slot.name for slot in table.fixed}
    aliases = {alias for alias, _ in table.aliases}
    floating = {name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()}
    assert set(held) | fixed | aliases == floating
    assert not set(held) & fixed
    assert not (set(held) | fixed) & aliases
    assert all((unit >= 0).all() for _, unit in held.values())
    assert all(state[name].dim() == 0 for name in fixed)


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def attention(**options: Any) -> nn.Sequential:
    return named(a=nn.MultiheadAttention(4, 2, **options))


LSTM_LAYERS = {
    f"m.{tensor}_{part}": (f"m.{part}", modulo(3))
    for part in ("l0", "l0_reverse", "l1", "l1_reverse")
    for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
}
CELL = {f"m.{tensor}": ("m", modulo(3)) for tensor in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
OUT_PROJ = {"a.out_proj.weight": ("a.out_proj", first), "a.out_proj.bias": ("a.out_proj", first)}

# module, and for every tensor its layer and which unit an element at an index belongs to
PLACES: list[tuple[str, nn.Module, dict[str, tuple[str, Where]]]] = [
    ("linear", named(m=nn.Linear(3, 4)), {"m.weight": ("m", first), "m.bias": ("m", first)}),
    ("linear without bias", named(m=nn.Linear(3, 4, bias=False)), {"m.weight": ("m", first)}),
    ("bilinear", named(m=nn.Bilinear(2, 3, 4)), {"m.weight": ("m", first), "m.bias": ("m", first)}),
    ("conv 1d", named(m=nn.Conv1d(2, 3, 2)), {"m.weight": ("m", first), "m.bias": ("m", first)}),
    ("conv 2d", named(m=nn.Conv2d(4, 6, 2, groups=2)), {"m.weight": ("m", first), "m.bias": ("m", first)}),
    ("conv 3d", named(m=nn.Conv3d(2, 3, 2)), {"m.weight": ("m", first), "m.bias": ("m", first)}),
    ("transposed 1d", named(m=nn.ConvTranspose1d(2, 3, 2)), {"m.weight": ("m", second), "m.bias": ("m", first)}),
    ("transposed 2d", named(m=nn.ConvTranspose2d(5, 3, 2)), {"m.weight": ("m", second), "m.bias": ("m", first)}),
    ("transposed 3d", named(m=nn.ConvTranspose3d(3, 3, 2)), {"m.weight": ("m", second), "m.bias": ("m", first)}),
    # [in = 4, out / groups = 3, 2]: input channels 0 and 1 feed outputs 0–2, channels 2 and 3 feed outputs 3–5
    (
        "transposed in groups",
        named(m=nn.ConvTranspose1d(4, 6, 2, groups=2)),
        {"m.weight": ("m", lambda i: i[0] // 2 * 3 + i[1]), "m.bias": ("m", first)},
    ),
    ("embedding", named(m=nn.Embedding(5, 3)), {"m.weight": ("m", second)}),
    ("embedding bag", named(m=nn.EmbeddingBag(5, 3)), {"m.weight": ("m", second)}),
    ("lstm", named(m=nn.LSTM(2, 3, num_layers=2, bidirectional=True)), LSTM_LAYERS),
    (
        "lstm with projection",
        named(m=nn.LSTM(2, 3, proj_size=2)),
        {
            **{f"m.{t}_l0": ("m.l0", modulo(3)) for t in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
            "m.weight_hr_l0": ("m.weight_hr_l0", first),
        },
    ),
    ("gru", named(m=nn.GRU(2, 3, num_layers=2, bidirectional=True)), LSTM_LAYERS),
    ("rnn", named(m=nn.RNN(2, 3, num_layers=2, bidirectional=True)), LSTM_LAYERS),
    ("rnn cell", named(m=nn.RNNCell(2, 3)), CELL),
    ("lstm cell", named(m=nn.LSTMCell(2, 3)), CELL),
    ("gru cell", named(m=nn.GRUCell(2, 3)), CELL),
    (
        "attention",
        attention(add_bias_kv=True),
        {
            "a.in_proj_weight": ("a", modulo(4)),
            "a.in_proj_bias": ("a", modulo(4)),
            "a.bias_k": ("a", lambda i: i[2]),
            "a.bias_v": ("a", lambda i: i[2]),
            **OUT_PROJ,
        },
    ),
    (
        "attention over other widths",
        attention(kdim=3, vdim=5),
        {
            "a.q_proj_weight": ("a", first),
            "a.k_proj_weight": ("a", first),
            "a.v_proj_weight": ("a", first),
            "a.in_proj_bias": ("a", modulo(4)),
            **OUT_PROJ,
        },
    ),
]


@pytest.mark.parametrize(("module", "places"), [x[1:] for x in PLACES], ids=[x[0] for x in PLACES])
def test_every_element_belongs_to_the_unit_of_its_output(
    module: nn.Module, places: dict[str, tuple[str, Where]]
) -> None:
    assert_units_cover(module)
    found = owners(units(module), module.state_dict())
    assert set(found) == set(places)
    for name, (layer, where) in places.items():
        assert set(found[name][0].flat) == {layer}
        for index in np.ndindex(found[name][1].shape):
            assert found[name][1][index] == where(index), (name, index)


@pytest.mark.parametrize(
    ("before", "norm", "tensors"),
    [
        (nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), ["weight", "bias", "running_mean", "running_var"]),
        (nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4, affine=False), ["running_mean", "running_var"]),
        (nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), ["weight", "bias"]),
        (nn.Conv3d(2, 4, 1), nn.InstanceNorm3d(4, affine=True), ["weight", "bias"]),
        (nn.Linear(2, 4), nn.LayerNorm(4), ["weight", "bias"]),
        (nn.Linear(2, 4), nn.RMSNorm(4), ["weight"]),
        (nn.ConvTranspose2d(2, 4, 1, groups=2), nn.BatchNorm2d(4), ["weight", "bias", "running_mean", "running_var"]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_a_normalisation_joins_the_module_before_it_when_the_counts_match(
    before: nn.Module, norm: nn.Module, tensors: list[str]
) -> None:
    table = units(named(m=before, n=norm))
    assert [(layer.name, layer.units) for layer in table.layers] == [("m", 4)]
    assert [s.name for s in table.layers[0].slots] == ["m.weight", "m.bias", *(f"n.{name}" for name in tensors)]


def test_a_normalisation_of_another_count_or_with_nothing_before_it_is_a_layer_of_its_own() -> None:
    table = units(named(a=nn.LayerNorm(3), b=nn.Linear(3, 4), c=nn.LayerNorm(2), d=nn.LayerNorm(2)))
    assert [(layer.name, layer.units) for layer in table.layers] == [("a", 3), ("b", 4), ("c", 2)]
    assert [s.name for s in table.layers[2].slots] == ["c.weight", "c.bias", "d.weight", "d.bias"]


def test_an_activation_between_a_layer_and_its_normalisation_does_not_part_them() -> None:
    table = units(named(a=nn.Linear(3, 4), b=nn.ReLU(), c=nn.BatchNorm1d(4)))
    assert [layer.name for layer in table.layers] == ["a"]


def test_running_statistics_are_buffers_of_their_layer_and_the_batch_counter_appears_nowhere() -> None:
    model = named(m=nn.Conv2d(2, 4, 1), n=nn.BatchNorm2d(4))
    table = units(model)
    assert {s.name for s in table.slots if s.buffer} == {"n.running_mean", "n.running_var"}
    assert "n.num_batches_tracked" in model.state_dict()
    assert "n.num_batches_tracked" not in {s.name for s in table.slots}
    mask = {"m": torch.tensor([True, False, False, True])}
    model.state_dict()["n.running_mean"].copy_(torch.arange(4.0) + 5)
    values, _ = feddd.decode(feddd.encode(model.state_dict(), mask, units=table), model.state_dict(), units=table)
    assert values["n.running_mean"].tolist() == [5.0, 0.0, 0.0, 8.0]
    assert "n.num_batches_tracked" not in values


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight


def test_tied_weights_are_held_once_and_sent_once() -> None:
    model = Tied()
    table = units(model)
    assert table.aliases == (("decoder.weight", "embedding.weight"),)
    assert [(layer.name, layer.units) for layer in table.layers] == [("embedding", 3), ("decoder", 5)]
    assert table.elements == 5 * 3 + 5
    assert_units_cover(model)


def test_the_alias_of_a_tied_weight_comes_back_from_decode_and_from_the_aggregator() -> None:
    model = Tied()
    table, state = units(model), model.state_dict()
    values, mask = feddd.decode(feddd.encode(state, table.full_mask(), units=table), state, units=table)
    assert torch.equal(values["decoder.weight"], state["embedding.weight"])
    other = {name: tensor + 2 for name, tensor in values.items()}
    aggregator = feddd.Aggregator(state, units=table)
    aggregator.add(values, mask, 1)
    aggregator.add(other, mask, 1)
    new = aggregator.result()
    assert torch.allclose(new["decoder.weight"], state["embedding.weight"] + 1)
    assert torch.equal(new["decoder.weight"], new["embedding.weight"])
    model.load_state_dict(new)


class Custom(nn.Module):
    """Own parameters of several counts, a scalar, an integer, an empty one and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 2))
        self.shift = nn.Parameter(torch.zeros(4))
        self.heads = nn.Parameter(torch.zeros(3, 1, 2))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def test_parameters_of_a_custom_module_have_their_units_along_the_first_axis() -> None:
    table = units(named(c=Custom()))
    assert [(x.name, x.units, [s.name for s in x.slots]) for x in table.layers] == [
        ("c", 4, ["c.table", "c.shift"]),
        ("c.heads", 3, ["c.heads"]),
    ]
    assert [slot.name for slot in table.fixed] == ["c.temperature"]
    assert table.elements == 4 * 2 + 4 + 3 * 2 + 1


def test_scalars_are_sent_under_every_mask() -> None:
    model = named(c=Custom())
    table, state = units(model), model.state_dict()
    nothing = {x.name: torch.zeros(x.units, dtype=torch.bool) for x in table.layers}
    data = feddd.encode(state, nothing, units=table)
    assert data[-4:] == np.float32(2.0).tobytes()
    assert feddd.decode(data, state, units=table)[0]["c.temperature"] == 2.0


class Gated(nn.LSTM):
    """A recurrent module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.gain = nn.Parameter(torch.ones(2))


def test_a_recurrent_module_may_have_parameters_of_its_own() -> None:
    model = named(m=Gated())
    assert [(x.name, x.units) for x in units(model).layers] == [("m.l0", 3), ("m.gain", 2)]
    assert_units_cover(model)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = named(m=nn.Linear(2, 3), n=nn.BatchNorm1d(3))
        self.right = self.left
        self.head = nn.Linear(3, 2)


def test_a_module_shared_under_two_names_is_held_once() -> None:
    model = Siamese()
    table = units(model)
    assert [layer.name for layer in table.layers] == ["left.m", "head"]
    assert dict(table.aliases) == {
        f"right.{name}": f"left.{name}"
        for name in ("m.weight", "m.bias", "n.weight", "n.bias", "n.running_mean", "n.running_var")
    }
    assert_units_cover(model)
    new = feddd.Aggregator(model.state_dict(), units=table)
    new.add(model.state_dict(), table.full_mask(), 1)
    model.load_state_dict(new.result())


def test_a_lazy_module_is_refused() -> None:
    model = named(m=nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"m\.weight.*no shape yet"):
        units(model)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        units({"w": torch.zeros(2, dtype=torch.complex64)})


def test_a_bare_state_dict_is_grouped_by_prefix_with_units_along_the_first_axis() -> None:
    state = {
        "a.b.weight": torch.zeros(4, 2),
        "a.b.bias": torch.zeros(4),
        "emb.weight": torch.zeros(5, 3),
        "a.b.count": torch.tensor(3),
        "gain": torch.tensor(1.0),
    }
    table = units(state)
    assert [(x.name, x.units, [s.name for s in x.slots]) for x in table.layers] == [
        ("a.b", 4, ["a.b.weight", "a.b.bias"]),
        ("emb", 5, ["emb.weight"]),
    ]
    assert [slot.name for slot in table.fixed] == ["gain"]
    assert {slot.axis for slot in table.slots} == {0}


def test_the_digest_does_not_depend_on_values_or_dtype() -> None:
    model = nn.Linear(3, 4)
    before = units(model).digest
    with torch.no_grad():
        model.weight.fill_(7)
    assert units(model).digest == before == units(model.double()).digest
    assert len(before) == 8


def test_the_digest_tells_names_shapes_axes_and_groupings_apart() -> None:
    tables = [
        units({"a.w": torch.zeros(4, 4)}),
        units({"b.w": torch.zeros(4, 4)}),
        units({"a.v": torch.zeros(4, 4)}),
        units({"a.w": torch.zeros(4, 2)}),
        units({"a.w": torch.zeros(2, 4)}),
        units({"a.w": torch.zeros(4, 4), "a.s": torch.tensor(0.0)}),
        units(named(m=nn.Linear(4, 4, bias=False))),
        units(named(m=nn.Embedding(4, 4))),
        units(named(m=nn.ConvTranspose1d(4, 4, 1, bias=False))),
        units(named(m=nn.ConvTranspose1d(4, 8, 1, bias=False, groups=2))),
        units(named(m=nn.RNNCell(4, 4, bias=False))),
        units(named(m=nn.GRUCell(4, 4, bias=False))),
    ]
    assert len({table.digest for table in tables}) == len(tables)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = named(conv=nn.Conv2d(inputs, outputs, 1, bias=False), bn=nn.BatchNorm2d(outputs))


def resnet() -> nn.Module:
    stem = named(conv=nn.Conv2d(2, 4, 3), bn=nn.BatchNorm2d(4))
    return named(stem=stem, block1=ResidualBlock(4, 4), block2=ResidualBlock(4, 6), head=nn.Linear(6, 5))


def transformer() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=10, batch_first=True)
    return named(embedding=nn.Embedding(7, 8), block=block, norm=nn.LayerNorm(8), head=nn.Linear(8, 7))


def recurrent() -> nn.Module:
    return named(
        embedding=nn.Embedding(6, 4),
        lstm=nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3),
        up=nn.ConvTranspose1d(6, 4, 2, groups=2),
        head=Custom(),
    )


NETS = [resnet, transformer, recurrent]


@pytest.mark.parametrize("build", NETS)
def test_every_element_of_a_real_network_belongs_to_one_unit_or_is_fixed(build: Callable[[], nn.Module]) -> None:
    assert_units_cover(build())


def test_a_residual_network_keeps_each_batch_norm_with_its_convolution() -> None:
    names = [layer.name for layer in units(resnet()).layers]
    blocks = [f"block{b}.{c}" for b in (1, 2) for c in ("conv1", "conv2", "shortcut.conv")]
    assert names == ["stem.conv", *blocks, "head"]


def noisy(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor + seed
        for name, tensor in state.items()
    }


def oracle_importance(
    held: dict[str, tuple[NDArray[Any], NDArray[np.int64]]],
    parameters: set[str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> dict[str, dict[int, float]]:
    """‖ΔW ⊙ Ŵ ⊘ W‖² per layer and unit, element by element."""
    members: dict[str, list[tuple[int, float, float]]] = {}
    for name in parameters:
        for index in np.ndindex(held[name][1].shape):
            entry = int(held[name][1][index]), float(before[name][index]), float(after[name][index])
            members.setdefault(str(held[name][0][index]), []).append(entry)
    scores: dict[str, dict[int, float]] = {}
    for layer, entries in members.items():
        floor = 1e-3 * np.sqrt(sum(w * w for _, w, _ in entries) / len(entries))
        scores[layer] = {unit: 0.0 for unit, _, _ in entries}
        for unit, old, new in entries:
            scores[layer][unit] += ((new - old) * new / max(abs(old), floor)) ** 2
    return scores


@pytest.mark.parametrize("build", NETS)
def test_select_encode_decode_aggregate_gives_what_loops_over_elements_give(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = build()
    table, start = units(model), noisy(model.state_dict(), 1)
    held = owners(table, start)
    buffers = {name for name, _ in model.named_buffers()}
    aggregator = feddd.Aggregator(start, units=table)
    sent: list[tuple[dict[str, Tensor], dict[str, set[int]], int]] = []
    for client, (dropout, weight) in enumerate([(Fraction(4, 5), 3), (Fraction(1, 2), 5), (Fraction(3, 10), 11)]):
        trained = noisy(start, 10 + client)
        mask = feddd.select(start, trained, float(dropout), units=table)
        scores = oracle_importance(held, set(held) - buffers, start, trained)
        best: dict[str, set[int]] = {}
        for layer, by_unit in scores.items():
            count = max(1, int(len(by_unit) * (1 - dropout) + Fraction(1, 2)))
            best[layer] = set(sorted(by_unit, key=lambda k: (-by_unit[k], k))[:count])
            assert set(mask[layer].nonzero().flatten().tolist()) == best[layer]
        aggregator.add(*feddd.decode(feddd.encode(trained, mask, units=table), start, units=table), weight)
        sent.append((trained, best, weight))
    new = aggregator.result()
    assert set(new) == set(start)
    for name, (layers, numbers) in held.items():
        for index in np.ndindex(numbers.shape):
            got = [(float(p[name][index]), w) for p, best, w in sent if numbers[index] in best[layers[index]]]
            mean = sum(v * w for v, w in got) / sum(w for _, w in got) if got else float(start[name][index])
            assert float(new[name][index]) == pytest.approx(mean, rel=1e-5, abs=1e-6), (name, index)
    for slot in table.fixed:
        mean = sum(float(p[slot.name]) * w for p, _, w in sent) / 19
        assert float(new[slot.name]) == pytest.approx(mean, rel=1e-5)
    for name in set(start) - set(held) - {slot.name for slot in table.fixed}:
        assert torch.equal(new[name], start[name])


@cache
def prepared(
    build: Callable[[], nn.Module],
) -> tuple[Units, dict[str, Tensor], dict[str, tuple[NDArray[Any], NDArray[np.int64]]]]:
    model = build()
    source = noisy(model.state_dict(), 2)
    return units(model), source, owners(units(model), source)


@st.composite
def masks(draw: st.DrawFn, table: Units) -> dict[str, Tensor]:
    return {
        layer.name: torch.tensor(draw(st.lists(st.booleans(), min_size=layer.units, max_size=layer.units)))
        for layer in table.layers
    }


@pytest.mark.parametrize("build", NETS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_put_and_take_are_inverse_and_leave_the_rest_alone(build: Callable[[], nn.Module], data: st.DataObject) -> None:
    table, source, held = prepared(build)
    mask = data.draw(masks(table))
    values = table.take(source, mask)
    assert values.dtype == torch.float32
    assert values.shape == (table.kept_elements(mask),)
    target = {name: torch.full_like(tensor, -9) for name, tensor in source.items()}
    table.put(target, mask, values)
    assert torch.equal(table.take(target, mask), values)
    for name, (layers, numbers) in held.items():
        layer = layers.flat[0]
        assert (layers == layer).all()
        kept = mask[layer].numpy()[numbers]
        assert np.array_equal(target[name].numpy(), np.where(kept, source[name].numpy(), -9)), name


def test_take_without_the_fixed_tensors_leaves_them_out() -> None:
    model = named(c=Custom())
    table = units(model)
    with_fixed, without = (table.take(model.state_dict(), table.full_mask(), fixed=x) for x in (True, False))
    assert with_fixed.tolist() == [*without.tolist(), 2.0]


def network(width: int) -> nn.Module:
    return named(
        conv=nn.Conv2d(2, width, 3),
        bn=nn.BatchNorm2d(width),
        up=nn.ConvTranspose2d(width, width + 1, 2),
        gru=nn.GRU(width, width),
        head=nn.Linear(width, 5),
    )


def test_a_table_fitted_to_narrower_tensors_is_the_narrow_models_own_table() -> None:
    wide, narrow = network(6), network(3)
    table = units(wide)
    assert table.fit(narrow.state_dict()) == units(narrow)
    assert table.fit(narrow.state_dict()).digest == units(narrow).digest
    assert table.fit(wide.state_dict()) is table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv.weight": None}, "lack 'conv.weight'"),
        ({"conv.weight": torch.zeros(3)}, "axes"),
        ({"conv.bias": torch.zeros(4)}, "disagree"),
        ({"gru.weight_hh_l0": torch.zeros(16, 3)}, "gru.weight_hh_l0"),
        ({"head.weight": torch.zeros(0, 3), "head.bias": torch.zeros(0)}, "head.weight"),
        ({"gain": torch.zeros(2)}, "gain"),
    ],
)
def test_tensors_that_cannot_fit_the_table_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    model = network(6)
    model.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    state = {name: tensor for name, tensor in (model.state_dict() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        units(model).fit(state)


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"m": torch.ones(4, dtype=torch.bool), "n": torch.ones(4, dtype=torch.bool)},
        {"m": torch.ones(3, dtype=torch.bool)},
        {"m": torch.ones(4)},
        {"m": torch.ones(4, 1, dtype=torch.bool)},
    ],
)
def test_a_mask_that_is_not_one_boolean_per_unit_is_refused(mask: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="mask"):
        units(named(m=nn.Linear(3, 4))).check_mask(mask)
