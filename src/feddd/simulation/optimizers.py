"""What `[training]` says about steps: rules for every client, an optimiser of the user's own, the rate of a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from feddd.errors import InputError
from feddd.strategies.local_optimizers import Adam, Clip
from feddd.strategies.with_rules import Momentum, WeightDecay
from feddd.wire.local import Rule
from feddd.world.models import import_object

if TYPE_CHECKING:
    from feddd.simulation.training import Training


@dataclass(frozen=True)
class OwnOptimizer(Rule):
    """Stand for an optimiser of the user's own beside rules that allow no other: it steps where `training` has it."""

    path: str = ""

    @property
    def steps(self) -> bool:
        """Return that it changes the steps."""
        return True


def training_rules(training: Training) -> tuple[Rule, ...]:
    """Return what changes the steps of every client, in order; they come behind the rules of its task.

    Clipping, then weight decay, then the optimiser, as `clip_grad_norm_` and `step` of torch.optim; AdamW's weight
    decay is no part of the gradient and comes last.
    """
    clip = (Clip(training.max_gradient_norm),) if training.max_gradient_norm is not None else ()
    decay = (WeightDecay(training.weight_decay),) if training.weight_decay else ()
    if ":" in training.optimizer:
        return (*clip, OwnOptimizer(training.optimizer))
    if training.optimizer == "adam":
        return (*clip, *decay, Adam())
    if training.optimizer == "adamw":
        return (*clip, Adam(), *decay)
    return (*clip, *decay, *((Momentum(training.momentum),) if training.momentum else ()))


def own_optimizer(training: Training, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
    """Return the optimiser that an import path makes for one client's round; None if rules do it all."""
    if ":" not in training.optimizer:
        return None
    made = import_object(training.optimizer)(list(parameters), lr=training.learning_rate)
    if not isinstance(made, Optimizer):
        kind = type(made).__name__
        raise InputError(f"training.optimizer {training.optimizer!r} makes a {kind}, not a torch.optim.Optimizer")
    return made


def check_optimizer(training: Training) -> None:
    """Refuse an optimiser of the user's own that cannot be made or cannot step, before anything is trained by it."""
    weight = nn.Parameter(torch.zeros(2, 2))
    try:
        made = own_optimizer(training, [weight])
        if made is not None:
            weight.grad = torch.zeros_like(weight)
            made.step()
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"training.optimizer {training.optimizer!r} must take (parameters, lr) and step without more: {reason}"
        ) from error
