"""LARS: a rate for each layer, by the norms of its weights and its gradient.

Source: You, Gitman and Ginsburg, Large batch training of convolutional networks, arXiv 1708.03888,
2017, algorithm 1.
"""

from collections.abc import Mapping, Sequence

from .optimizer import Model, Optimizer
from .parts import Part
from .settings import ADAPTS, Groups, Scheduled
from .update import Update

LARS_UPDATE = Update("lars", "w g v", "scale decay mu rate", """
    v = mu * v + rate * (scale * g + decay * w)
    w = w - v
""")


class LARS(Optimizer):
    """LARS: v ← μ v + γ λ (g + β w), w ← w − v, with λ = η ‖w‖ / (‖g‖ + β ‖w‖) for each tensor.

    The paper: μ = 0.9, η = 0.001, β = 0.0005, and a γ that grows with the batch, such as 6.4 for
    2048 images with a warm-up. Where a norm is zero, and for tensors of `no_decay` (biases,
    normalisations), λ is 1.

    Optimizer has the arguments that all share.

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: γ; a number, or a function of the number of updates before this one.
        momentum: μ; the same.
        weight_decay: β.
        trust: η.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.
    """

    vectors = ("v",)

    def __init__(self, dp: Model, lr: Scheduled = 0.1, momentum: Scheduled = 0.9,
                 weight_decay: float = 1e-4, trust: float = 0.001, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        self._found: Mapping[str, Mapping[str, float]] = {}
        super().__init__(
            dp, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust},
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)

    def _prepare(self, parts: Sequence[Part], scale: float) -> None:
        self._found = self._norms(
            parts, ["w", "g"], lambda part, share: part.blocks(["w", "g"], share))

    def _update(self, part: Part, scale: float) -> None:
        its, decay, ratio = part.settings, part.settings["weight_decay"], 1.0
        w, g = self._found[part.name]["w"], scale * self._found[part.name]["g"]
        if its[ADAPTS] and w and g:
            ratio = its["trust"] * w / (g + decay * w)
        part.apply(LARS_UPDATE, {"scale": scale, "decay": decay, "mu": its["momentum"],
                                 "rate": its["lr"] * ratio})
