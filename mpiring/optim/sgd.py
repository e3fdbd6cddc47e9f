"""Stochastic gradient descent, with classical or Nesterov momentum.

Source: Sutskever et al., On the importance of initialization and momentum in deep learning,
ICML 2013. As in torch.optim.SGD, the momentum does not include the learning rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import truth
from ..errors import ConfigError
from .method import UpdateRule
from .optimizer import Optimizer, Trained
from .parts import Part
from .settings import Groups, Scheduled
from .update import Update

PLAIN = Update("sgd", "w g", "scale decay lr", """
    g = scale * g + decay * w
    w = w - lr * g
""")
MOMENTUM = Update("sgd_momentum", "w g b", "scale decay lr mu", """
    b = mu * b + (scale * g + decay * w)
    w = w - lr * b
""")
NESTEROV = Update("sgd_nesterov", "w g b", "scale decay lr mu", """
    g = scale * g + decay * w
    b = mu * b + g
    w = w - lr * (g + mu * b)
""")


class SGD(Optimizer):
    """SGD with momentum: b ← μ b + g + λ w, w ← w − η b.

    Nesterov momentum: b ← μ b + g + λ w, w ← w − η (g + λ w + μ b).

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: Learning rate η; a number, or a function of the number of updates before this one.
        momentum: Momentum μ; a number, or a function of the number of updates before this one.
            It may start after some updates. As in PyTorch, b is not updated while μ is 0.
        nesterov: If true, use Nesterov momentum.
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

    def __init__(self, dp: Trained, lr: Scheduled = 1e-3, momentum: Scheduled = 0.0, *,
                 nesterov: bool = False, weight_decay: float = 0.0,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        def extra(settings: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
            # A schedule is a function, and therefore true.
            if truth("nesterov", nesterov) and not any(
                    values["momentum"] for values in settings.values()):
                raise ConfigError("nesterov=True without momentum; give it one, as momentum=0.9")
            return {"nesterov": bool(nesterov)}

        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
                lambda values: (PLAIN if not values["momentum"] else
                                NESTEROV if nesterov else MOMENTUM),
                _numbers, optional=("b",), extra=extra),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


def _numbers(part: Part) -> Mapping[str, float]:
    settings = part.settings
    return {"scale": part.scale, "decay": settings["weight_decay"], "lr": settings["lr"],
            "mu": settings["momentum"]}
