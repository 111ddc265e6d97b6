"""Selection: scores against loops, the number of units kept, and what each rule may look at."""

import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import feddd
from feddd.core.selection import NORMS, RANKINGS, Selector, kept_units, select, select_stack
from feddd.core.units import Units, units

Params = dict[str, Tensor]


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def two_layers(seed: int, dtype: torch.dtype = torch.float32) -> Params:
    shapes = {"a.weight": (7, 3, 2), "a.bias": (7,), "b.weight": (5, 7), "b.bias": (5,)}
    return {name: randn(shape, seed + i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


def kept(mask: dict[str, Tensor], layer: str) -> list[int]:
    return [k for k, keep in enumerate(mask[layer].tolist()) if keep]


def layer_elements(params: Params, layer: str, unit: int) -> list[tuple[str, tuple[int, ...]]]:
    names = [name for name in params if name.startswith(f"{layer}.")]
    return [(name, (unit, *rest)) for name in names for rest in np.ndindex(params[name].shape[1:])]


def unit_scores(
    before: Params, after: Params, *, selector: str = "importance", units: Units | None = None
) -> dict[str, Tensor]:
    """The scores in float64, as they decide where float32 leaves it open; [units] per layer."""
    found, norm = {}, NORMS[selector]
    for layer in (units or feddd.units(after)).layers:
        trained = [slot for slot in layer.slots if not slot.buffer]
        old, new = ([slot.stacked_rows(side[slot.name][None]) for slot in trained] for side in (before, after))
        found[layer.name] = torch.from_numpy(norm.scores(old, new, norm.floors(old, torch.float64))[0])
    return found


def test_every_ranking_has_a_name_that_a_field_may_have() -> None:
    assert tuple(RANKINGS) == get_args(Selector)


def oracle(before: Params, after: Params, layer: str, rule: str) -> list[float]:
    count = before[f"{layer}.bias"].shape[0]
    everything = [element for k in range(count) for element in layer_elements(before, layer, k)]
    floor = 1e-3 * math.sqrt(math.fsum(float(before[n][i]) ** 2 for n, i in everything) / len(everything))
    scores = []
    for k in range(count):
        squares = []
        for name, index in layer_elements(before, layer, k):
            old, new = float(before[name][index]), float(after[name][index])
            size = max(abs(old), floor)
            value = {"importance": (new - old) * new / size, "magnitude": new, "delta": new - old}[rule]
            squares.append(value * value)
        scores.append(math.sqrt(math.fsum(squares)))
    return scores


@pytest.mark.parametrize("rule", ["importance", "magnitude", "delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_are_what_a_loop_over_elements_gives(rule: str, dtype: torch.dtype) -> None:
    before, after = two_layers(1, dtype), two_layers(50, dtype)
    before["a.weight"][2, 1, 1] = 0.0
    before["a.weight"][3, 0, 0] = 1e-9
    scores = unit_scores(before, after, selector=rule)
    for layer in ("a", "b"):
        assert scores[layer].dtype == torch.float64
        assert scores[layer].tolist() == pytest.approx(oracle(before, after, layer, rule), rel=1e-12)


def test_importance_worked_out_on_paper() -> None:
    # unit 0: ((3−1)·3/1, (2−2)·2/2) → 6; unit 1: ((1+1)·1/−1, (4−2)·4/2) → √(4 + 16)
    before = {"l.weight": torch.tensor([[1.0], [-1.0]]), "l.bias": torch.tensor([2.0, 2.0])}
    after = {"l.weight": torch.tensor([[3.0], [1.0]]), "l.bias": torch.tensor([2.0, 4.0])}
    assert unit_scores(before, after)["l"].tolist() == pytest.approx([6.0, math.sqrt(20.0)])
    assert kept(feddd.select(before, after, 0.5), "l") == [0]
    assert kept(feddd.select(before, after, 0.5, selector="delta"), "l") == [1]
    assert kept(feddd.select(before, after, 0.5, selector="magnitude"), "l") == [1]


def test_a_zero_weight_cannot_own_a_score() -> None:
    # RMS of W is about 1, so a step of 10⁻³ away from zero scores 10⁻³·10⁻³/10⁻³ = 10⁻³, not infinity.
    before = {"l.weight": torch.ones(4, 25)}
    before["l.weight"][0, 0] = 0.0
    after = {"l.weight": before["l.weight"].clone()}
    after["l.weight"][0, 0] = 1e-3
    after["l.weight"][1, 0] = 1.01
    scores = unit_scores(before, after)["l"]
    assert float(scores[0]) == pytest.approx(1e-3 / math.sqrt(0.99), rel=1e-4)
    assert kept(feddd.select(before, after, 0.75), "l") == [1]


def test_a_layer_of_zeros_is_ranked_by_what_it_became() -> None:
    before = {"l.weight": torch.zeros(3, 2)}
    after = {"l.weight": torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0]])}
    assert kept(feddd.select(before, after, 0.6), "l") == [1]
    assert kept(feddd.select(before, before, 0.6), "l") == [0]


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-149, 127), min_size=8, max_size=8),
    after=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=8, max_size=8),
)
def test_scores_of_finite_parameters_are_finite(exponents: list[int], after: list[float]) -> None:
    before = torch.tensor([2.0**e for e in exponents]).reshape(4, 2)
    scores = unit_scores({"l.weight": before}, {"l.weight": torch.tensor(after).reshape(4, 2)})["l"]
    assert torch.isfinite(scores).all()


