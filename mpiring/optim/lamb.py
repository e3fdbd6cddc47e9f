"""LAMB: Adam's direction, with a rate for each layer.

Source: You et al., Large batch optimization for deep learning: Training BERT in 76 minutes,
ICLR 2020, arXiv 1904.00962, algorithm 2.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..arguments import truth
from .optimizer import Model, Optimizer
from .parts import DIRECTION, Part
from .settings import ADAPTS, Groups, Scheduled
from .update import Update

MOMENTS = Update("lamb_moments", "g m v", "scale beta1 rest1 beta2 rest2", """
    g = scale * g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
""")
# m̂ = m / (1 - β1^t) and v̂ = v / (1 - β2^t); `root` is sqrt(1 - β2^t).
_DIRECTION = "r = m / part / (sqrt(v) / root + eps) + decay * w"
LOOK = Update("lamb_direction", "r w m v", "part root eps decay", _DIRECTION)
APPLY = Update("lamb", "w m v", "part root eps decay rate", f"""
    {_DIRECTION.replace('r =', 'w = w - rate * (', 1)})
""")


class LAMB(Optimizer):
    """LAMB: w ← w − η (‖w‖ / ‖r + λ w‖) (r + λ w) for each tensor, with Adam's r = m̂ / (√v̂ + ε).

    The paper: β1 = 0.9, β2 = 0.999, ε = 1e-6, λ = 0.01; its authors' code and others clip the
    norm of all gradients to 1 first, which is `max_norm=1` here. Where a norm is zero, and for
    tensors of `no_decay` (biases, normalisations), the ratio is 1.

    Optimizer has the arguments that all share.

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: η; a number, or a function of the number of updates before this one.
        betas: β1 and β2.
        eps: ε.
        weight_decay: λ.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.
        bias_correction: Correct m and v for their start at zero; without, m̂ = m and v̂ = v.
    """

    vectors = ("m", "v")

    def __init__(self, dp: Model, lr: Scheduled = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, *,
                 no_decay: Sequence[str] = (), bias_correction: bool = True,
                 groups: Groups | None = None, max_norm: float | None = None,
                 sharded: bool = False) -> None:
        self._corrects = bias_correction
        self._found: Mapping[str, Mapping[str, float]] = {}
        super().__init__(
            dp, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)

    def _more(self) -> Mapping[str, Any]:
        self._corrects = truth("bias_correction", self._corrects)
        return {"bias_correction": self._corrects}

    def _prepare(self, parts: Sequence[Part], scale: float) -> None:
        for part in parts:
            beta1, beta2 = part.settings["betas"]
            part.apply(MOMENTS, {"scale": scale, "beta1": beta1, "rest1": 1 - beta1,
                                 "beta2": beta2, "rest2": 1 - beta2})
        self._found = self._norms(parts, ["w", DIRECTION], self._directions)

    def _directions(self, part: Part, share: slice) -> Iterator[dict[str, Any]]:
        numbers = self._numbers(part)
        for block in part.blocks(LOOK.vectors, share):
            LOOK(block, numbers)
            yield block

    def _update(self, part: Part, scale: float) -> None:
        w, r = self._found[part.name]["w"], self._found[part.name][DIRECTION]
        ratio = w / r if part.settings[ADAPTS] and w and r else 1.0
        part.apply(APPLY, {**self._numbers(part), "rate": part.settings["lr"] * ratio})

    def _numbers(self, part: Part) -> dict[str, float]:
        its, t = part.settings, self.steps + 1
        first, second = (1 - beta**t if self._corrects else 1.0 for beta in its["betas"])
        return {"part": first, "root": math.sqrt(second), "eps": its["eps"],
                "decay": its["weight_decay"]}
