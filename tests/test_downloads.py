"""Downloads: values, moves of the reference, and what whoever missed some of them is sent and charged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import feddd
from chains import TABLES, equal, model_of, some_units
from feddd.wire.chosen import one
from feddd.wire.down import Moves, Reference, Sending, SubModel, Values, over_the_wire, prepare, reference_after
from feddd.wire.exchange import Chain, chain, payload_sizes, read
from feddd.wire.quantised import Bits, Ternary
from feddd.wire.select import TopK

TABLE = TABLES["statistics"]
WHOLE = feddd.payload_size(TABLE.full_mask(), model_of(TABLE, 0), units=TABLE)
CODINGS = {"8 bits": chain(Bits(8)), "2 bits": chain(Bits(2)), "ternary": chain(TopK(0.1), Ternary())}
every_coding = pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)


def sending(down: Values, model: dict[str, Tensor], reference: Reference | None, number: int) -> Sending:
    return prepare([down] * 3, model, reference, 3, TABLE, round=number, seed=5)


def test_without_a_reference_values_go_down_as_they_are() -> None:
    model = model_of(TABLE, 1)
    sent = sending(Values(), model, None, 1)
    assert sent.reference is None
    assert sent.sent is model
    assert reference_after(sent, [0]) is None
    masked = Values(some_units(TABLE))
    assert [sent.download_bytes(down, 0, TABLE) for down in (Values(), masked)] == [
        WHOLE,
        masked.line.planned_bytes(TABLE),
    ]


@pytest.mark.parametrize("name", ["statistics", "layers"])
def test_what_goes_over_the_wire_is_what_was_sent_and_zero_elsewhere(name: str) -> None:
    table = TABLES[name]
    model, mask = model_of(table, 1), some_units(table)
    downs = [Values(), Values(mask)] + ([SubModel(mask)] if name == "layers" else [])
    for down in downs:
        (found,) = [one(over_the_wire([down], model, table), 0)]
        for key, values in found.items():
            assert bool(((values == model[key]) | (values == 0)).all())
        changed = sum(int((values != 0).sum()) for values in found.values())
        assert (changed == table.elements) == (down == Values())


@every_coding
def test_the_reference_moves_as_in_a_loop_and_whoever_missed_moves_catches_up(coding: Chain) -> None:
    """Clients 0, 1, 2 take part in every round, in every other one, and only in the first and the last."""
    down, reference, moves = Moves(None, coding, broadcast=True), None, {}
    holds: dict[int, dict[str, Tensor]] = {}
    known: dict[int, int] = {}
    for number in range(1, 7):
        model = {
            key: values + 0.1 * number * model_of(TABLE, number)[key] for key, values in model_of(TABLE, 0).items()
        }
        sent = sending(down, model, reference, number)
        if sent.coded is None:
            assert equal(sent.sent, model)
        else:
            moves[number - 1] = sent.payload(down, TABLE, TABLE)
            assert len(moves[number - 1]) == payload_sizes(coding, sent.coded, TABLE)[0]
        there = [client for client, often in enumerate((1, 2, 5)) if (number - 1) % often == 0]
        for client in there:
            size = sent.download_bytes(down, client, TABLE)
            late = [moves[one] for one in range(known.get(client, number) + 1, number)]
            if client not in holds or sum(len(move) for move in late) > WHOLE:
                assert size == WHOLE
                assert sent.missed(down, client, TABLE) is None
                holds[client] = dict(sent.sent)
            else:
                assert size == sum(len(move) for move in late)
                assert sent.missed(down, client, TABLE) == len(late) - 1
                for move in late:
                    difference = one(read(coding, move, TABLE).values, 0)
                    holds[client] = {key: values + difference[key] for key, values in holds[client].items()}
            known[client] = number - 1
            assert equal(holds[client], sent.sent)
        reference = reference_after(sent, there)
        assert reference is not None
        assert reference.number == number - 1
        assert reference.held.tolist() == [known.get(client, -1) for client in range(3)]
        assert equal(reference.model, sent.sent)


def test_errors_do_not_add_up_because_differences_are_those_of_the_servers_own_model() -> None:
    down, reference = Moves(None, chain(Bits(8)), broadcast=True), None
    model = model_of(TABLE, 1)
    off = []
    for number in range(1, 6):  # the server's model stays: what is left is rounded again, and shrinks
        sent = sending(down, model, reference, number)
        reference = reference_after(sent, [0])
        off.append(max(float((sent.sent[key] - model[key]).abs().max()) for key in model))
        model = {key: values + (0.5 if number == 1 else 0.0) for key, values in model.items()}
    assert off[0] == 0.0
    assert off[1] <= 0.5 / 127 * 1.001
    assert off[-1] <= max(off[1], 1e-6)


def test_between_broadcasts_the_reference_stays_and_whoever_missed_one_catches_up() -> None:
    model, mask = model_of(TABLE, 1), some_units(TABLE)
    reference = Reference(model, 3, np.array([3, 2, -1]))
    down = Moves(mask, chain(Bits(4)))
    later = {key: values + 0.1 for key, values in model.items()}
    sent = sending(down, later, reference, 5)
    assert sent.reference is reference
    assert not sent.moves
    own = len(sent.payload(down, TABLE, TABLE))
    coded = feddd.payload_size(TABLE.full_mask(), model, units=TABLE, bits=4)
    assert own == sent.coding_of(down).planned_bytes(TABLE) < coded
    sizes = [sent.download_bytes(down, client, TABLE) for client in range(3)]
    assert sizes == [own, own + coded, own + WHOLE]
    found = one(read(sent.coding_of(down), sent.payload(down, TABLE, TABLE), TABLE).values, 0)
    for key, values in found.items():
        moved = values != 0
        assert torch.equal((model[key] + values)[moved], sent.sent[key][moved])
