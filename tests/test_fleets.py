"""Fleets: ranges and streams of drawn ones, Shannon by hand, and fleet files whose wrong row is named."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddd.errors import InputError
from feddd.world.fleets import Devices, draw, read_csv

SAMPLES = np.full(500, 600.0)
PAPER: dict[str, Any] = {
    "cpu_hz": (1e9, 1e10),
    "cycles_per_sample": (1e6, 1e7),
    "uplink_bits_per_s": (1e4, 5e4),
    "downlink_bits_per_s": (4e4, 2e5),
}
SHANNON = {"bandwidth_hz": (1e4, 2e4), "power_w": (0.1, 0.2), "gain": (1e-8, 1e-7), "noise_w": (1e-10, 2e-10)}
HEADER = "client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds"


def drawn(seed: int = 0, **changes: Any) -> Devices:
    return draw(seed, SAMPLES, **PAPER | changes)


def equal(a: Devices, b: Devices, *names: str) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def test_draws_lie_in_their_ranges_and_spread_over_them() -> None:
    devices = drawn()
    for values, low, high in (
        (devices.uplink_bits_per_s, 1e4, 5e4),
        (devices.downlink_bits_per_s, 4e4, 2e5),
        (devices.compute_seconds, 600 * 1e6 / 1e10, 600 * 1e7 / 1e9),
    ):
        assert values.shape == (500,)
        assert ((values >= low) & (values <= high)).all()
    assert devices.uplink_bits_per_s.mean() == pytest.approx(3e4, rel=0.05)
    assert devices.downlink_bits_per_s.mean() == pytest.approx(1.2e5, rel=0.05)


def test_fixed_quantities_give_the_numbers_worked_out_by_hand() -> None:
    devices = draw(
        0, np.array([100.0, 300.0]), cpu_hz=2e9, cycles_per_sample=4e6, uplink_bits_per_s=3.0, downlink_bits_per_s=7.0
    )
    assert devices.uplink_bits_per_s.tolist() == [3.0, 3.0]
    assert devices.downlink_bits_per_s.tolist() == [7.0, 7.0]
    assert devices.compute_seconds.tolist() == pytest.approx([0.2, 0.6])  # c · b / f


def test_the_same_seed_gives_the_same_fleet_and_another_seed_another() -> None:
    names = ("uplink_bits_per_s", "downlink_bits_per_s", "compute_seconds")
    assert equal(drawn(4), drawn(4), *names)
    assert not any(equal(drawn(4), drawn(5), name) for name in names)


@pytest.mark.parametrize(
    ("changed", "moved"),
    [
        ("uplink_bits_per_s", "uplink_bits_per_s"),
        ("downlink_bits_per_s", "downlink_bits_per_s"),
        ("cpu_hz", "compute_seconds"),
        ("cycles_per_sample", "compute_seconds"),
    ],
)
def test_changing_one_range_moves_nothing_else(changed: str, moved: str) -> None:
    changes: dict[str, Any] = {changed: (2e6, 9e9)}
    other = drawn(**changes)
    names = {"uplink_bits_per_s", "downlink_bits_per_s", "compute_seconds"}
    assert equal(drawn(), other, *(names - {moved}))
    assert not equal(drawn(), other, moved)


def test_the_two_links_and_the_devices_are_drawn_independently() -> None:
    alike: dict[str, Any] = dict.fromkeys(PAPER, (1.0, 2.0))
    devices = draw(0, SAMPLES, **alike)
    up, down, compute = devices.uplink_bits_per_s, devices.downlink_bits_per_s, devices.compute_seconds
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.2 for a, b in ((up, down), (up, compute), (down, compute)))
    assert len(np.unique(compute)) > 400  # cycles and frequency do not cancel


def test_shannon_rates_are_those_worked_out_by_hand() -> None:
    # p · h / N0 = 0.5 · 6 / 1 = 3: log2(1 + 3) = 2 bits per second and hertz.
    fixed = {"bandwidth_hz": 1e4, "power_w": 0.5, "gain": 6.0, "noise_w": 1.0}
    devices = draw(0, np.ones(3), cpu_hz=1.0, cycles_per_sample=1.0, shannon=fixed)
    assert devices.uplink_bits_per_s.tolist() == devices.downlink_bits_per_s.tolist() == [2e4] * 3


def test_drawn_shannon_rates_lie_between_the_worst_and_the_best_link() -> None:
    devices = draw(0, SAMPLES, cpu_hz=1e9, cycles_per_sample=1e6, shannon=SHANNON)
    worst, best = 1e4 * math.log2(1 + 0.1 * 1e-8 / 2e-10), 2e4 * math.log2(1 + 0.2 * 1e-7 / 1e-10)
    for rates in (devices.uplink_bits_per_s, devices.downlink_bits_per_s):
        assert ((rates >= worst) & (rates <= best)).all()
        assert len(np.unique(rates)) == 500
    # Both ways share the client's channel gain and noise, so good channels are good both ways.
    assert np.corrcoef(devices.uplink_bits_per_s, devices.downlink_bits_per_s)[0, 1] > 0.2


def test_gain_and_noise_are_drawn_independently() -> None:
    fixed: dict[str, Any] = {"bandwidth_hz": 1.0, "power_w": 1.0, "gain": (1.0, 2.0), "noise_w": (1.0, 2.0)}
    devices = draw(0, SAMPLES, cpu_hz=1e9, cycles_per_sample=1e6, shannon=fixed)
    assert np.std(devices.uplink_bits_per_s) > 0.05  # were they the same draw, every rate would be log2(1 + 1) = 1


def test_a_change_of_shannons_gain_does_not_move_the_computing_time() -> None:
    kwargs: dict[str, Any] = {"cpu_hz": (1e9, 1e10), "cycles_per_sample": (1e6, 1e7)}
    first = draw(0, SAMPLES, **kwargs, shannon=SHANNON)
    other = draw(0, SAMPLES, **kwargs, shannon=SHANNON | {"gain": (1e-6, 1e-5)})
    assert equal(first, other, "compute_seconds")
    assert not equal(first, other, "uplink_bits_per_s")


def test_a_fleet_with_neither_rates_nor_shannon_is_refused() -> None:
    with pytest.raises(ValueError, match="link rates or the quantities of Shannon's formula"):
        draw(0, SAMPLES, cpu_hz=1.0, cycles_per_sample=1.0, uplink_bits_per_s=1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet.csv"


def test_a_fleet_file_is_read_in_order_whatever_the_order_of_columns(path: Path) -> None:
    path.write_text(
        "compute_seconds, client,loss,downlink_bits_per_s,uplink_bits_per_s\n1.5,b,0.3,200,1e4\n0, a ,0,400,2e4\n"
    )
    fleet = read_csv(path)
    assert fleet.clients == ("b", "a")
    assert {name: values.tolist() for name, values in fleet.columns.items()} == {
        "compute_seconds": [1.5, 0.0],
        "loss": [0.3, 0.0],
        "downlink_bits_per_s": [200.0, 400.0],
        "uplink_bits_per_s": [1e4, 2e4],
    }


def test_a_spreadsheets_byte_order_mark_and_blank_lines_do_no_harm(path: Path) -> None:
    path.write_text(f"\ufeff{HEADER}\r\n\r\na,1,2,3\r\n\r\nb,4,5,6\r\n", encoding="utf-8", newline="")
    assert read_csv(path).columns["uplink_bits_per_s"].tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs the columns client, uplink_bits_per_s"),
        ("\n\n", "is empty"),
        (HEADER + "\n", "has a header but no clients"),
        ("client,uplink_bits_per_s,compute_seconds\na,1,1\n", "lacks the column 'downlink_bits_per_s'"),
        (HEADER + ",colour\na,1,1,1,red\n", "unknown column 'colour'"),
        (HEADER + ",loss,loss\na,1,1,1,1,1\n", "names a column twice"),
        (HEADER + "\na,1,1,1\nb,1,fast,1\n", "row 3: downlink_bits_per_s is 'fast', not a number"),
        (HEADER + "\na,1,1,1\n\n\nb,1,,1\n", "row 5: downlink_bits_per_s is '', not a number"),
        (HEADER + "\na,1,1\n", "row 2: 3 fields instead of 4"),
        (HEADER + "\na,1,1,1,1\n", "row 2: 5 fields instead of 4"),
        (HEADER + "\na,1,1,1\nb,1,1,1\na,2,2,2\n", "row 4: client 'a' appears twice"),
        (HEADER + "\n ,1,1,1\n", "row 2: the client has no name"),
        (HEADER + "\na,0,1,1\n", "row 2: uplink_bits_per_s is 0; it must be finite and positive"),
        (HEADER + "\na,1,-5,1\n", "row 2: downlink_bits_per_s is -5; it must be finite and positive"),
        (HEADER + "\na,1,1,-0.1\n", "row 2: compute_seconds is -0.1; it must be finite and at least 0"),
        (HEADER + "\na,inf,1,1\n", "row 2: uplink_bits_per_s is inf; it must be finite and positive"),
        (HEADER + "\na,1,1,nan\n", "row 2: compute_seconds is nan; it must be finite and at least 0"),
        (HEADER + ",samples\na,1,1,1,0\n", "row 2: samples is 0; it must be finite and positive"),
        (HEADER + ",model_bits\na,1,1,1,-1\n", "row 2: model_bits is -1; it must be finite and positive"),
    ],
)
def test_a_wrong_fleet_file_is_refused_with_its_name_and_row(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_csv(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path, path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no fleet file .*fleet\.csv"):
        read_csv(path)
    with pytest.raises(InputError, match="cannot read the fleet file"):
        read_csv(tmp_path)
    path.write_bytes(b"\xff\xfe\x00client")
    with pytest.raises(InputError, match="cannot read the fleet file"):
        read_csv(path)
