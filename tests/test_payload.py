"""The wire format: byte by byte, there and back, its size, and everything it must refuse."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import feddd
from feddd.core.units import Units, units
from feddd.wire.format import coverage_size, droppable_bytes, fixed_bytes, pack_mask, unpack_mask
from feddd.world.models import build, widths

Params = dict[str, Tensor]


class Net(nn.Module):
    """Layers of every layout: convolution with statistics, grouped transposed, recurrent, tied, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 2)
        self.bn = nn.BatchNorm2d(5)
        self.up = nn.ConvTranspose1d(4, 6, 2, groups=2)
        self.gru = nn.GRU(2, 3)
        self.embedding = nn.Embedding(7, 4)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))


@cache
def net() -> tuple[Units, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Net()
    return units(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}


@st.composite
def masks(draw: st.DrawFn, table: Units) -> dict[str, Tensor]:
    bits = {x.name: draw(st.integers(0, 2**x.units - 1)) for x in table.layers}
    return {x.name: torch.tensor([bool(bits[x.name] >> k & 1) for k in range(x.units)]) for x in table.layers}


def test_a_payload_written_by_hand_is_read_byte_by_byte() -> None:
    # Layers a (3 units: weight [3, 2], bias [3]) and b (2 units: weight [2, 1]), kept: a0, a2, b1. Bits 1,0,1,0,1.
    like = {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3), "b.weight": torch.zeros(2, 1)}
    digest = units(like).digest
    header = b"FdDD" + bytes([1, 0, 0, 0]) + digest
    mask_bits = bytes([0b10101, 0, 0, 0])
    values = struct.pack("<7f", 1.0, 2.0, 5.0, 6.0, 10.0, 30.0, -0.5)
    decoded, mask = feddd.decode(header + mask_bits + values, like)
    assert decoded["a.weight"].tolist() == [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]]
    assert decoded["a.bias"].tolist() == [10.0, 0.0, 30.0]
    assert decoded["b.weight"].tolist() == [[0.0], [-0.5]]
    assert {name: kept.tolist() for name, kept in mask.items()} == {"a": [True, False, True], "b": [False, True]}
    assert feddd.encode(decoded, mask) == header + mask_bits + values


def test_values_are_little_endian() -> None:
    data = feddd.encode({"a": torch.tensor([1.0])}, {"": torch.tensor([True])})
    assert data[-4:] == bytes([0x00, 0x00, 0x80, 0x3F])


