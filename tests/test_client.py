"""The client half: what it holds after a download, what it chooses to send, and what it keeps."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from feddd.core.units import Mask, Params, Units, units
from feddd.strategies.client import Kept, complement, receive, report
from feddd.strategies.protocol import Task


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


def chosen_by(before: Params, after: Params, dropout: float, selector: str = "importance") -> tuple[Mask, Kept]:
    return report(before, after, Task(0, dropout, selector), TABLE, rng=np.random.default_rng(1))


def equal(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_full_download_is_the_local_model() -> None:
    sent = params(1)
    local = receive(sent, None, TABLE)
    assert equal(local, sent)
    local["head.weight"].zero_()
    assert sent["head.weight"].abs().sum() > 0


@pytest.mark.parametrize("dropout", [0.2, 0.5, 0.8])
def test_a_sparse_download_leaves_the_own_trained_values_where_the_mask_is_false(dropout: float) -> None:
    before, trained, sent = params(1), params(2), params(3)
    mask, kept = chosen_by(before, trained, dropout)
    local = receive(sent, kept, TABLE)
    for layer, names in {"conv": ("conv", "norm"), "head": ("head",)}.items():
        for name in (name for name in sent if name.split(".")[0] in names and sent[name].is_floating_point()):
            for unit in range(UNITS[layer]):
                source = sent if bool(mask[layer][unit]) else trained
                assert torch.equal(local[name][unit], source[name][unit])


def test_running_statistics_stay_with_their_channel() -> None:
    mask, kept = chosen_by(params(1), params(2), 0.5)
    local = receive(params(3), kept, TABLE)
    own = ~mask["conv"]
    assert bool(own.any())
    assert torch.equal(local["norm.running_mean"][own], params(2)["norm.running_mean"][own])


def test_scalars_and_integers_come_from_the_server_even_in_a_sparse_download() -> None:
    _, kept = chosen_by(params(1), params(2), 0.8)
    local = receive(params(3), kept, TABLE)
    assert torch.equal(local["temperature"], params(3)["temperature"])
    assert int(local["norm.num_batches_tracked"]) == 3


def test_a_download_with_everything_sent_is_the_global_model() -> None:
    _, kept = chosen_by(params(1), params(2), 0.0)
    assert kept.values.numel() == 0
    assert equal(receive(params(3), kept, TABLE), params(3))


def test_tied_names_share_the_received_tensor() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    tied = nn.ModuleList([first, second])
    table = units(tied)
    local = receive({name: tensor.detach() for name, tensor in tied.state_dict().items()}, None, table)
    assert table.aliases == (("1.weight", "0.weight"),)
    assert local["1.weight"] is local["0.weight"]


def test_what_is_kept_is_what_was_not_sent_and_outlives_the_network_that_trained() -> None:
    before, trained = params(1), params(2)
    mask, kept = chosen_by(before, trained, 0.5)
    dropped = torch.cat(
        [trained[name][~mask[name.split(".")[0].replace("norm", "conv")]].reshape(-1) for name in _floating(trained)]
    )
    assert torch.equal(kept.values, dropped)
    for tensor in trained.values():
        tensor.zero_()
    assert torch.equal(kept.values, dropped)


def _floating(tensors: Params) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() > 0]


def test_reporting_and_receiving_change_none_of_their_arguments() -> None:
    before, trained, sent = params(1), params(2), params(3)
    copies = copy.deepcopy((before, trained, sent))
    _, kept = chosen_by(before, trained, 0.5)
    values = kept.values.clone()
    receive(sent, kept, TABLE)
    assert all(equal(now, then) for now, then in zip((before, trained, sent), copies, strict=True))
    assert torch.equal(kept.values, values)


def test_layers_always_sent_are_whole_in_the_mask() -> None:
    task = Task(0, dropout=0.7, always_send=("head",))
    mask, _ = report(params(1), params(2), task, TABLE, rng=np.random.default_rng(1))
    assert bool(mask["head"].all())
    assert int(mask["conv"].sum()) == 2  # 6 · 0.3 = 1.8


def test_the_task_decides_the_selector_and_the_generator_the_random_one() -> None:
    before, trained = params(1), params(2)
    assert chosen_by(before, trained, 0.5, "ordered")[0]["conv"].tolist() == [True] * 3 + [False] * 3
    largest = trained["head.weight"].square().sum(1) + trained["head.bias"].square()
    assert chosen_by(before, trained, 0.75, "magnitude")[0]["head"].tolist() == (largest == largest.max()).tolist()
    task = Task(0, 0.5, "random")
    masks = [
        report(before, trained, task, TABLE, rng=np.random.default_rng(seed))[0]["conv"].tolist() for seed in (1, 1, 2)
    ]
    assert masks[0] == masks[1] != masks[2]


def test_coverage_favours_units_that_few_clients_have() -> None:
    before = {"head.weight": torch.ones(4, 1), "head.bias": torch.ones(4)}
    after = {
        name: tensor + torch.tensor([0.4, 0.3, 0.2, 0.1]).reshape(-1, *[1] * (tensor.dim() - 1))
        for name, tensor in before.items()
    }
    table = units(before)
    task, rng = Task(0, dropout=0.75), np.random.default_rng(0)
    plain, _ = report(before, after, task, table, rng=rng)
    rare, _ = report(before, after, task, table, rng=rng, coverage={"head": torch.tensor([1.0, 1.0, 1.0, 0.1])})
    assert plain["head"].tolist() == [True, False, False, False]
    assert rare["head"].tolist() == [False, False, False, True]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_a_client_that_gets_its_own_values_back_has_its_trained_model(seed: int, dropout: float) -> None:
    trained = params(seed)
    _, kept = chosen_by(params(seed + 1), trained, dropout)
    assert equal(receive(trained, kept, TABLE), trained)


def test_the_complement_turns_every_unit_round() -> None:
    assert complement({"a": torch.tensor([True, False])})["a"].tolist() == [False, True]
