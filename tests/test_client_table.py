"""One table for what a server knows of its clients."""

import numpy as np
import pytest

from feddd.strategies.clients import FACTS, ClientTable


def test_nothing_is_known_of_new_clients() -> None:
    table = ClientTable.unknown(2)
    assert len(table) == 2
    assert table["masks"].tolist() == [None, None]
    assert np.isnan(table["losses"]).all()
    assert table["last_round"].tolist() == [0, 0]
    assert not table.own


def test_recording_changes_only_what_it_names_and_leaves_the_table_before_as_it_was() -> None:
    before = ClientTable.unknown(3)
    after = before.record([2, 0], masks=[b"\x01\x00", b"\x00\x00"], losses=[0.5, 1.5], last_round=4)
    # A mask may end in zero bytes, which NumPy's own strings would lose.
    assert after["masks"].tolist() == [b"\x00\x00", None, b"\x01\x00"]
    assert after["losses"].tolist()[::2] == [1.5, 0.5]
    assert after["last_round"].tolist() == [4, 0, 4]
    assert after["samples"] is before["samples"]
    assert before["masks"].tolist() == [None] * 3
    assert after.record([], masks=[], losses=[])["masks"].tolist() == after["masks"].tolist()


def test_a_methods_own_columns_follow_the_clients() -> None:
    table = ClientTable.unknown(3).with_own({"seen": np.arange(3), "norm": np.arange(3.0), "out": np.arange(3) == 1})
    some, more = table.take([2, 1]), table.grow(4)
    assert {name: column.tolist() for name, column in some.own.items()} == {
        "seen": [2, 1],
        "norm": [2.0, 1.0],
        "out": [False, True],
    }
    assert more["seen"].tolist() == [0, 1, 2, 0]
    assert np.isnan(more["norm"][3])
    assert more["out"].tolist() == [False, True, False, False]
    assert table.grow(2) is table
    assert set(table.with_own({}).columns) == set(FACTS)


@pytest.mark.parametrize("own", [{"seen": np.zeros(2)}, {"seen": [1, 2, 3]}, {"losses": np.zeros(3)}])
def test_what_is_no_column_is_refused_by_name(own: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=f"client_memory '{next(iter(own))}'"):
        ClientTable.unknown(3).with_own(own)
