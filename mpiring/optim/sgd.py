"""Stochastic gradient descent, with momentum or Nesterov's.

Sources: Sutskever et al., On the importance of initialization and momentum in deep learning,
ICML 2013; in the form of torch.optim.SGD, where the rate is not part of the momentum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import truth
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
        momentum: μ; the same. It may begin later. While it is 0, b is not updated, as in PyTorch.
        nesterov: Look ahead, as Nesterov.
        weight_decay: λ.
    """

    optional = ("b",)

    def __init__(self, dp: Model, lr: Scheduled = 1e-3, momentum: Scheduled = 0.0, *,
                 nesterov: bool = False, weight_decay: float = 0.0,
                 no_decay: Sequence[str] = (), groups: Groups | None = None,
                 max_norm: float | None = None, sharded: bool = False) -> None:
        self._nesterov = nesterov
        super().__init__(
            dp, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            groups=groups, no_decay=no_decay, max_norm=max_norm, sharded=sharded)
        self._begin_to_remember(self.settings)

    def _more(self) -> Mapping[str, Any]:
        self._nesterov = truth("nesterov", self._nesterov)
        if self._nesterov and not _has_momentum(self.settings):
            raise ConfigError("nesterov=True without momentum; give it one, as momentum=0.9")
        return {"nesterov": self._nesterov}

    def _begin_to_remember(self, now: Mapping[str, Mapping[str, Any]]) -> None:
        if not self.vectors and _has_momentum(now):
            self.vectors = self.optional

    def _update(self, part: Part, scale: float) -> None:
        its = part.settings
        update = (NESTEROV if self._nesterov else MOMENTUM) if its["momentum"] else PLAIN
        part.apply(update, {"scale": scale, "decay": its["weight_decay"], "lr": its["lr"],
                            "mu": its["momentum"]})


def _has_momentum(settings: Mapping[str, Mapping[str, Any]]) -> bool:
    # A function counts, too.
    return any(its["momentum"] for its in settings.values())
