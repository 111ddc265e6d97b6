"""Partitions: what every kind promises, worked-out numbers, and errors that say what is right."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feddd.core.labels import label_coverage
from feddd.errors import InputError
from feddd.world.partitions import KINDS, label_counts, partition, subsample

Labels = NDArray[np.int64]
COMPLETE = [kind for kind in KINDS if kind != "imbalanced"]
seeds = st.integers(0, 2**32 - 1)


def balanced(per_class: int, classes: int = 10, seed: int = 1) -> Labels:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))


def split(labels: Labels, clients: int, kind: str, seed: int = 0, **options: Any) -> list[NDArray[np.int64]]:
    return partition(labels, clients, kind, np.random.default_rng(seed), classes=10, **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, clients=st.integers(4, 40), per_class=st.integers(40, 90))
def test_parts_are_sorted_disjoint_and_never_empty(kind: str, seed: int, clients: int, per_class: int) -> None:
    labels = balanced(per_class)
    parts = split(labels, clients, kind, seed)
    everything = np.concatenate(parts)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert len(np.unique(everything)) == len(everything)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert everything.min() >= 0
    assert everything.max() < len(labels)


@pytest.mark.parametrize("kind", COMPLETE)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, clients=st.integers(4, 40), counts=st.lists(st.integers(40, 90), min_size=10, max_size=10))
def test_every_sample_goes_to_somebody(kind: str, seed: int, clients: int, counts: list[int]) -> None:
    labels = np.repeat(np.arange(10), counts)
    assert np.array_equal(np.sort(np.concatenate(split(labels, clients, kind, seed))), np.arange(len(labels)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_parts_and_another_seed_others(kind: str) -> None:
    labels = balanced(60)
    first, again, other = (split(labels, 20, kind, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_labels_are_not_changed(kind: str) -> None:
    labels = balanced(60)
    before = labels.copy()
    split(labels, 20, kind)
    assert np.array_equal(labels, before)


@given(seed=seeds, clients=st.integers(1, 50), samples=st.integers(50, 300))
def test_iid_parts_differ_by_one_sample_at_most(seed: int, clients: int, samples: int) -> None:
    sizes = [len(part) for part in split(np.arange(samples) % 10, clients, "iid", seed)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", ["noniid-a", "noniid-b", "imbalanced"])
@settings(max_examples=30, deadline=None)
@given(seed=seeds, clients=st.integers(4, 40))
def test_a_class_is_split_evenly_over_its_owners(kind: str, seed: int, clients: int) -> None:
    labels = balanced(121)  # even the rare labels' 48 samples suffice for 40 owners
    for of_class in label_counts(labels, split(labels, clients, kind, seed), 10).T:
        owned = of_class[of_class > 0]
        assert owned.max() - owned.min() <= 1


@pytest.mark.parametrize("kind", ["noniid-b", "imbalanced"])
@settings(max_examples=30, deadline=None)
@given(seed=seeds, clients=st.integers(4, 40))
def test_a_noniid_b_client_has_exactly_three_labels(kind: str, seed: int, clients: int) -> None:
    labels = balanced(121)
    counts = label_counts(labels, split(labels, clients, kind, seed), 10)
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert (counts.sum(axis=0) > 0).all()


def test_classes_per_client_sets_the_number_of_labels() -> None:
    labels = balanced(121)
    counts = label_counts(labels, split(labels, 30, "noniid-b", classes_per_client=7), 10)
    assert ((counts > 0).sum(axis=1) == 7).all()


def test_noniid_a_clients_own_two_to_ten_labels_about_equally_often() -> None:
    labels = balanced(6000)
    owned = (label_counts(labels, split(labels, 4500, "noniid-a"), 10) > 0).sum(axis=1)
    occurrences = np.bincount(owned, minlength=11)
    assert occurrences[:2].sum() == 0
    # 4500 / 9 = 500 expected of each, standard deviation 21.
    assert np.abs(occurrences[2:] - 500).max() < 5 * 21


def test_noniid_b_classes_are_owned_about_equally_often() -> None:
    labels = balanced(6000)
    owners = (label_counts(labels, split(labels, 5000, "noniid-b"), 10) > 0).sum(axis=0)
    # 5000 clients × 3 of 10 classes: 1500 owners a class, standard deviation √(5000 · 0.3 · 0.7) = 32.
    assert np.abs(owners - 1500).max() < 5 * 32


def test_one_class_for_each_of_ten_clients_is_found_though_rare() -> None:
    labels = balanced(20)
    counts = label_counts(labels, split(labels, 10, "noniid-b", classes_per_client=1), 10)
    assert sorted(counts.argmax(axis=1)) == list(range(10))
    assert counts.sum() == 200


def test_imbalanced_labels_keep_four_tenths_of_the_others() -> None:
    labels = np.repeat(np.arange(10), [100, 30, 80, 90, 110, 100, 100, 95, 105, 100])
    counts = label_counts(labels, split(labels, 12, "imbalanced"), 10).sum(axis=0)
    # The other seven have 100 on average; label 1 has less than 40 to begin with and keeps all.
    assert counts.tolist() == [40, 30, 40, 90, 110, 100, 100, 95, 105, 100]


def test_imbalanced_keeps_a_random_choice_of_the_rare_samples() -> None:
    labels = np.repeat(np.arange(10), 100)
    first, other = (np.sort(np.concatenate(split(labels, 12, "imbalanced", seed))) for seed in (0, 1))
    assert set(first[first < 100]) != set(range(40))
    assert set(first) != set(other)


def test_a_small_alpha_concentrates_a_class_and_a_large_one_spreads_it() -> None:
    labels = balanced(500)
    skewed, even = (label_counts(labels, split(labels, 10, "dirichlet", alpha=alpha), 10) for alpha in (0.1, 1e6))
    assert np.abs(even - 50).max() <= 2
    assert np.median(skewed.max(axis=0)) > 200


def test_classes_without_samples_need_no_owner() -> None:
    labels = np.repeat([0, 4], 50)
    parts = split(labels, 2, "noniid-a")
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(100))


def test_a_single_client_gets_everything() -> None:
    labels = balanced(5)
    for kind in ("iid", "noniid-a", "dirichlet"):
        assert np.array_equal(split(labels, 1, kind)[0], np.arange(50))


def test_as_many_clients_as_samples_get_one_each() -> None:
    assert [len(part) for part in split(balanced(3), 30, "iid")] == [1] * 30


@pytest.mark.parametrize("kind", ["iid", "noniid-a", "noniid-b", "imbalanced"])
def test_ten_thousand_clients_are_served_in_two_seconds(kind: str) -> None:
    labels = balanced(6000)
    start = time.process_time()
    parts = split(labels, 10_000, kind)
    assert time.process_time() - start < 2
    assert len(parts) == 10_000


@pytest.mark.parametrize(
    ("clients", "kind", "options", "message"),
    [
        (0, "iid", {}, "clients is 0, but must be at least 1"),
        (-3, "noniid-b", {}, "clients is -3"),
        (101, "iid", {}, "101 clients cannot share 100 samples"),
        (5, "noniid_b", {}, "did you mean 'noniid-b'"),
        (5, "NonIID-a", {}, "did you mean 'noniid-a'"),
        (5, "zzz", {}, "unknown partition 'zzz'; known are iid"),
        (5, "noniid-b", {"classes_per_client": 11}, "between 1 and 10"),
        (5, "imbalanced", {"classes_per_client": 0}, "between 1 and 10"),
        (5, "dirichlet", {"alpha": 0.0}, "finite number above 0"),
        (5, "dirichlet", {"alpha": -1.0}, "finite number above 0"),
        (5, "dirichlet", {"alpha": float("nan")}, "finite number above 0"),
        (5, "dirichlet", {"alpha": float("inf")}, "finite number above 0"),
        (2, "noniid-b", {}, "2 clients with 3 classes each cannot own all 10 classes: take at least 4 clients"),
        (50, "dirichlet", {"alpha": 1e-3}, "take fewer clients or a larger alpha"),
        (95, "noniid-b", {"classes_per_client": 1}, "take fewer clients or more samples"),
    ],
)
def test_wrong_input_is_refused_on_one_line(clients: int, kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        split(balanced(10), clients, kind, **options)
    assert "\n" not in str(caught.value)


def test_imbalanced_counts_only_the_samples_that_are_kept() -> None:
    with pytest.raises(InputError, match="83 clients cannot share 82 samples"):
        split(balanced(10), 83, "imbalanced")


def test_kinds_that_need_more_classes_say_so() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="more than 3 classes"):
        partition(balanced(9, classes=3), 2, "imbalanced", rng, classes=3)
    with pytest.raises(InputError, match="only one"):
        partition(np.zeros(9, np.int64), 2, "noniid-a", rng, classes=1)


@pytest.mark.parametrize("labels", [[0, 10], [-1, 3]])
def test_labels_outside_the_classes_are_refused(labels: list[int]) -> None:
    with pytest.raises(InputError, match="10 classes allow 0 to 9"):
        split(np.array(labels), 1, "iid")


def test_label_counts_agree_with_a_loop() -> None:
    labels = np.array([0, 2, 2, 1, 0, 2])
    parts = [np.array([0, 1, 5]), np.array([2]), np.array([], np.int64)]
    assert label_counts(labels, parts, 4).tolist() == [[1, 0, 2, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert label_counts(labels, [], 4).shape == (0, 4)


def test_label_coverage_on_paper() -> None:
    # Shares of four classes: balanced → 4; one class → 1; ¾, ¼ → min(3, 1) + min(1, 1) = 2; ⅞, ⅛ → 1 + ½.
    counts = np.array([[5, 5, 5, 5], [0, 9, 0, 0], [3, 1, 0, 0], [7, 0, 0, 1], [0, 0, 0, 0]])
    assert label_coverage(counts).tolist() == [4.0, 1.0, 2.0, 1.5, 0.0]


def test_subsample_draws_without_replacement_and_sorted() -> None:
    labels = balanced(10)
    chosen = subsample(labels, 30, np.random.default_rng(0))
    assert len(np.unique(chosen)) == 30
    assert (np.diff(chosen) > 0).all()
    assert chosen.max() > 50  # not just the first ones
    assert np.array_equal(chosen, subsample(labels, 30, np.random.default_rng(0)))


@pytest.mark.parametrize("limit", [100, 1000])
def test_a_limit_beyond_the_samples_takes_them_all(limit: int) -> None:
    assert np.array_equal(subsample(balanced(10), limit, np.random.default_rng(0)), np.arange(100))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        subsample(balanced(10), limit, np.random.default_rng(0))
