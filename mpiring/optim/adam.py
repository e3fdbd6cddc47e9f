"""Adam and AdamW: adaptive learning rates for each element.

Sources: Kingma and Ba, ICLR 2015, arXiv 1412.6980. Loshchilov and Hutter, Decoupled weight decay
regularization, ICLR 2019, arXiv 1711.05101.
"""

import functools
import math
from collections.abc import Mapping, Sequence

from .method import UpdateRule
from .optimizer import Optimizer, Trained
from .parts import Part
from .settings import Betas, Groups, Scheduled
from .update import Update

# m̂ = m / (1 - β1^t), v̂ = v / (1 - β2^t); `step` is η / (1 - β1^t), `root` is sqrt(1 - β2^t).
ADAM = Update("adam", "w g m v", "scale decay keep beta1 rest1 beta2 rest2 step root eps", """
    g = scale * g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    w = keep * w - step * m / (sqrt(v) / root + eps)
""")


class Adam(Optimizer):
    """Adam: w ← w − η m̂ / (√v̂ + ε).

    m ← β1 m + (1 − β1) g and v ← β2 v + (1 − β2) g². Bias correction turns m and v, which start
    at zero, into m̂ and v̂. The defaults follow the paper.

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: Learning rate η; a number, or a function of the number of updates before this one.
        betas: Decay rates β1 and β2 of the moments.
        eps: Term ε of the denominator.
        weight_decay: Decay λ; λ w is added to the gradient.
        no_decay: Names and patterns of tensors without weight decay.
        groups: Settings that differ for some tensors, by name or pattern of a tensor:
            `{"head*": {"lr": 0.01}}`.
        max_norm: Largest norm of all gradients together; larger gradients are scaled down. None
            for no limit.
        sharded: If true, each rank updates only its slices of the parameters, stores state for
            these slices only, and sends the result to all ranks.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, a parameter cannot be updated,
            or another optimizer updates this model.

    Collective: yes. Blocking: yes.
    """

    _decouples = False

    def __init__(self, dp: Trained, lr: Scheduled = 1e-3, betas: Betas = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                lambda settings: ADAM, functools.partial(_numbers, self._decouples), ("m", "v")),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


class AdamW(Adam):
    """Adam with decoupled weight decay: w ← (1 − η λ) w − η m̂ / (√v̂ + ε).

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: Learning rate η; a number, or a function of the number of updates before this one.
        betas: Decay rates β1 and β2 of the moments.
        eps: Term ε of the denominator.
        weight_decay: Decay λ. As in PyTorch, it is multiplied by the learning rate; the paper has
            a separate rate for it.
        no_decay: Names and patterns of tensors without weight decay.
        groups: Settings that differ for some tensors, by name or pattern of a tensor:
            `{"head*": {"lr": 0.01}}`.
        max_norm: Largest norm of all gradients together; larger gradients are scaled down. None
            for no limit.
        sharded: If true, each rank updates only its slices of the parameters, stores state for
            these slices only, and sends the result to all ranks.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, a parameter cannot be updated,
            or another optimizer updates this model.

    Collective: yes. Blocking: yes.
    """

    _decouples = True

    def __init__(self, dp: Trained, lr: Scheduled = 1e-3, betas: Betas = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        super().__init__(dp, lr, betas, eps, weight_decay, no_decay=no_decay, groups=groups,
                         max_norm=max_norm, sharded=sharded)


def _numbers(decouples: bool, part: Part) -> Mapping[str, float]:
    settings, t = part.settings, part.t
    lr, decay, (beta1, beta2) = settings["lr"], settings["weight_decay"], settings["betas"]
    return {"scale": part.scale, "decay": 0.0 if decouples else decay,
            "keep": 1 - lr * decay if decouples else 1.0,
            "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2,
            "step": lr / (1 - beta1**t), "root": math.sqrt(1 - beta2**t), "eps": settings["eps"]}
