"""Adam and AdamW: rates that adapt to each element.

Sources: Kingma and Ba, Adam: A method for stochastic optimization, ICLR 2015; Loshchilov and
Hutter, Decoupled weight decay regularization, ICLR 2019.
"""

import functools
import math
from collections.abc import Mapping, Sequence

from .optimizer import Optimizer, TrainedModel, UpdateRule
from .parts import Part
from .settings import Betas, Groups, Scheduled
from .update import Update

# m̂ = m / (1 - β1^t), v̂ = v / (1 - β2^t); `step` is η / (1 - β1^t), `root` sqrt(1 - β2^t).
ADAM = Update("adam", "w g m v", "scale decay keep beta1 rest1 beta2 rest2 step root eps", """
    g = scale * g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    w = keep * w - step * m / (sqrt(v) / root + eps)
""")


class Adam(Optimizer):
    """Adam: w ← w − η m̂ / (√v̂ + ε).

    m ← β1 m + (1 − β1) g and v ← β2 v + (1 − β2) g²; m̂ and v̂ are corrected for their start at
    zero. The paper's defaults.

    Optimizer has the arguments that all share.

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: η; a number, or a function of the number of updates before this one.
        betas: β1 and β2.
        eps: ε.
        weight_decay: λ, of λ w that is added to the gradient.
    """

    _decouples = False

    def __init__(self, dp: TrainedModel, lr: Scheduled = 1e-3, betas: Betas = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                lambda its: ADAM, functools.partial(_numbers, self._decouples), ("m", "v")),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


class AdamW(Adam):
    """Adam with decoupled weight decay: w ← (1 − η λ) w − η m̂ / (√v̂ + ε).

    Adam has the other arguments.

    Args:
        weight_decay: λ, times the rate as in PyTorch; the paper has a rate of its own for it.
    """

    _decouples = True

    def __init__(self, dp: TrainedModel, lr: Scheduled = 1e-3, betas: Betas = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        super().__init__(dp, lr, betas, eps, weight_decay, no_decay=no_decay, groups=groups,
                         max_norm=max_norm, sharded=sharded)


def _numbers(decouples: bool, part: Part) -> Mapping[str, float]:
    its, t = part.settings, part.t
    (beta1, beta2), decay = its["betas"], its["weight_decay"]
    return {"scale": part.scale, "decay": 0.0 if decouples else decay,
            "keep": 1 - its["lr"] * decay if decouples else 1.0,
            "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2,
            "step": its["lr"] / (1 - beta1**t), "root": math.sqrt(1 - beta2**t), "eps": its["eps"]}
