"""Several clients trained at once: their parameters stacked, one batched product or grouped convolution for all.

Small layers leave a core idle between operations; ten clients in one operation do not. A client with fewer batches
steps out when it is done, and a short last batch counts only its own samples, so that everybody gets the gradients
of training alone. Forward and backward pass are written out: every layer knows its own gradient, which goes straight
into the weights, or where rules change it (see `wire.local`) into a stack of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddd.core.units import Params
from feddd.simulation.layers import (
    Layer,
    Pair,
    StackedConv,
    StackedFlatten,
    StackedLinear,
    StackedPool,
    StackedReLU,
    StackedScale,
    StackedSoftmax,
)
from feddd.simulation.training import Local, Samples, Train, Trained, Training, batches, gather
from feddd.wire.local import Stepping, change_gradients


@dataclass(frozen=True)
class Chain:
    """A network as a row of layers that can be stacked; modules by name."""

    modules: tuple[tuple[str, nn.Module], ...]
    dense: bool

    @property
    def names(self) -> list[str]:
        """Return the parameters, in the order of the layers."""
        return [
            f"{name}.{local}"
            for name, module in self.modules
            for local in ("weight", "bias")
            if isinstance(module, nn.Linear | nn.Conv2d)
        ]

    def layers(self, stack: Params, clients: int, widths: Tensor | None, into: Params) -> list[Layer]:
        """Return the layers of the first clients of a stack, working on its memory.

        widths: of all clients, to scale by    into: where the steps go, the stack itself or one like it
        """
        made: list[Layer] = []
        last = next(name for name, module in reversed(self.modules) if isinstance(module, nn.Linear))
        for name, module in self.modules:
            if isinstance(module, nn.Linear):
                made.append(StackedLinear(*_tensors(name, stack, clients), _tensors(name, into, clients)))
            elif isinstance(module, nn.Conv2d):
                own, steps = _grouped(*_tensors(name, stack, clients)), _grouped(*_tensors(name, into, clients))
                made.append(StackedConv(*own, steps, clients, module.stride, module.padding, module.dilation))  # type: ignore[arg-type]
            elif isinstance(module, nn.MaxPool2d):
                made.append(StackedPool(_pair(module.kernel_size), _pair(module.stride)))
            elif isinstance(module, nn.Softmax):
                made.append(StackedSoftmax())
            else:
                made.append(StackedReLU() if isinstance(module, nn.ReLU) else StackedFlatten(clients))
            if widths is not None and isinstance(module, nn.Linear | nn.Conv2d) and name != last:
                factor = 1.0 / widths[:clients]
                if isinstance(module, nn.Linear):
                    made.append(StackedScale(factor.view(-1, 1, 1)))
                else:
                    made.append(StackedScale(factor.repeat_interleave(module.out_channels).view(1, -1, 1, 1)))
        return made


def _tensors(name: str, stack: Params, clients: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer, of the first clients."""
    return stack[f"{name}.weight"][:clients], stack[f"{name}.bias"][:clients]