def test_huge_float64_weights_are_ranked_or_refused_but_never_crash() -> None:
    before = {"l.weight": torch.tensor([[1e160], [1e160]], dtype=torch.float64)}
    after = {"l.weight": torch.tensor([[1e160], [2e160]], dtype=torch.float64)}
    with pytest.raises(ValueError, match="not finite"):
        feddd.select(before, after, 0.5)


@pytest.mark.parametrize("rule", ["importance", "magnitude", "delta", "ordered"])
def test_ties_go_to_the_first_units(rule: str) -> None:
    before = {"l.weight": torch.ones(50, 2)}
    after = {"l.weight": torch.full((50, 2), 3.0)}
    assert kept(feddd.select(before, after, 0.7, selector=rule), "l") == list(range(15))


KEPT = [(10, 0.8, 2), (5, 0.9, 1), (5, 0.5, 3), (3, 1.0, 1), (1, 1.0, 1), (1, 0.0, 1), (7, 0.0, 7), (100, 0.8, 20)]
KEPT += [(15, 0.9, 2), (25, 0.9, 3), (45, 0.9, 5)]  # exact halves whose 1 − D is rounded down in floats
KEPT += [(10, 0.95, 1), (10, 0.85, 2), (10, 0.75, 3), (20, 0.875, 3), (64, 0.8, 13), (50, 0.99, 1), (4, 0.6, 2)]


@pytest.mark.parametrize(("count", "dropout", "expected"), KEPT)
def test_the_number_of_units_kept(count: int, dropout: float, expected: int) -> None:
    assert kept_units(count, dropout) == expected
    params = {"l.weight": torch.ones(count, 1)}
    assert int(feddd.select(params, params, dropout)["l"].sum()) == expected


@given(count=st.integers(1, 5000), thousandths=st.integers(0, 1000))
def test_kept_is_the_nearest_count_with_halves_up_and_at_least_one(count: int, thousandths: int) -> None:
    exact = count * (1 - Fraction(thousandths, 1000))
    nearest = min(range(count + 1), key=lambda n: (abs(n - exact), -n)) if count < 40 else int(exact + Fraction(1, 2))
    assert kept_units(count, thousandths / 1000) == max(1, nearest)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=5),
    dropout=st.floats(0, 1),
    rule=st.sampled_from(list(RANKINGS)),
    seed=st.integers(0, 99),
)
def test_the_kept_share_is_within_one_unit_per_layer_of_the_rate(
    sizes: list[tuple[int, int]], dropout: float, rule: str, seed: int
) -> None:
    before = {f"l{i}.weight": randn(size, seed + i) for i, size in enumerate(sizes)}
    after = {name: tensor + randn(tuple(tensor.shape), seed + 7) for name, tensor in before.items()}
    mask = feddd.select(before, after, dropout, selector=rule, rng=np.random.default_rng(seed))
    assert set(mask) == {f"l{i}" for i in range(len(sizes))}
    for i, (count, _) in enumerate(sizes):
        assert mask[f"l{i}"].dtype == torch.bool
        assert abs(int(mask[f"l{i}"].sum()) - count * (1 - dropout)) <= (1 if count * (1 - dropout) < 0.5 else 0.5001)