def test_the_mask_takes_four_bytes_for_every_32_units_begun() -> None:
    for count, size in [(1, 4), (31, 4), (32, 4), (33, 8), (64, 8), (65, 12)]:
        like = {"l.w": torch.zeros(count)}
        assert len(feddd.encode(like, {"l": torch.zeros(count, dtype=torch.bool)})) == 16 + size


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_decode_gives_what_encode_was_given(data: st.DataObject, seed: int) -> None:
    table, like = net()
    mask = data.draw(masks(table))
    generator = torch.Generator().manual_seed(seed)
    params = {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in like.items()
    }
    encoded = feddd.encode(params, mask, units=table)
    values, returned = feddd.decode(encoded, like, units=table)
    assert set(values) == {name for name, tensor in like.items() if tensor.is_floating_point()}
    assert all(torch.equal(returned[name], mask[name]) for name in mask)
    assert torch.equal(values["scale"], params["scale"])
    for row, keep in enumerate(mask["conv"].tolist()):
        for name in ("conv.weight", "conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"):
            assert torch.equal(values[name][row], params[name][row] * keep)
    for k, keep in enumerate(mask["embedding"].tolist()):
        assert torch.equal(values["embedding.weight"][:, k], params["embedding.weight"][:, k] * keep)
    for k, keep in enumerate(mask["gru.l0"].tolist()):
        assert torch.equal(values["gru.bias_hh_l0"][k::3], params["gru.bias_hh_l0"][k::3] * keep)
    for k, keep in enumerate(mask["up"].tolist()):
        block = slice(k // 3 * 2, k // 3 * 2 + 2), k % 3
        assert torch.equal(values["up.weight"][block], params["up.weight"][block] * keep)
    assert feddd.encode(values | {"bn.num_batches_tracked": torch.tensor(9)}, mask, units=table) == encoded


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_size_without_encoding_is_the_length_of_the_encoding(data: st.DataObject) -> None:
    table, like = net()
    mask = data.draw(masks(table))
    assert feddd.payload_size(mask, like, units=table) == len(feddd.encode(like, mask, units=table))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_travel_as_float32_and_come_back_in_their_own(dtype: torch.dtype) -> None:
    params = {"l.weight": torch.tensor([[1 / 3], [2.0]]).to(dtype)}
    mask = {"l": torch.tensor([True, True])}
    data = feddd.encode(params, mask)
    assert len(data) == 16 + 4 + 2 * 4
    assert struct.unpack("<2f", data[-8:]) == (float(params["l.weight"][0, 0].float()), 2.0)
    values, _ = feddd.decode(data, params)
    assert values["l.weight"].dtype == dtype
    assert torch.equal(values["l.weight"], params["l.weight"].float().to(dtype))


def test_a_model_of_scalars_and_an_empty_mask_can_travel() -> None:
    scalar = {"gain": torch.tensor(3.0)}
    assert feddd.decode(feddd.encode(scalar, {}), scalar)[0]["gain"] == 3.0
    like = {"l.w": torch.ones(2)}
    values, mask = feddd.decode(feddd.encode(like, {"l": torch.tensor([False, False])}), like)
    assert values["l.w"].tolist() == [0.0, 0.0]
    assert not mask["l"].any()


def test_decoded_values_do_not_share_memory_with_the_message() -> None:
    like = {"l.w": torch.ones(2)}
    message = bytearray(feddd.encode(like, {"l": torch.tensor([True, True])}))
    values, _ = feddd.decode(memoryview(message), like)
    message[-8:] = bytes(8)
    assert values["l.w"].tolist() == [1.0, 1.0]


PAPER = [("mlp", (1, 28, 28), 0), ("cnn1", (1, 28, 28), 0), ("cnn2", (3, 32, 32), 0)]
PAPER += [(name, (3, 32, 32), w) for name in ("heterogeneous-a", "heterogeneous-b") for w in range(widths(name))]


@pytest.mark.parametrize(("name", "shape", "width"), PAPER)
def test_header_and_mask_cost_at_most_one_percent_for_the_papers_models(
    name: str, shape: tuple[int, ...], width: int
) -> None:
    with torch.device("meta"):
        like = build(name, shape, 10, width).state_dict()
    for dropout in (0.0, 0.8):
        mask = {}
        kept_bytes = 0
        for layer in {key.rpartition(".")[0] for key in like}:
            count = like[f"{layer}.bias"].shape[0]
            keep = max(1, int(count * (1 - dropout) + 0.5))
            mask[layer] = torch.arange(count) < keep
            kept_bytes += 4 * keep * (like[f"{layer}.weight"][0].numel() + 1)
        size = feddd.payload_size(mask, like)
        assert kept_bytes < size <= 1.01 * kept_bytes


def test_the_parts_of_a_payload_add_up() -> None:
    table, like = net()
    assert fixed_bytes(table) == 16 + 4 + 4  # header, 5 + 6 + 3 + 4 + 7 = 25 mask bits, one scalar
    droppable = 5 * (4 + 1) + 5 * 4 + 4 * 3 * 2 + 6 + 9 * (2 + 3 + 2) + 7 * 4 + 7
    assert droppable_bytes(table) == 4 * droppable
    assert len(feddd.encode(like, table.full_mask(), units=table)) == fixed_bytes(table) + droppable_bytes(table)
    assert coverage_size(table) == 16 + 4 * 25


def valid() -> tuple[Units, Params, dict[str, Tensor], bytes]:
    table, like = net()
    mask = {x.name: torch.arange(x.units) % 2 == 0 for x in table.layers}
    return table, like, mask, feddd.encode(like, mask, units=table)


def replaced(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "too few"),
    "shorter than a header": (lambda d: d[:15], "too few"),
    "shorter than its mask": (lambda d: d[:19], "too few"),
    "wrong magic": (lambda d: replaced(d, 0, b"FdDE"), "magic"),
    "a later version": (lambda d: replaced(d, 4, b"\2"), "version 2"),
    "another encoding": (lambda d: replaced(d, 5, b"\1"), "encoding 1"),
    "reserved byte 6": (lambda d: replaced(d, 6, b"\1"), "not known"),
    "reserved byte 7": (lambda d: replaced(d, 7, b"\1"), "not known"),
    "another digest": (lambda d: replaced(d, 8, bytes([d[8] ^ 1])), "another layer table"),
    "one byte less": (lambda d: d[:-1], "announces"),
    "one value less": (lambda d: d[:-4], "announces"),
    "one byte more": (lambda d: d + b"\0", "announces"),
    "one value more": (lambda d: d + bytes(4), "announces"),
    "only header and mask": (lambda d: d[:20], "announces"),
    "a mask bit more": (lambda d: replaced(d, 16, bytes([d[16] | 2])), "announces"),
    "a padding bit": (lambda d: replaced(d, 19, bytes([d[19] | 0x80])), "padding"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_malformed_payload_is_refused_with_its_reason(kind: str) -> None:
    table, like, _, data = valid()
    damage, message = BROKEN[kind]
    feddd.decode(data, like, units=table)
    with pytest.raises(feddd.PayloadError, match=message):
        feddd.decode(damage(data), like, units=table)


def test_the_payload_of_another_model_is_refused_even_when_the_sizes_agree() -> None:
    one, other = {"a.w": torch.ones(4, 2)}, {"b.w": torch.ones(4, 2)}
    data = feddd.encode(one, {"a": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(feddd.PayloadError, match="another layer table"):
        feddd.decode(data, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_when_asked(bad: float) -> None:
    like = {"l.w": torch.ones(3)}
    mask = {"l": torch.tensor([True, False, True])}
    data = feddd.encode({"l.w": torch.tensor([1.0, 2.0, bad])}, mask)
    assert not torch.isfinite(feddd.decode(data, like)[0]["l.w"]).all()
    with pytest.raises(feddd.PayloadError, match="not finite"):
        feddd.decode(data, like, finite=True)
    dropped = feddd.encode({"l.w": torch.tensor([1.0, bad, 2.0])}, mask)
    assert feddd.decode(dropped, like, finite=True)[0]["l.w"].tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("huge", [3.5e38, -1e300])
def test_a_number_that_float32_cannot_hold_is_refused_not_turned_into_infinity(huge: float) -> None:
    params = {"l.w": torch.tensor([1.0, huge, math.inf], dtype=torch.float64)}
    with pytest.raises(ValueError, match="more than float32 can carry"):
        feddd.encode(params, {"l": torch.tensor([True, True, False])})
    # What is not sent does no harm, and an infinity stays what it is.
    data = feddd.encode(params, {"l": torch.tensor([True, False, True])})
    assert struct.unpack("<2f", data[-8:]) == (1.0, math.inf)
    largest = {"l.w": torch.tensor([float(np.finfo(np.float32).max)], dtype=torch.float64)}
    assert np.frombuffer(feddd.encode(largest, {"l": torch.tensor([True])})[-4:], "<f4")[0] == np.finfo(np.float32).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_that_overflow_the_receivers_precision_are_not_finite(dtype: torch.dtype) -> None:
    data = feddd.encode({"l.w": torch.tensor([3.4e38, 1.0])}, {"l": torch.tensor([True, True])})
    like = {"l.w": torch.zeros(2, dtype=dtype)}
    assert feddd.decode(data, like)[0]["l.w"][0].isinf()
    with pytest.raises(feddd.PayloadError, match="receiver's precision"):
        feddd.decode(data, like, finite=True)


def test_a_payload_error_is_a_value_error() -> None:
    assert issubclass(feddd.PayloadError, ValueError)


@pytest.mark.parametrize("message", ["header only", "every bit set and no values", "noise"])
def test_nothing_large_is_allocated_for_a_message_that_lies(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    like = {"l.w": torch.zeros(64, 100_000)}
    table = units(like)
    data = b"FdDD" + bytes([1, 0, 0, 0]) + table.digest
    data = {"header only": data, "every bit set and no values": data + b"\xff" * 8, "noise": b"\xff" * 64}[message]

    def refuse(*args: Any, **_: Any) -> Tensor:
        raise MemoryError(f"asked for {args}")

    def mask(units: int, *, dtype: torch.dtype) -> Tensor:
        assert (units, dtype) == (64, torch.bool)
        return torch.from_numpy(np.ones(units, np.bool_))

    for maker in ("zeros", "empty", "full", "zeros_like", "empty_like", "tensor"):
        monkeypatch.setattr(torch, maker, refuse)
    monkeypatch.setattr(torch, "ones", mask)
    tracemalloc.start()  # sees numpy's memory, which torch's tensors made from it share
    try:
        with pytest.raises(feddd.PayloadError):
            feddd.decode(data, like, units=table)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_payload_errors(data: bytes) -> None:
    table, like = net()
    with pytest.raises(feddd.PayloadError):
        feddd.decode(data, like, units=table)


@settings(max_examples=80, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=3),
    cut=st.integers(-5, 40),
    tail=st.binary(max_size=6),
)
def test_a_damaged_payload_is_refused_or_read_as_what_it_says(
    edits: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    table, like, _, data = valid()
    damaged = bytearray(data[: len(data) - max(cut, 0)] + tail)
    for at, flip in edits:
        damaged[at % len(damaged)] ^= flip
    try:
        values, mask = feddd.decode(bytes(damaged), like, units=table)
    except feddd.PayloadError:
        return
    # Accepted: then it is a well-formed payload, and writing it again gives the same bytes (NaN payloads aside).
    again = feddd.encode(values, mask, units=table)
    assert again[:20] == bytes(damaged[:20])
    one, two = (np.frombuffer(x, "<f4", offset=20) for x in (again, bytes(damaged)))
    assert np.array_equal(one, two, equal_nan=True)


def test_a_wrong_mask_is_refused_before_anything_is_written() -> None:
    table, like, mask, _ = valid()
    wrong = mask | {"conv": torch.ones(4, dtype=torch.bool)}
    with pytest.raises(ValueError, match="conv"):
        feddd.encode(like, wrong, units=table)
    with pytest.raises(ValueError, match="conv"):
        feddd.payload_size(wrong, like, units=table)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_packed_masks_come_back(data: st.DataObject) -> None:
    table, _ = net()
    mask = data.draw(masks(table))
    packed = pack_mask(mask, table)
    bits = [bit for x in table.layers for bit in mask[x.name].tolist()]
    assert int.from_bytes(packed, "little") == sum(1 << k for k, bit in enumerate(bits) if bit)
    assert all(torch.equal(kept, mask[name]) for name, kept in unpack_mask(packed, table).items())
    with pytest.raises(feddd.PayloadError):
        unpack_mask(packed + b"\0", table)
