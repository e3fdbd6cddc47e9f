"""LAMB: the direction of Adam, with a learning rate for each layer.

Source: You et al., Large batch optimization for deep learning, ICLR 2020, arXiv 1904.00962,
algorithm 2.
"""

import functools
import math
from collections.abc import Mapping, Sequence

from ..arguments import truth
from .method import Layerwise, UpdateRule
from .optimizer import Optimizer, Trained
from .parts import Part
from .settings import Betas, Groups, Scheduled
from .update import Update

MOMENTS = Update("lamb_moments", "g m v", "scale beta1 rest1 beta2 rest2", """
    g = scale * g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
""")
# m̂ = m / (1 - β1^t) and v̂ = v / (1 - β2^t); `root` is sqrt(1 - β2^t).
_DIRECTION = "r = m / part / (sqrt(v) / root + eps) + decay * w"
DIRECTION = Update("lamb_direction", "r w m v", "part root eps decay", _DIRECTION)
APPLY = Update("lamb", "w m v", "part root eps decay rate", f"""
    {_DIRECTION.replace('r =', 'w = w - rate * (', 1)})
""")


class LAMB(Optimizer):
    """LAMB: w ← w − η (‖w‖ / ‖r + λ w‖) (r + λ w) for each tensor, with Adam's r = m̂ / (√v̂ + ε).

    The paper uses β1 = 0.9, β2 = 0.999, ε = 1e-6, λ = 0.01. The authors' code and other
    implementations first clip the norm of all gradients to 1; `max_norm=1` does this. The ratio of
    norms is 1 if a norm is zero, and for tensors of `no_decay` (biases, normalization layers).

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: Learning rate η; a number, or a function of the number of updates before this one.
        betas: Decay rates β1 and β2 of the moments.
        eps: Term ε of the denominator.
        weight_decay: Decay λ.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.
        bias_correction: If true, correct m and v for their start at zero. If false, m̂ = m and
            v̂ = v.
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

    def __init__(self, dp: Trained, lr: Scheduled = 1e-3, betas: Betas = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, *,
                 no_decay: Sequence[str] = (), bias_correction: bool = True,
                 groups: Groups | None = None, max_norm: float | None = None,
                 sharded: bool = False) -> None:
        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                lambda settings: APPLY, functools.partial(_numbers, bias_correction), ("m", "v"),
                layerwise=Layerwise(lambda part, w, r: w / r, MOMENTS, DIRECTION),
                extra=lambda _: {"bias_correction": truth("bias_correction", bias_correction)}),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


def _numbers(corrects: bool, part: Part) -> Mapping[str, float]:
    settings, (beta1, beta2) = part.settings, part.settings["betas"]
    first, second = (1 - beta**part.t if corrects else 1.0 for beta in (beta1, beta2))
    return {"scale": part.scale, "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2,
            "rest2": 1 - beta2, "part": first, "root": math.sqrt(second),
            "eps": settings["eps"], "decay": settings["weight_decay"],
            "rate": settings["lr"] * part.ratio}
