"""LARS: a learning rate for each layer, from the norms of the layer's weights and gradient.

Source: You, Gitman and Ginsburg, Large batch training of convolutional networks, arXiv 1708.03888,
2017, algorithm 1.
"""

from collections.abc import Mapping, Sequence

from .method import Layerwise, UpdateRule
from .optimizer import Optimizer, Trained
from .parts import Part
from .settings import Groups, Scheduled
from .update import Update

LARS_UPDATE = Update("lars", "w g v", "scale decay mu rate", """
    v = mu * v + rate * (scale * g + decay * w)
    w = w - v
""")


class LARS(Optimizer):
    """LARS: v ← μ v + γ λ (g + β w), w ← w − v, with λ = η ‖w‖ / (‖g‖ + β ‖w‖) for each tensor.

    The paper uses μ = 0.9, η = 0.001 and β = 0.0005. The rate γ grows with the batch, to 6.4 for
    2048 images, with a warm-up. The factor λ is 1 if a norm is zero, and for tensors of `no_decay`
    (biases, normalization layers).

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: Learning rate γ; a number, or a function of the number of updates before this one.
        momentum: Momentum μ; a number, or a function of the number of updates before this one.
        weight_decay: Decay β.
        trust: Trust coefficient η.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.
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

    def __init__(self, dp: Trained, lr: Scheduled = 0.1, momentum: Scheduled = 0.9,
                 weight_decay: float = 1e-4, trust: float = 0.001, *,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust},
                lambda settings: LARS_UPDATE, _numbers, ("v",), layerwise=Layerwise(_ratio)),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


def _ratio(part: Part, w: float, g: float) -> float:
    trust, decay = part.settings["trust"], part.settings["weight_decay"]
    return float(trust * w / (part.scale * g + decay * w))


def _numbers(part: Part) -> Mapping[str, float]:
    settings = part.settings
    return {"scale": part.scale, "decay": settings["weight_decay"], "mu": settings["momentum"],
            "rate": settings["lr"] * part.ratio}
