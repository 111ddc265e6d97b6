"""Nested sub-models: slicing, embedding, coverage, the paper's parameter counts, and that a slice computes the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from feddd.core.submodel import coverage, narrow_coverage, prefix, slice_model
from feddd.core.units import Params, Units, units
from feddd.world.models import build, widths


class Net(nn.Module):
    """Every layout of units at two widths; `flat` sees the convolution flattened over 2 × 2 places."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3)
        self.bn = nn.BatchNorm2d(channels)
        self.flat = nn.Linear(channels * 4, hidden)
        self.up = nn.ConvTranspose1d(2 * channels, 2 * channels, 2, groups=2)
        self.lstm = nn.LSTM(hidden, hidden)
        self.embedding = nn.Embedding(5, hidden)
        self.decoder = nn.Linear(hidden, 5)
        self.decoder.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))


def randomised(model: nn.Module, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=g) for n, t in model.state_dict().items() if t.is_floating_point()}


def embed(target: Params, values: Params, wide: Units, narrow: Units) -> None:
    """The inverse of a slice: write a sub-model's values into their places in the global tensors."""
    for slot, own in zip(wide.slots, narrow.slots, strict=True):
        if not own.shape:
            target[slot.name].copy_(values[slot.name])
            continue
        rows = own.rows(values[slot.name])
        prefix(slot.rows(target[slot.name]), rows.shape).copy_(rows)


@settings(max_examples=20, deadline=None)
@given(channels=st.integers(1, 4), hidden=st.integers(1, 5), seed=st.integers(0, 99))
def test_slicing_what_was_embedded_gives_it_back(channels: int, hidden: int, seed: int) -> None:
    wide_model, narrow_model = Net(4, 5), Net(channels, hidden)
    wide, narrow = units(wide_model), units(narrow_model)
    target, values = randomised(wide_model, seed), randomised(narrow_model, seed + 1)
    embed(target, values, wide, narrow)
    sliced = slice_model(target, wide, narrow)
    assert set(sliced) == set(values)
    for slot in narrow.slots:
        assert torch.equal(sliced[slot.name], values[slot.name])
        assert sliced[slot.name].is_contiguous()
    assert sliced["decoder.weight"] is sliced["embedding.weight"]


def test_embedding_writes_nothing_outside_the_sub_model() -> None:
    wide, narrow = units(Net(4, 5)), units(Net(2, 3))
    target = {slot.name: torch.zeros(slot.shape) for slot in wide.slots}
    embed(target, {slot.name: torch.ones(slot.shape) for slot in narrow.slots}, wide, narrow)
    assert sum(int(tensor.sum()) for tensor in target.values()) == narrow.elements
    assert target["conv.bias"].tolist() == [1, 1, 0, 0]
    assert target["flat.weight"][0].tolist() == [1] * 8 + [0] * 8
    assert target["lstm.bias_ih_l0"].tolist() == [1, 1, 1, 0, 0] * 4
    # [in 8, out/groups 4]: two groups of 4 inputs and 4 outputs, of which the narrow model has 2 and 2
    assert target["up.weight"][:, :, 0].sum(1).tolist() == [2, 2, 0, 0] * 2


