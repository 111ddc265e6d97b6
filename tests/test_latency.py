"""Seconds worked out on paper."""

import numpy as np
import pytest

from feddd.core.latency import compute_seconds, round_seconds, shannon_bits_per_s, transfer_seconds


def test_transfer_is_bits_over_bits_per_second() -> None:
    # The MLP's 85,614 parameters of 32 bits over 10 kbit/s
    assert transfer_seconds(85_614 * 32.0, 1e4) == pytest.approx(273.9648)
    assert transfer_seconds(np.array([8.0, 8.0]), np.array([2.0, 16.0])).tolist() == [4.0, 0.5]


def test_compute_is_cycles_per_sample_times_samples_over_frequency() -> None:
    # 5 Mcycles a sample, 600 samples, 3 GHz
    assert compute_seconds(5e6, 600.0, 3e9) == pytest.approx(1.0)
    assert compute_seconds(np.array([1e6, 2e6]), np.array([10.0, 10.0]), np.array([1e7, 1e7])).tolist() == [1.0, 2.0]


def test_the_shannon_rate_is_bandwidth_times_log2_of_one_plus_signal_to_noise() -> None:
    one = np.ones(3)
    # SNR 1, 3 and 7 give 1, 2 and 3 bits per hertz
    rates = shannon_bits_per_s(1e4 * one, np.array([0.5, 1.5, 3.5]), 0.2 * one, 0.1 * one)
    assert rates.tolist() == pytest.approx([1e4, 2e4, 3e4])


def test_a_round_lasts_as_long_as_its_slowest_client_not_as_its_slowest_parts() -> None:
    down, compute, up = np.array([1.0, 5.0, 0.0]), np.array([9.0, 1.0, 2.0]), np.array([1.0, 1.0, 8.5])
    assert round_seconds(down, compute, up) == 11.0