def test_units_are_ranked_within_their_layer_at_the_same_rate() -> None:
    before = {"small.weight": torch.ones(10, 1), "large.weight": torch.full((4, 1), 1e6)}
    change = torch.arange(1.0, 11.0)[:, None]
    after = {"small.weight": 1 + change * 1e-3, "large.weight": 1e6 * (1 + change[:4])}
    mask = feddd.select(before, after, 0.5)
    assert kept(mask, "small") == [5, 6, 7, 8, 9]
    assert kept(mask, "large") == [2, 3]


@pytest.mark.parametrize("rule", ["importance", "magnitude", "delta"])
def test_the_mask_keeps_the_best_units_of_the_loop_oracle(rule: str) -> None:
    before, after = two_layers(3), two_layers(80)
    mask = feddd.select(before, after, 0.6, selector=rule)
    for layer, count in (("a", 3), ("b", 2)):
        scores = oracle(before, after, layer, rule)
        assert kept(mask, layer) == sorted(sorted(range(len(scores)), key=lambda k: -scores[k])[:count])


def test_ordered_takes_the_first_units() -> None:
    mask = feddd.select(two_layers(3), two_layers(80), 0.6, selector="ordered")
    assert kept(mask, "a") == [0, 1, 2]
    assert kept(mask, "b") == [0, 1]


def test_coverage_divides_importance_and_nothing_else() -> None:
    before = {"l.weight": torch.ones(3, 1)}
    after = {"l.weight": torch.tensor([[1.5], [1.4], [1.2]])}  # scores 0.75, 0.56, 0.24
    rare = {"l": torch.tensor([1.0, 0.7, 0.3])}  # 0.75, 0.8, 0.8: both rarer units overtake the first
    assert kept(feddd.select(before, after, 0.7), "l") == [0]
    rarer = {"l": torch.tensor([1.0, 0.7, 0.2])}
    assert kept(feddd.select(before, after, 0.7, coverage=rarer), "l") == [2]
    assert kept(feddd.select(before, after, 0.3, coverage=rare), "l") == [1, 2]
    for rule in ("magnitude", "delta", "ordered"):
        assert kept(feddd.select(before, after, 0.7, selector=rule, coverage=rarer), "l") == [0]


def test_random_depends_on_its_generator_alone() -> None:
    one, other = two_layers(1), two_layers(9)
    options: dict[str, Any] = {"selector": "random"}
    first = feddd.select(one, other, 0.5, rng=np.random.default_rng(4), **options)
    again = feddd.select(other, one, 0.5, rng=np.random.default_rng(4), **options)
    different = [feddd.select(one, other, 0.5, rng=np.random.default_rng(s), **options) for s in range(5, 15)]
    assert all(torch.equal(first[x], again[x]) for x in first)
    assert any(not torch.equal(first["a"], mask["a"]) for mask in different)


def test_random_is_uniform_over_the_pairs_of_units() -> None:
    params = {"l.weight": torch.ones(4, 1)}
    rng = np.random.default_rng(0)
    pairs = Counter(
        tuple(kept(feddd.select(params, params, 0.5, selector="random", rng=rng), "l")) for _ in range(1800)
    )
    assert len(pairs) == 6
    # 300 expected for each; χ² with 5 degrees of freedom exceeds 25 once in 7,000 seeds.
    assert sum((n - 300) ** 2 / 300 for n in pairs.values()) < 25


def test_layers_named_in_always_send_are_kept_whole_and_do_not_move_the_others() -> None:
    before, after = two_layers(1), two_layers(9)
    for rule in RANKINGS:
        plain = feddd.select(before, after, 0.6, selector=rule, rng=np.random.default_rng(1))
        held = feddd.select(before, after, 0.6, selector=rule, rng=np.random.default_rng(1), always_send=["a"])
        assert held["a"].all()
        assert not plain["a"].all()
        assert torch.equal(held["b"], plain["b"])