def _grouped(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return a stack of convolutions as one; in its memory the channels of a pixel lie together, see `_load`."""
    return weight.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2), bias.flatten()


class Unfit(ValueError):
    """Say why a model cannot be trained in stacks; the text completes "… because"."""


def chain(model: nn.Module) -> Chain:
    """Return the model as a chain, if it is exactly [convolutions,] flatten, linear layers, with pooling and ReLU
    between, and perhaps a softmax at the end; else raise `Unfit`.

    Nothing is guessed: exact types, settings that the layers above implement, every module and parameter used once,
    trained, and without hooks or code of its own.
    """
    if type(model) is not nn.Sequential:
        raise Unfit(f"it is a {type(model).__name__}, not a plain nn.Sequential")
    _check_untouched("the model", model)
    modules = tuple((name, module) for name, module in model._modules.items() if module is not None)
    seen: dict[int, str] = {}
    for name, module in modules:
        for part in (module, *module.parameters()):
            if seen.setdefault(id(part), name) != name:
                how = "is also used as" if part is module else "shares a parameter with"
                raise Unfit(f"module {seen[id(part)]!r} {how} module {name!r}")
        _check_layer(name, module)
    kinds = [type(module) for _, module in modules]
    if nn.Flatten not in kinds or nn.Linear in kinds[: kinds.index(nn.Flatten)]:
        raise Unfit("it has no nn.Flatten before its first linear layer")
    body = kinds[:-1] if kinds[-1] is nn.Softmax else kinds
    if body[-1] is not nn.Linear or nn.Softmax in body:
        raise Unfit(f"it ends in {kinds[-1].__name__}, not in nn.Linear with at most one nn.Softmax, behind it")
    return Chain(modules, dense=not any(kind in (nn.Conv2d, nn.MaxPool2d) for kind in kinds))


def is_chain(model: nn.Module) -> bool:
    """Return whether `chain` takes the model."""
    try:
        chain(model)
    except Unfit:
        return False
    return True


def _check_layer(name: str, module: nn.Module) -> None:
    """Refuse a layer that is not one of the six kinds with settings that are implemented here."""
    where = f"module {name!r}"
    settings: dict[str, tuple[object, ...]] = {}  # what is implemented, where there is a choice
    if type(module) is nn.Conv2d:
        settings = {"groups": (1,), "padding_mode": ("zeros",), "transposed": (False,)}
        if isinstance(module.padding, str):
            raise Unfit(f"{where} has padding {module.padding!r}, not a number")
    elif type(module) is nn.MaxPool2d:
        settings = {"padding": (0, (0, 0)), "dilation": (1, (1, 1)), "ceil_mode": (False,), "return_indices": (False,)}
    elif type(module) is nn.Flatten:
        settings = {"start_dim": (1,), "end_dim": (-1,)}
    elif type(module) is nn.Softmax:
        settings = {"dim": (1, -1)}
    elif type(module) not in (nn.Linear, nn.ReLU):
        kinds = "nn.Conv2d, MaxPool2d, ReLU, Flatten, Linear or Softmax"
        raise Unfit(f"{where} is a {type(module).__name__}, not {kinds} itself")
    for setting, known in settings.items():
        if getattr(module, setting) not in known:
            raise Unfit(f"{where} has {setting} {getattr(module, setting)!r}")
    _check_untouched(where, module)
    own = {local: tensor for local, tensor in module._parameters.items() if tensor is not None}
    expected = {"weight", "bias"} if isinstance(module, nn.Linear | nn.Conv2d) else set()
    if set(own) != expected or module._buffers:
        raise Unfit(f"{where} has {', '.join([*own, *module._buffers]) or 'no parameters'}, not weight and bias")
    for local, tensor in own.items():
        _check_parameter(f"{name}.{local}", tensor)


def _check_untouched(where: str, module: nn.Module) -> None:
    """Refuse a module that does more than its class says: hooks, a forward of its own, evaluation mode."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks):
        raise Unfit(f"{where} has a hook")
    if "forward" in vars(module) or "__call__" in vars(module):
        raise Unfit(f"{where} has a forward of its own")
    if not module.training:
        raise Unfit(f"{where} is in evaluation mode")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that is not trained as plain float32."""
    if not parameter.requires_grad:
        raise Unfit(f"parameter {name!r} is frozen")
    if parameter.dtype != torch.float32:
        raise Unfit(f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, not float32")
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise Unfit(f"parameter {name!r} has a hook")


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def stack_trainer(network: Chain) -> Train:
    """Return the same as training each client alone, up to rounding."""

    @torch.no_grad()
    def train(
        before: Params,
        samples: Samples,
        clients: Sequence[Local],
        training: Training,
        rules: Sequence[Stepping] = (),
    ) -> Trained:
        device = samples.targets.device
        # Longest first: those still at work are always the first of the stack.
        order = sorted(range(len(clients)), key=lambda place: -clients[place].count)
        numbers, sizes = schedule([clients[place] for place in order], training)
        index = torch.from_numpy(numbers).to(device)
        labels = samples.targets.index_select(0, index.flatten()).view(*index.shape, 1)
        counted = torch.arange(training.batch_size, device=device) < torch.from_numpy(sizes).to(device).unsqueeze(2)
        weight = counted / torch.from_numpy(np.maximum(sizes, 1).astype(np.float32)).to(device).unsqueeze(2)
        losses = torch.zeros(labels.shape, device=device)
        stack = {name: _load(before[name], order) for name in network.names}
        rules = [Stepping(one.rule, {name: _load(own, order) for name, own in one.memory.items()}) for one in rules]
        into = {name: torch.zeros_like(values) for name, values in stack.items()} if rules else stack
        layers: list[Layer] = []
        still, widths = 0, None
        if any(client.width != 1.0 for client in clients):
            widths = torch.tensor([clients[place].width for place in order], device=device)
        # Everything is cut into steps at once: views are cheap, but there would be a dozen for every step.
        cut = (index.unbind(), labels.unbind(), weight.unsqueeze(3).unbind(), losses.unbind())
        for step, (active, longest) in enumerate(zip((sizes > 0).sum(1).tolist(), sizes.max(1).tolist(), strict=True)):
            if active != still:
                layers, still = network.layers(stack, active, widths, into), active
                rules = [one.only(slice(active)) for one in rules]
            chosen, target, shares, each = (whole[step] for whole in cut)
            if (active, longest) != chosen.shape:
                chosen, target, shares, each = (part[:active, :longest] for part in (chosen, target, shares, each))
            images = gather(samples, chosen.flatten())
            by_client = images.view(active, longest, *images.shape[1:])
            inputs = by_client.flatten(2) if network.dense else _side_by_side(by_client)
            each.copy_(_update(layers, inputs, target, shares, -1.0 if rules else training.learning_rate))
            if rules:
                rules = _follow(rules, stack, into, active, training.learning_rate)
        back = np.argsort(order).tolist()
        after = {name: _unload(values, back) for name, values in stack.items()}
        seen_losses = (losses.squeeze(3).double() * counted).transpose(0, 1)[back].flatten(1)
        seen = np.array([training.epochs * client.count for client in clients])
        mean, mean_square = seen_losses.sum(1).cpu().numpy() / seen, seen_losses.square().sum(1).cpu().numpy() / seen
        return Trained(after, mean, np.sqrt(mean_square))

    return train


def _update(layers: Sequence[Layer], inputs: Tensor, target: Tensor, weight: Tensor, step: float) -> Tensor:
    """Take one step of SGD for every client; labels, the samples' weights and the losses are [clients, batch, 1]."""
    for layer in layers:
        inputs = layer.forward(inputs)
    log_probabilities = inputs.log_softmax(2)
    losses = log_probabilities.gather(2, target).neg_()
    # (probability − one for the right class) / batch size
    gradient = log_probabilities.exp_().scatter_add_(2, target, torch.full_like(losses, -1)).mul_(weight)
    lowest = next(number for number, layer in enumerate(layers) if isinstance(layer, StackedLinear | StackedConv))
    for number in range(len(layers) - 1, lowest - 1, -1):
        gradient = layers[number].backward(gradient, step, first=number == lowest)
    return losses


def _follow(
    rules: Sequence[Stepping], stack: Params, sums: Params, active: int, learning_rate: float
) -> Sequence[Stepping]:
    """Step where the rules lead to from the gradients of the first clients, and put those back to zero."""
    gradients, params = ({name: own[:active] for name, own in whole.items()} for whole in (sums, stack))
    changed, rules = change_gradients(rules, gradients, params)
    for name, values in params.items():
        values.add_(changed[name], alpha=-learning_rate)
        gradients[name].zero_()
    return rules


def _load(stack: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy in another order of clients; convolutions with a pixel's channels together."""
    chosen = stack.index_select(0, torch.tensor(order, device=stack.device))
    if stack.dim() != 5:
        return chosen
    return chosen.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _unload(stack: Tensor, order: Sequence[int]) -> Tensor:
    return stack.index_select(0, torch.tensor(order, device=stack.device)).contiguous()


def _side_by_side(images: Tensor) -> Tensor:
    """[S, batch, channels, …] → [batch, S · channels, …] with a pixel's channels together."""
    return images.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def schedule(clients: Sequence[Local], training: Training) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample numbers [steps, clients, batch], short batches padded with the first sample, and their sizes."""
    steps = training.epochs * -(-clients[0].count // training.batch_size)
    numbers = np.zeros((steps, len(clients), training.batch_size), dtype=np.int64)
    sizes = np.zeros((steps, len(clients)), dtype=np.int64)
    for place, client in enumerate(clients):
        client.rng.integers(2**63)  # the reference trainer seeds stochastic layers with it; keep all in step
        for step, batch in enumerate(batches(client.count, training, client.rng)):
            numbers[step, place, : len(batch)] = batch + client.first
            sizes[step, place] = len(batch)
    return numbers, sizes