def test_a_slice_is_a_copy_with_the_first_units_of_every_layer() -> None:
    model = build("mlp", (1, 2, 2), 3)
    wide = units(model)
    narrow = wide.fit(
        {
            "fc1.weight": torch.empty(10, 4),
            "fc1.bias": torch.empty(10),
            "fc2.weight": torch.empty(64, 10),
            "fc2.bias": torch.empty(64),
            "fc3.weight": torch.empty(3, 64),
            "fc3.bias": torch.empty(3),
        }
    )
    state = model.state_dict()
    sliced = slice_model(state, wide, narrow)
    assert torch.equal(sliced["fc1.weight"], state["fc1.weight"][:10])
    assert torch.equal(sliced["fc2.weight"], state["fc2.weight"][:, :10])
    sliced["fc3.weight"].zero_()
    assert state["fc3.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["heterogeneous-a", "heterogeneous-b"])
@pytest.mark.parametrize("width", [1, 4])
def test_a_narrow_network_computes_what_the_wide_one_does_with_its_extra_units_silent(name: str, width: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(width)
        wide_model, narrow_model = build(name, (3, 32, 32), 10), build(name, (3, 32, 32), 10, width)
        images = torch.randn(1, 3, 32, 32)
    wide, narrow = units(wide_model), units(narrow_model)
    state = wide_model.state_dict()
    narrow_model.load_state_dict(slice_model(state, wide, narrow))
    for layer, own in zip(wide.layers, narrow.layers, strict=True):
        for slot in layer.slots:
            state[slot.name][own.units :] = 0.0
    with torch.no_grad():
        assert torch.allclose(narrow_model(images), wide_model(images), atol=1e-5)
        assert wide_model(images).abs().max() > 1e-3


def test_a_flattened_convolution_feeds_a_linear_layer_through_the_matching_columns() -> None:
    def network(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(1, channels, 2), nn.Flatten(), nn.Linear(channels * 9, 2))

    wide_model, narrow_model = network(5), network(2)
    state = wide_model.state_dict()
    narrow_model.load_state_dict(slice_model(state, units(wide_model), units(narrow_model)))
    images = torch.randn(3, 1, 4, 4)
    with torch.no_grad():
        features = nn.functional.conv2d(images, state["0.weight"][:2], state["0.bias"][:2])
        by_channel = state["2.weight"].reshape(2, 5, 3, 3)[:, :2]
        expected = torch.einsum("nchw,ochw->no", features, by_channel) + state["2.bias"]
        assert torch.allclose(narrow_model(images), expected, atol=1e-6)


def test_a_wider_model_is_no_slice() -> None:
    wide, narrow = Net(4, 5), Net(2, 3)
    with pytest.raises(ValueError, match="no prefix"):
        slice_model(randomised(narrow, 0), units(narrow), units(wide))
    with pytest.raises(ValueError, match="no prefix"):
        embed(randomised(narrow, 0), randomised(wide, 0), units(narrow), units(wide))


def test_the_prefix_is_a_view() -> None:
    tensor = torch.zeros(3, 4)
    prefix(tensor, (2, 1)).fill_(1.0)
    assert tensor.sum() == 2
    with pytest.raises(ValueError, match="no prefix"):
        prefix(tensor, (3,))


def linear(count: int) -> Units:
    return units({"l.weight": torch.zeros(count, 2)})


def test_coverage_is_the_share_of_clients_that_have_the_unit() -> None:
    share = coverage(linear(4), [linear(4), linear(2), linear(3), linear(2)])
    assert share["l"].tolist() == [1.0, 1.0, 0.5, 0.25]
    assert narrow_coverage(share, linear(3))["l"].tolist() == [1.0, 1.0, 0.5]


def test_coverage_of_a_unit_nobody_has_is_zero_and_of_no_clients_is_an_error() -> None:
    assert coverage(linear(2), [linear(1)])["l"].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="at least one client"):
        coverage(linear(2), [])


A = [3_973_194, 2_203_466, 2_191_206, 2_153_446, 1_710_950]
B = [3_973_194, 1_587_786, 1_578_826, 1_458_090, 609_962]
COUNTS = [("mlp", (1, 28, 28), [85_614]), ("cnn1", (1, 28, 28), [21_840]), ("cnn2", (3, 32, 32), [587_194])]
COUNTS += [("heterogeneous-a", (3, 32, 32), A), ("heterogeneous-b", (3, 32, 32), B)]


@pytest.mark.parametrize(("name", "shape", "counts"), COUNTS)
def test_the_papers_models_have_the_papers_parameter_counts(
    name: str, shape: tuple[int, int, int], counts: list[int]
) -> None:
    assert widths(name) == len(counts)
    with torch.device("meta"):
        models = [build(name, shape, 10, width) for width in range(len(counts))]
    assert [units(model).elements for model in models] == counts
    assert [sum(p.numel() for p in model.parameters()) for model in models] == counts