def test_buffers_do_not_enter_the_scores() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    table = units(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = {name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in before.items()}
    shifted = after | {"1.running_mean": torch.tensor([0.0, 1e6, 2.0]), "1.running_var": torch.tensor([9.0, 1e9, 1.0])}
    for rule in ("importance", "magnitude", "delta"):
        plain = unit_scores(before, after, selector=rule, units=table)["0"]
        assert torch.equal(plain, unit_scores(before, shifted, selector=rule, units=table)["0"])
        assert float(plain[0]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": 1.1}, "dropout"),
        ({"dropout": math.nan}, "dropout"),
        ({"selector": "max"}, "selector must be one of importance, magnitude"),
        ({"selector": "random"}, "rng"),
        ({"always_send": ["a", "c"]}, "no layer of the model: c"),
        ({"coverage": {"a": torch.ones(7)}}, "layer 'b'"),
        ({"coverage": {"a": torch.ones(6), "b": torch.ones(5)}}, "layer 'a'"),
        ({"before": two_layers(1) | {"b.weight": torch.ones(5, 1)}}, "same shapes"),
        ({"before": {"a.weight": torch.ones(7, 3, 2)}}, "lack 'a.bias'"),
    ],
)
def test_wrong_input_is_refused_with_its_reason(options: dict[str, Any], message: str) -> None:
    given_ = {"before": two_layers(1), "after": two_layers(2), "dropout": 0.5, **options}
    with pytest.raises(ValueError, match=message):
        feddd.select(**given_)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["importance", "magnitude", "delta"])
def test_values_that_are_not_finite_are_refused(rule: str, bad: float) -> None:
    after = two_layers(2)
    after["b.weight"][1, 1] = bad
    with pytest.raises(ValueError, match=r"layer 'b'.*not finite"):
        feddd.select(two_layers(1), after, 0.5, selector=rule)


def test_the_parameters_are_not_changed() -> None:
    before, after = two_layers(1), two_layers(2)
    feddd.select(before, after, 0.5)
    assert all(torch.equal(before[name], tensor) for name, tensor in two_layers(1).items())
    assert all(torch.equal(after[name], tensor) for name, tensor in two_layers(2).items())


@pytest.mark.parametrize("rule", list(RANKINGS))
def test_no_global_generator_is_touched(rule: str) -> None:
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    feddd.select(two_layers(1), two_layers(2), 0.5, selector=rule, rng=np.random.default_rng(0))
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("rule", ["importance", "magnitude", "delta"])
@pytest.mark.parametrize("spread", [1e-9, 1e-6, 1e-4, 1e-2])
def test_units_that_float32_cannot_tell_apart_are_ranked_as_in_float64(rule: str, spread: float) -> None:
    # 500 units whose scores differ by about `spread`: some, or all, are too close for float32.
    before = {"a.weight": randn((1, 40), 1).repeat(500, 1) + spread * randn((500, 40), 2)}
    after = {"a.weight": 1.01 * before["a.weight"] + spread * randn((500, 40), 3)}
    scores = unit_scores(before, after, selector=rule)["a"]
    for dropout in (0.1, 0.5, 0.9):
        count = kept_units(500, dropout)
        best = sorted(torch.argsort(scores, descending=True, stable=True)[:count].tolist())
        assert kept(select(before, after, dropout, selector=rule), "a") == best


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e25])
def test_float32_weights_of_any_size_are_ranked_as_in_float64(scale: float) -> None:
    before, after = {"a.weight": scale * randn((30, 20), 1)}, {"a.weight": scale * randn((30, 20), 2)}
    scores = unit_scores(before, after)["a"]
    best = sorted(torch.argsort(scores, descending=True, stable=True)[:12].tolist())
    assert kept(select(before, after, 0.6), "a") == best


def test_a_stack_is_selected_client_by_client() -> None:
    before, after = two_layers(1), two_layers(50)
    table = units(before)
    stacks = [{name: torch.stack([p[name], q[name]]) for name in before} for p, q in ((before, after), (after, before))]
    both = select_stack(*stacks, [0.3, 0.6], units=table)
    for client, (old, new, dropout) in enumerate(((before, after, 0.3), (after, before, 0.6))):
        alone = select(old, new, dropout)
        assert all(torch.equal(both[name][client], alone[name]) for name in alone)


def test_units_of_buffers_alone_are_taken_in_order() -> None:
    table = units(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(5, affine=False)))
    params = {"1.running_mean": randn((5,), 1), "1.running_var": randn((5,), 2).abs()}
    assert kept(select(params, params, 0.4, units=table), "1") == [0, 1, 2]
