"""Choosing and keeping: what a client sends of its units, what it keeps of the others, and what a download leaves."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from feddd.core.units import Mask, Params, Units, units
from feddd.wire.chosen import ChosenUnits, one
from feddd.wire.down import Values
from feddd.wire.exchange import chain, encode
from feddd.wire.format import pack_mask
from feddd.wire.select import MASK, OWN, Select, split_mask
from feddd.wire.stage import At, ClientState, Known


class Net(nn.Module):
    """A convolution with statistics, a linear layer, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


TABLE: Units = units(Net())
UNITS = {"conv": 6, "head": 4}


def params(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.tensor(seed)
        for name, tensor in Net().state_dict().items()
    }


def chosen_by(
    before: Params, after: Params, dropout: float, score: str = "importance", *, table: Units = TABLE, **options: Any
) -> tuple[Mask, ClientState]:
    """One client's choice, and what it keeps."""
    seed, coverage = options.pop("seed", 1), options.pop("coverage", None)
    old, new = ({slot.name: model[slot.name][None] for slot in table.slots} for model in (before, after))
    at = At(table, [0], 1, seed, Known(before, before), [None], old, new, coverage)
    update, (state,) = encode([chain(Select(dropout, score, **options))], [{}], at)
    assert isinstance(update.chosen, ChosenUnits)
    return one(update.chosen.masks, 0), state


def receive(sent: Params, state: ClientState, table: Units = TABLE) -> dict[str, Tensor]:
    """What a client trains after a download of the units that it sent last; of everything, if it sent nothing."""
    stack = {slot.name: sent[slot.name].clone()[None] for slot in table.slots}
    down = Values(pack_mask(split_mask(state[MASK], table), table) if MASK in state else None)
    down.local(stack, [down], [state], table)
    return one(stack, 0)


def carried(model: Params) -> dict[str, Tensor]:
    return {slot.name: model[slot.name] for slot in TABLE.slots}


def equal(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_full_download_is_the_local_model_whatever_was_kept() -> None:
    sent = params(1)
    _, state = chosen_by(params(2), params(3), 0.5)
    stack = {slot.name: sent[slot.name].clone()[None] for slot in TABLE.slots}
    Values().local(stack, [Values()], [state], TABLE)
    assert equal(one(stack, 0), carried(sent))


@pytest.mark.parametrize("dropout", [0.2, 0.5, 0.8])
def test_a_sparse_download_leaves_the_own_trained_values_where_the_mask_is_false(dropout: float) -> None:
    before, trained, sent = params(1), params(2), params(3)
    mask, kept = chosen_by(before, trained, dropout)
    local = receive(sent, kept)
    for layer, names in {"conv": ("conv", "norm"), "head": ("head",)}.items():
        for name in (name for name in local if name.split(".")[0] in names and sent[name].is_floating_point()):
            for unit in range(UNITS[layer]):
                source = sent if bool(mask[layer][unit]) else trained
                assert torch.equal(local[name][unit], source[name][unit])


def test_running_statistics_stay_with_their_channel() -> None:
    mask, kept = chosen_by(params(1), params(2), 0.5)
    local = receive(params(3), kept)
    own = ~mask["conv"]
    assert bool(own.any())
    assert torch.equal(local["norm.running_mean"][own], params(2)["norm.running_mean"][own])


def test_scalars_come_from_the_server_even_in_a_sparse_download() -> None:
    _, kept = chosen_by(params(1), params(2), 0.8)
    local = receive(params(3), kept)
    assert torch.equal(local["temperature"], params(3)["temperature"])


def test_a_download_with_everything_sent_is_the_global_model() -> None:
    _, kept = chosen_by(params(1), params(2), 0.0)
    assert kept[OWN].numel() == 0
    assert equal(receive(params(3), kept), carried(params(3)))


def test_what_is_kept_is_what_was_not_sent_and_outlives_the_network_that_trained() -> None:
    before, trained = params(1), params(2)
    mask, kept = chosen_by(before, trained, 0.5)
    dropped = torch.cat(
        [trained[name][~mask[name.split(".")[0].replace("norm", "conv")]].reshape(-1) for name in _floating(trained)]
    )
    assert torch.equal(kept[OWN], dropped)
    for tensor in trained.values():
        tensor.zero_()
    assert torch.equal(kept[OWN], dropped)


def _floating(tensors: Params) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() > 0]


def test_reporting_and_receiving_change_none_of_their_arguments() -> None:
    before, trained, sent = params(1), params(2), params(3)
    copies = copy.deepcopy((before, trained, sent))
    _, kept = chosen_by(before, trained, 0.5)
    values = kept[OWN].clone()
    receive(sent, kept)
    assert all(equal(now, then) for now, then in zip((before, trained, sent), copies, strict=True))
    assert torch.equal(kept[OWN], values)


def test_layers_always_sent_are_whole_in_the_mask() -> None:
    mask, _ = chosen_by(params(1), params(2), 0.7, always_send=("head",))
    assert bool(mask["head"].all())
    assert int(mask["conv"].sum()) == 2  # 6 · 0.3 = 1.8


def test_the_stage_decides_the_score_and_the_seed_the_random_one() -> None:
    before, trained = params(1), params(2)
    assert chosen_by(before, trained, 0.5, "ordered")[0]["conv"].tolist() == [True] * 3 + [False] * 3
    largest = trained["head.weight"].square().sum(1) + trained["head.bias"].square()
    assert chosen_by(before, trained, 0.75, "magnitude")[0]["head"].tolist() == (largest == largest.max()).tolist()
    masks = [chosen_by(before, trained, 0.5, "random", seed=seed)[0]["conv"].tolist() for seed in (1, 1, 3)]
    assert masks[0] == masks[1] != masks[2]


def test_coverage_favours_units_that_few_clients_have() -> None:
    before = {"head.weight": torch.ones(4, 1), "head.bias": torch.ones(4)}
    after = {
        name: tensor + torch.tensor([0.4, 0.3, 0.2, 0.1]).reshape(-1, *[1] * (tensor.dim() - 1))
        for name, tensor in before.items()
    }
    table = units(before)
    plain, _ = chosen_by(before, after, 0.75, table=table)
    share = {"head": torch.tensor([1.0, 1.0, 1.0, 0.1])}
    rare, _ = chosen_by(before, after, 0.75, table=table, coverage=share)
    assert plain["head"].tolist() == [True, False, False, False]
    assert rare["head"].tolist() == [False, False, False, True]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_a_client_that_gets_its_own_values_back_has_its_trained_model(seed: int, dropout: float) -> None:
    trained = params(seed)
    _, kept = chosen_by(params(seed + 1), trained, dropout)
    assert equal(receive(trained, kept), carried(trained))
