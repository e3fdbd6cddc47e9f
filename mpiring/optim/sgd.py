"""Stochastic gradient descent, with momentum or Nesterov's.

Sources: Sutskever et al., On the importance of initialization and momentum in deep learning,
ICML 2013; in the form of torch.optim.SGD, where the rate is not part of the momentum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .optimizer import Model, Optimizer
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
        momentum: μ; the same.
        nesterov: Look ahead, as Nesterov.
        weight_decay: λ.
    """

    def __init__(self, dp: Model, lr: Scheduled = 1e-3, momentum: Scheduled = 0.0, *,
                 nesterov: bool = False, weight_decay: float = 0.0,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        self._nesterov = bool(nesterov)
        if nesterov and not momentum:
            raise ConfigError("nesterov=True without momentum; give it one, as momentum=0.9")
        super().__init__(
            dp, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)
        has_momentum = any(callable(its["momentum"]) or its["momentum"]
                           for its in self.settings.values())
        self.vectors = ("b",) if has_momentum else ()

    def _more(self) -> Mapping[str, Any]:
        return {"nesterov": self._nesterov}

    def _update(self, part: Part, scale: float) -> None:
        update = (NESTEROV if self._nesterov else MOMENTUM) if self.vectors else PLAIN
        its = part.settings
        part.apply(update, {"scale": scale, "decay": its["weight_decay"], "lr": its["lr"],
                            "mu": its["momentum"]})
