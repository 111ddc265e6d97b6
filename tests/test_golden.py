"""The numbers of every method stay what they were, to the bit; a change needs a reason in its commit."""

from __future__ import annotations

import numpy as np
import pytest

from golden_cases import CASES, REGENERATE, changed_columns, digests, fingerprint, machine, read_golden

GOLDEN = read_golden()


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_pinned_ones(name: str) -> None:
    found, pinned = CASES[name](), GOLDEN["machines"].get(machine(), {})
    if name in pinned:
        changed = changed_columns(digests(found), pinned[name])
    else:
        changed = changed_columns(fingerprint(found), GOLDEN["cases"][name])
    assert not changed, f"{name}: {', '.join(changed)} changed; if that is meant, run `{REGENERATE}` and say why"


def test_every_case_is_pinned_and_nothing_else() -> None:
    assert GOLDEN["cases"].keys() == CASES.keys()
    assert all(pinned.keys() <= CASES.keys() for pinned in GOLDEN["machines"].values())


def test_the_last_bit_counts_on_a_known_machine_and_only_real_changes_on_another() -> None:
    before = {"x": np.linspace(1.0, 2.0, 50), "status": np.array(["ok", "late"]), "bytes": np.arange(9)}
    last_bit = before | {"x": np.nextafter(before["x"], 9.0)}
    assert changed_columns(digests(last_bit), digests(before)) == ["x"]
    assert changed_columns(digests(dict(before)), digests(before)) == []
    assert changed_columns(fingerprint(last_bit), fingerprint(before)) == []
    for other in (
        {"x": before["x"] * 1.05},
        {"x": before["x"][::-1]},
        {"x": before["x"][:-1]},
        {"status": np.array(["ok", "ok"])},
        {"bytes": np.arange(9) + 1},
    ):
        assert changed_columns(fingerprint(before | other), fingerprint(before)) == list(other)
    del last_bit["bytes"]
    assert changed_columns(fingerprint(last_bit), fingerprint(before)) == ["bytes"]
