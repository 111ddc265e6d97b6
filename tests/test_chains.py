"""Every chain of stages: what is written is what is charged and what arrives, and nothing else can be read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import (
    CHOOSERS,
    COMBINATIONS,
    MODELS,
    TABLES,
    at_clients,
    equal,
    model_of,
    some_units,
    stages_of,
)
from feddd.core.units import units
from feddd.wire.chosen import ChosenUnits, one
from feddd.wire.difference import Deferred, Difference, Feedback
from feddd.wire.exchange import Chain, chain, decode, encode, payload_sizes, read, through_bytes, write
from feddd.wire.format import PayloadError, pack_mask, unpack_mask
from feddd.wire.quantised import Bits, Ternary
from feddd.wire.select import Blocks, Given, Select, TopK, complement
from feddd.wire.stage import At, Known

every_chain = pytest.mark.parametrize(("model", "base", "chooser", "writer"), COMBINATIONS)


def made(model: str, base: str, chooser: str, writer: str, clients: list[int]):  # type: ignore[no-untyped-def]
    table = TABLES[model]
    line = Chain(stages_of(base, chooser, writer, table))
    at = at_clients(table, clients)
    update, states = encode([line] * len(clients), [{} for _ in clients], at)
    return table, line, at, update, states


@every_chain
def test_what_is_read_is_what_the_chain_said_and_its_size_is_the_one_charged(
    model: str, base: str, chooser: str, writer: str
) -> None:
    table, line, at, update, _ = made(model, base, chooser, writer, [0, 3])
    sizes = payload_sizes(line, update, table)
    for place in range(2):
        data = write(line, update, place, table)
        assert len(data) == sizes[place]
        planned = line.planned_bytes(table)
        assert planned == (None if chooser == "TopK" else len(data))
        found = read(line, data, table)
        assert found.chosen.packed(table) == update.chosen.packed(table)[place : place + 1]
        sent = update.chosen.take(update.values, place, table)
        assert torch.equal(found.chosen.take(found.values, 0, table), sent)
        for slot in table.fixed if update.chosen.fixed(table) else ():
            assert torch.equal(found.values[slot.name][0], update.values[slot.name][place])
    straight, written = decode(line, update, at), decode(line, through_bytes([line] * 2, update, table), at)
    for place in range(2):
        assert torch.equal(
            straight.chosen.take(straight.values, place, table), written.chosen.take(written.values, place, table)
        )


@every_chain
def test_a_stack_of_clients_is_its_clients_one_by_one(model: str, base: str, chooser: str, writer: str) -> None:
    table, line, _, update, states = made(model, base, chooser, writer, [0, 3, 5])
    for place, client in enumerate((0, 3, 5)):
        _, _, _, alone, (state,) = made(model, base, chooser, writer, [client])
        assert write(line, update, place, table) == write(line, alone, 0, table)
        assert equal(states[place], state)


@every_chain
def test_without_a_wire_the_same_arrives(model: str, base: str, chooser: str, writer: str) -> None:
    """The quick way of rounding differences works out only what is sent: the same numbers to the bit."""
    table, line, at, update, _ = made(model, base, chooser, writer, [0, 3])
    quick, _ = encode([line] * 2, [{}, {}], at_clients(table, [0, 3], wire=False))
    assert payload_sizes(line, quick, table).tolist() == payload_sizes(line, update, table).tolist()
    a, b = decode(line, quick, at), decode(line, update, at)
    for place in range(2):
        assert torch.equal(a.chosen.take(a.values, place, table), b.chosen.take(b.values, place, table))
        for slot in table.fixed:
            assert torch.equal(a.values[slot.name], b.values[slot.name])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(COMBINATIONS), st.sampled_from(COMBINATIONS), st.data())
def test_hostile_bytes_are_refused_or_are_numbers(
    combination: tuple[str, str, str, str], other: tuple[str, str, str, str], data: st.DataObject
) -> None:
    table, line, _, update, _ = made(*combination, [0])
    good = write(line, update, 0, table)
    kind = data.draw(st.sampled_from(["cut", "longer", "flipped", "another chain", "anything", "anything behind"]))
    if kind == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "longer":
        bad = good + data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "flipped":
        at = data.draw(st.integers(0, 8 * len(good) - 1))
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
    elif kind == "another chain":
        table_of_other, other_line, _, other_update, _ = made(*other, [0])
        bad = write(other_line, other_update, 0, table_of_other)
    elif kind == "anything":
        bad = data.draw(st.binary(max_size=200))
    else:
        bad = good[:16] + data.draw(st.binary(max_size=200))
    try:
        found = read(line, bytes(bad), table)
    except PayloadError:
        return
    assert kind not in ("cut", "longer")
    assert {name: values.shape for name, values in found.values.items()} == {
        slot.name: (1, *slot.shape) for slot in table.slots
    }
    assert kind != "another chain" or combination[0] == other[0]


@pytest.mark.parametrize("name", TABLES)
def test_payloads_of_different_ways_to_write_are_told_apart(name: str) -> None:
    """What differs in Difference or Feedback alone has the same form; everything else is another payload."""
    ways = [one for one in COMBINATIONS if one[0] == name and one[1] == "values"]
    table = TABLES[name]
    lines = {one: Chain(stages_of(*one[1:], table)) for one in ways}
    for way, line in lines.items():
        _, _, _, update, _ = made(*way, [0])
        data = write(line, update, 0, table)
        for other_way, other in lines.items():
            whole_units = {way[2], other_way[2]} <= {"everything", "Select", "Given"}
            if way == other_way or (way[3] == other_way[3] and whole_units):
                continue
            with pytest.raises(PayloadError):
                read(other, data, table)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((TopK(0.1), Select(0.5)), "Select cannot come after TopK"),
        ((Select(0.5), TopK(0.1)), "TopK cannot come after Select"),
        ((Select(0.5), Select(0.5)), "Select cannot come after Select"),
        ((Given(b""), Blocks(b"")), "Blocks cannot come after Given"),
        ((Bits(4), Select(0.5)), "Select cannot come after Bits"),
        ((Bits(4), Bits(4)), "Bits cannot come after Bits"),
        ((Ternary(), Bits(4)), "Bits cannot come after Ternary"),
        ((Bits(8), Ternary()), "Ternary cannot come after Bits"),
        ((Bits(3),), "not 3"),
        ((Bits(4, "up"),), "rounding"),  # type: ignore[arg-type]
        ((TopK(0.0),), "share of TopK"),
        ((TopK(1.5),), "share of TopK"),
        ((Select(0.5, "best"),), "best"),
    ],
    ids=str,
)
def test_a_chain_that_makes_no_sense_is_refused(stages: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Chain(stages)  # type: ignore[arg-type]


# Payloads of earlier versions: the bytes that version 1 of the format has always had.

OLD = {
    "float32": "4664444401000000cc400698ad7c8f4415000000000000bf0000c03e0000a03f000040bf0000403f0000a0bf0000c0be"
    "0000003f0000b03f0000803e0000903f000000000000603f000080be0000203f000000bf0000c03e000040bf000000be0000403f0000a0bf0000003f"
    "0000b0bf",
    "8 bits": "4664444401010000cc400698ad7c8f4415000000c662313c8542213c8542213c0000b0bfd22373bb4d81da337f19680051e63ace"
    "23b3f34d8133",
    "4 bits": "4664444401020000cc400698ad7c8f44150000009224493e6edb363e6edb363e0000b0bf2dc6953e1705e5e3b25f39",
    "2 bits": "4664444401030000cc400698ad7c8f44150000000000b03f0000a03f0000a03f0000b0bf174d110d7c07",
    "blocks": "4664444401040000e883146219462abc350000000000b0bf000000bf0000c03e0000803f000080bf000000be0000003f000020bf"
    "0000903f00000000000090bf0000203f000000bf0000c03e",
    "sparse": "4664444401050000cc400698ad7c8f44070000004c2e26010000a03f0000a0bf0000b03f0000b0bf0000a03f0000a0bf"
    "0000b0bf",
    "ternary": "4664444401060000cc400698ad7c8f44070000006edba63f4c2e26016a",
}


class Fixed(At):
    """Rounds with one generator."""

    def rngs(self, purpose: str) -> list[np.random.Generator]:
        return [np.random.default_rng(7)]


@pytest.mark.parametrize("name", OLD)
def test_the_bytes_of_earlier_versions_are_written_and_read(name: str) -> None:
    model = MODELS["layers" if name == "blocks" else "statistics"]
    table, start, stack = units(model), 0, {}
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            numbers = torch.arange(start, start + tensor.numel())
            stack[key] = (numbers.mul(7).remainder(23).sub(11) / 8).reshape(1, *tensor.shape)
            start += tensor.numel()
    some = {"conv": torch.tensor([True, False, True]), "head": torch.tensor([False, True])}
    block = {"0": torch.tensor([True, False, True, False]), "2": torch.tensor([True, True])}
    units_sent = Given(pack_mask(some, table)) if name != "blocks" else Blocks(pack_mask(block, table))
    line = {
        "float32": chain(units_sent),
        "8 bits": chain(units_sent, Bits(8)),
        "4 bits": chain(units_sent, Bits(4)),
        "2 bits": chain(units_sent, Bits(2)),
        "blocks": chain(units_sent),
        "sparse": chain(TopK(0.2)),
        "ternary": chain(TopK(0.2), Ternary()),
    }[name]
    update, _ = encode([line], [{}], Fixed(table, [0], 1, 0, Known({}, {}), [None], stack, stack, wire=True))
    assert write(line, update, 0, table).hex() == OLD[name]
    found = read(line, bytes.fromhex(OLD[name]), table)
    assert torch.equal(found.chosen.take(found.values, 0, table), update.chosen.take(update.values, 0, table))


def test_error_feedback_that_counts_replaced_values_owes_what_a_loop_owes() -> None:
    """A full download replaces values that were never sent: what they were ahead of the reference is owed."""
    table = TABLES["statistics"]
    line = chain(Difference(), Feedback(replaced=True), Select(0.5, "delta"), Bits(2, "nearest"))
    owed = {slot.name: torch.zeros(slot.shape) for slot in table.slots}
    state: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}  # the client's own values of the last round
    last = table.full_mask()
    for number in range(1, 7):
        full = number % 2 == 1
        known = Known(*(model_of(table, 10 * number + n) for n in range(4)))
        received = table.full_mask() if full else last
        at = at_clients(table, [2], round=number, known=known, masks=[None if full else pack_mask(last, table)])
        update, (state,) = encode([line], [state], at)
        assert isinstance(update.chosen, ChosenUnits)
        for layer in table.layers:
            for unit in range(layer.units):
                wanted = {}
                for slot in layer.slots:
                    if full and kept and not last[layer.name][unit]:
                        owed[slot.name][unit] += kept[slot.name][unit] - known.replaced[slot.name][unit]
                    base = known.sent if received[layer.name][unit] else known.reference
                    wanted[slot.name] = (at.after[slot.name][0] - base[slot.name])[unit] + owed[slot.name][unit]
                if not update.chosen.masks[layer.name][0][unit]:
                    continue
                step = max(float(own.abs().max()) for own in wanted.values())
                for name, own in wanted.items():
                    came = step * torch.floor(own / step + 0.5).clamp(-1, 1)
                    assert torch.allclose(update.values[name][0][unit], came, atol=1e-5)
                    owed[name][unit] = own - came
        last, kept = one(update.chosen.masks, 0), one(at.after, 0)
        expected = torch.cat([owed[slot.name].reshape(-1) for slot in table.slots])
        torch.testing.assert_close(state["residual"], expected, rtol=0, atol=1e-4)
    full_at = replace(at, masks=[None])
    lines = [line, chain(Difference(), Feedback(), *line.stages[2:])]
    counted, not_counted = (encode([each], [state], full_at)[1][0]["residual"] for each in lines)
    assert not torch.equal(counted, not_counted)


@pytest.mark.parametrize("rounding", ["random", "nearest"])
@pytest.mark.parametrize("model", TABLES)
def test_rounded_differences_to_a_masked_download_are_what_a_loop_gives(model: str, rounding: Any) -> None:
    """A client that was sent some units takes the others to the reference; the server adds its own values and that."""
    table = TABLES[model]
    line = chain(Difference(), Select(0.5, "delta"), Bits(4, rounding))
    known = Known(*(model_of(table, seed) for seed in (1, 2, 3)))
    packed = [some_units(table), None, pack_mask(complement(unpack_mask(some_units(table), table)), table)]
    ways = [at_clients(table, [0, 3, 5], wire=wire, known=known, masks=packed) for wire in (False, True)]
    (quick, _), (written, _) = (encode([line] * 3, [{}] * 3, at) for at in ways)
    assert isinstance(quick.values, Deferred)
    assert not isinstance(written.values, Deferred)
    found, arrived = (decode(line, update, ways[0]) for update in (quick, written))
    assert isinstance(found.chosen, ChosenUnits)
    for place, layer in itertools.product(range(3), table.layers):
        received = table.full_mask() if packed[place] is None else unpack_mask(packed[place] or b"", table)
        for unit in np.flatnonzero(found.chosen.masks[layer.name][place]):
            at_client, at_server = (
                (known.sent, known.server) if received[layer.name][unit] else (known.reference, known.reference)
            )
            moved = {s.name: (ways[0].after[s.name][place] - at_client[s.name])[unit] for s in layer.slots}
            step = max(float(own.abs().max()) for own in moved.values()) / 7
            for name, own in moved.items():
                value = found.values[name][place][unit]
                assert torch.equal(value, arrived.values[name][place][unit])
                assert torch.equal(quick.values[name][place][unit], written.values[name][place][unit])
                code = (value - at_server[name][unit]) / step
                assert float((code - code.round()).abs().max()) < 1e-3
                assert float((code - own / step).abs().max()) <= (0.5 if rounding == "nearest" else 1.0) + 1e-3


def test_error_feedback_owes_what_a_loop_owes() -> None:
    """Number by number: what is sent of a unit is rounded, the rest is owed; units that stay owe what they owed."""
    table = TABLES["statistics"]
    line = chain(Difference(), Feedback(), *CHOOSERS["Given"](table), Bits(2, "nearest"))
    mask = one(made("statistics", "values", "Given", "float32", [0])[3].chosen.masks, 0)
    owed = {slot.name: torch.zeros(slot.shape) for slot in table.slots}
    state: dict[str, torch.Tensor] = {}
    for number in range(1, 5):
        at = at_clients(table, [2], round=number)
        update, (state,) = encode([line], [state], at)
        for layer in table.layers:
            for unit in range(layer.units):
                if not mask[layer.name][unit]:
                    continue
                wanted = {
                    slot.name: (at.after[slot.name][0] - at.known.sent[slot.name] + owed[slot.name])[unit]
                    for slot in layer.slots
                }
                step = max(float(own.abs().max()) for own in wanted.values())
                for slot_name, own in wanted.items():
                    came = step * torch.floor(own / step + 0.5).clamp(-1, 1)
                    assert torch.allclose(update.values[slot_name][0][unit], came, atol=1e-5)
                    owed[slot_name][unit] = own - came
        expected = torch.cat([owed[slot.name].reshape(-1) for slot in table.slots])
        torch.testing.assert_close(state["residual"], expected, rtol=0, atol=1e-4)
    assert float(state["residual"].abs().max()) > 0.1
