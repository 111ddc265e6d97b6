"""Several clients trained at once by autograd: one forward pass for a stack of them, by `torch.func.vmap`.

For small models of dense layers, which leave a core idle between operations: a tanh or a LayerNorm is enough to keep a
model out of "stacked", where gradients are written out. Measured in processor time of one thread, with 3,000 to 19,000
parameters: a stack of eight, as a fleet of 100 has them, takes 1.1 to 1.4 × less than one client after the other by
plain SGD and 1.8 to 2.9 × less by Adam; a stack of 24 takes 1.3 to 2.9 × and 2.7 to 5 × less, a stack of four by SGD
1.1 to 1.4 × more. From 25,000 parameters on little is gained, and convolutions, attention and sequences lose;
recurrent layers have kernels of their own that vmap cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from feddd.core.units import Params, Units
from feddd.simulation.stacked import Unfit, schedule
from feddd.simulation.training import Local, Samples, Train, Trained, Training, gather, own_modes, scaled
from feddd.wire.local import Stepping, change_gradients

LARGEST = 20_000
"""Parameters that learn, at most: larger models keep a core busy alone."""
DENSE = (
    *(nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Embedding),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink),
    *(nn.Softmax, nn.LogSoftmax, nn.Sequential, nn.ModuleList, nn.ModuleDict),
)
"""Modules of torch's that gain; a module of the user's own is judged by those that it is made of."""


def check_batched(model: nn.Module) -> None:
    """Raise `Unfit` for a model that cannot train in one stack with others by autograd, or would gain nothing by it."""
    for name, module in model.named_modules():
        own = type(module).__module__.partition(".")[0] != "torch"
        if not own and type(module) not in DENSE:
            raise Unfit(f"module {name!r} is a {type(module).__name__}")
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            raise Unfit(f"parameter {name!r} is also {names[id(parameter)]!r}")
    carried = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if carried:
        raise Unfit(f"it has a buffer {carried[0]!r}")
    learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    other = next((name for name, parameter in learnt.items() if parameter.dtype != torch.float32), None)
    if other is not None:
        raise Unfit(f"parameter {other!r} is not float32")
    size = sum(parameter.numel() for parameter in learnt.values())
    if size > LARGEST:
        raise Unfit(f"{size:,} of its parameters learn, and stacks gain up to {LARGEST:,}")


def batch_trainer(model: nn.Module, table: Units) -> Train:
    """Return what trains clients as if each were alone, up to rounding."""
    modes, names = own_modes(model), [slot.name for slot in table.slots]

    def outputs_of(params: Params, inputs: Any, width: Tensor | None) -> Tensor:
        with scaled(model, 1.0 if width is None else width):
            outputs: Tensor = functional_call(model, dict(params), **_arguments(inputs))
            return outputs

    def train(
        before: Params,
        samples: Samples,
        clients: Sequence[Local],
        training: Training,
        rules: Sequence[Stepping] = (),
    ) -> Trained:
        for module, mode in modes:
            module.training = mode

        def forward(params: Params, inputs: Any, targets: Tensor, width: Tensor | None) -> Tensor:
            return samples.objective.losses(outputs_of(params, inputs, width), targets)

        device = samples.targets.device
        # Longest first: those still at work are always the first of the stack.
        order = sorted(range(len(clients)), key=lambda place: -clients[place].count)
        at = torch.tensor(order, device=device)
        numbers, sizes = schedule([clients[place] for place in order], training)
        stack = {name: before[name].index_select(0, at) for name in names}
        rules = [
            Stepping(one.rule, {name: own.index_select(0, at) for name, own in one.memory.items()}) for one in rules
        ]
        widths = _widths([clients[place].width for place in order], device)
        sums = torch.zeros(2, len(clients), dtype=torch.float64, device=device)
        still, leaves = 0, {}
        for index, size in zip(torch.from_numpy(numbers).to(device), sizes, strict=True):
            active, longest = int((size > 0).sum()), int(size.max())
            if active != still:
                leaves = {name: own[:active].detach().requires_grad_() for name, own in stack.items()}
                rules, still = [one.only(slice(active)) for one in rules], active
            chosen = index[:active, :longest]
            targets = _by_client(samples.targets.index_select(0, chosen.flatten()), chosen.shape)
            inputs = _by_client(gather(samples, chosen.flatten()), chosen.shape)
            width = None if widths is None else widths[:active]
            with _no_loops():
                losses = vmap(forward, in_dims=(0, 0, 0, None if width is None else 0))(leaves, inputs, targets, width)
            counted = torch.arange(longest, device=device) < torch.from_numpy(size[:active]).to(device)[:, None]
            # Everybody's mean, added up: the gradient of each client's parameters is that of its own mean.
            mean = (losses * (counted / counted.sum(1, keepdim=True))).sum()
            found = torch.autograd.grad(mean, list(leaves.values()), allow_unused=True)
            rules = _step(leaves, found, rules, training.learning_rate)
            each = losses.detach().double() * counted
            sums[:, :active] += torch.stack([each.sum(1), each.square().sum(1)])
        back = torch.from_numpy(np.argsort(order)).to(device)
        seen = np.array([training.epochs * client.count for client in clients])
        mean_loss, mean_square = sums.index_select(1, back).cpu().numpy() / seen
        after = {name: own.index_select(0, back) for name, own in stack.items()}
        return Trained(after, mean_loss, np.sqrt(mean_square))

    return train


@contextmanager
def _no_loops() -> Iterator[None]:
    """Let vmap fail where it would go through the clients one by one: that is slower than not to use it."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


@torch.no_grad()
def _step(
    params: Mapping[str, Tensor], found: Sequence[Tensor | None], rules: Sequence[Stepping], learning_rate: float
) -> Sequence[Stepping]:
    """Follow the gradients, through the rules; what has none stays."""
    pairs = zip(params, found, strict=True)
    gradients: Params = {name: gradient for name, gradient in pairs if gradient is not None}
    gradients, rules = change_gradients(rules, gradients, params)
    for name, gradient in gradients.items():
        params[name].add_(gradient, alpha=-learning_rate)
    return rules


def _arguments(inputs: Any) -> dict[str, Any]:
    """Return how `functional_call` is told the inputs: a dict of tensors by keyword, one tensor by its place."""
    return {"args": (), "kwargs": dict(inputs)} if isinstance(inputs, Mapping) else {"args": (inputs,)}


def _by_client(inputs: Any, shape: torch.Size) -> Any:
    """Return a row of samples, or a dict of them, as [clients, batch, …]."""
    if isinstance(inputs, Mapping):
        return {name: own.unflatten(0, shape) for name, own in inputs.items()}
    return inputs.unflatten(0, shape)


def _widths(widths: Sequence[float], device: torch.device) -> Tensor | None:
    """Return what hidden outputs are divided by, by client; None if by nothing."""
    return torch.tensor(widths, device=device) if any(width != 1.0 for width in widths) else None
