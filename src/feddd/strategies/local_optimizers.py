"""How clients step besides plain SGD, as rules of local training: a limit on the gradient's length, and Adam.

A rule returns the direction that SGD follows instead of the gradient, so every trainer can carry it out, in stacks of
clients too. What a rule remembers starts afresh with every client and round: in federated learning a local optimiser
does not outlive the round, because the model that it remembers steps of is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddd.core.units import Params
from feddd.strategies.with_rules import Momentum
from feddd.wire.local import LocalRound, Memory, Rule


@dataclass(frozen=True)
class Clip(Rule):
    """Shorten a client's whole gradient, all tensors together, to `norm` where it is longer: clip_grad_norm_."""

    norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.norm < float("inf"):
            raise ValueError(f"norm must be finite and above 0, not {self.norm}")

    @property
    def config(self) -> dict[str, float]:
        """Return the longest norm."""
        return {"max-gradient-norm": self.norm}

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Shorten the gradients of every client by one factor of its own."""
        if not gradients:
            return gradients, memory
        lengths = [torch.linalg.vector_norm(own.reshape(len(own), -1), dim=1) for own in gradients.values()]
        whole = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
        factor = (self.norm / (whole + 1e-6)).clamp(max=1.0)  # the little number is torch's
        return {name: own * _by_client(factor, own) for name, own in gradients.items()}, memory


@dataclass(frozen=True)
class Adam(Rule):
    """Follow m̂ / (√v̂ + ε), the running means of gradient and squared gradient without their bias (Kingma and Ba, 2015).

    A tensor without a gradient in a step is left alone in it, as torch.optim does. With `WeightDecay` before, this is
    torch.optim's Adam; with it behind, AdamW.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def excludes(self, others: Sequence[Rule]) -> str:
        """Refuse momentum: Adam has its own."""
        twice = super().excludes(others)
        return twice or next((type(other).__name__ for other in others if isinstance(other, Momentum)), "")

    def start(self, at: LocalRound) -> Memory:
        """Begin at rest."""
        found: dict[str, Tensor] = {}
        for name, own in at.before.items():
            found[f"mean {name}"], found[f"square {name}"] = torch.zeros_like(own), torch.zeros_like(own)
            found[f"steps {name}"] = torch.zeros(len(own), device=own.device)
        return found

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Move both means towards the gradient, and return the quotient."""
        after, direction = dict(memory), {}
        for name, own in gradients.items():
            steps = memory[f"steps {name}"] + 1
            mean = torch.lerp(memory[f"mean {name}"], own, 1 - self.beta1)
            square = (self.beta2 * memory[f"square {name}"]).addcmul_(own, own, value=1 - self.beta2)
            # In double: 1 − β₂ᵗ loses digits in float32 in the first steps.
            counted = steps.double()
            bias, other = ((1 - beta**counted).to(own.dtype) for beta in (self.beta1, self.beta2))
            size = square.sqrt().div_(_by_client(other.sqrt(), own)).add_(self.epsilon)
            direction[name] = (mean / size).div_(_by_client(bias, own))
            after |= {f"steps {name}": steps, f"mean {name}": mean, f"square {name}": square}
        return direction, after


def _by_client(numbers: Tensor, stack: Tensor) -> Tensor:
    """Return a number for each client in a shape that goes with its tensors."""
    return numbers.view(-1, *[1] * (stack.dim() - 1))
