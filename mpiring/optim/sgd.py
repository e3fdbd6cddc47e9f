"""Stochastic gradient descent, with momentum or Nesterov's.

Sources: Sutskever et al., On the importance of initialization and momentum in deep learning,
ICML 2013; in the form of torch.optim.SGD, where the rate is not part of the momentum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import truth
from ..errors import ConfigError
from .optimizer import Optimizer, TrainedModel, UpdateRule
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
    """Gradient descent: b ← μ b + g + λ w, w ← w − η b; Nesterov's w ← w − η (g + λ w + μ b).

    Optimizer has the arguments that all share.

    Args:
        dp: A mpiring.numpy.DataParallel.
        lr: η; a number, or a function of the number of updates before this one.
        momentum: μ; the same. It may begin later. While it is 0, b is not updated, as in PyTorch.
        nesterov: Look ahead, as Nesterov.
        weight_decay: λ.
    """

    def __init__(self, dp: TrainedModel, lr: Scheduled = 1e-3, momentum: Scheduled = 0.0, *,
                 nesterov: bool = False, weight_decay: float = 0.0,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        def more(settings: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
            # A function counts, too.
            if truth("nesterov", nesterov) and not any(
                    its["momentum"] for its in settings.values()):
                raise ConfigError("nesterov=True without momentum; give it one, as momentum=0.9")
            return {"nesterov": bool(nesterov)}

        super().__init__(
            dp, UpdateRule(
                {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
                lambda its: (NESTEROV if nesterov else MOMENTUM) if its["momentum"] else PLAIN,
                _numbers, optional=("b",), more=more),
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)


def _numbers(part: Part) -> Mapping[str, float]:
    its = part.settings
    return {"scale": part.scale, "decay": its["weight_decay"], "lr": its["lr"],
            "mu": its["momentum"]}
