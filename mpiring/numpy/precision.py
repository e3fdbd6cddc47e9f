"""Trains in 16 bits: scales the loss to keep small gradients, and has masters in 32 bits."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arguments import refuse_other_state, whole_number
from ..errors import ConfigError, GradientError
from ..memory.arrays import Array
from ..operations.consistency import same_on_all
from ..optim.parts import has_master, wide_dtype
from ..training.averager import HOPELESS_STEPS
from ..training.fused import Views
from .data_parallel import SAME_STATE, DataParallel, load_arrays


class LossScaler:
    """Scales the loss so that small gradients do not vanish in 16 bits, and adapts the scale.

    Multiply the gradient of the loss by `scale` in float32, because float16 overflows above 65504.
    After `dp.wait()`, call `step()` once, and update the parameters only if it returns True:

        scaler, masters = LossScaler(dp), MasterWeights(dp)
        ...
            backward(loss_gradient * scaler.scale)     # fills dp.grads, calls dp.ready
            dp.wait()
            if scaler.step():
                for name, master in masters.items():
                    master -= learning_rate * scaler.unscaled(name)
                masters.round_off()

    If a gradient of any rank is Inf or NaN, the mean is not finite on any rank, and all ranks skip
    the step without further messages. The scale then shrinks. It grows after `growth_interval`
    steps in a row that were not skipped. Scales are powers of two, so that scaling does not round,
    except to subnormal numbers.

    bfloat16 has the range of float32 and needs no scale: with `initial_scale=1, largest=1` the
    scaler only skips steps.

    Args:
        dp: DataParallel whose gradients are scaled.
        initial_scale: Scale of the first step; this and the next two arguments are powers of two.
        growth: Factor by which the scale grows, above 1.
        backoff: Factor by which the scale shrinks, below 1.
        growth_interval: Number of consecutive steps without a skipped step after which the scale
            grows.
        smallest, largest: Limits of the scale, powers of two.

    Raises:
        ConfigError: A value is wrong, or the values of the ranks differ.

    Collective: yes. Blocking: yes.
    Source: Micikevicius et al., Mixed precision training, ICLR 2018.
    """

    def __init__(self, dp: DataParallel, *, initial_scale: float = 2.0**16, growth: float = 2.0,
                 backoff: float = 0.5, growth_interval: int = 2000, smallest: float = 1.0,
                 largest: float = 2.0**24) -> None:
        _refuse_other_than_wrappers(dp)
        self._dp = dp
        with same_on_all(dp.comm, "LossScaler",
                         remedy="give it the same arguments on every rank") as same:
            same["smallest"] = self._smallest = _power_of_two(
                "smallest", smallest, 2.0**-100, 2.0**100)
            same["largest"] = self._largest = _power_of_two(
                "largest", largest, self._smallest, 2.0**100)
            same["initial_scale"] = self._scale = _power_of_two(
                "initial_scale", initial_scale, self._smallest, self._largest)
            same["growth"] = self._growth = _power_of_two("growth", growth, 2.0, 2.0**100)
            same["backoff"] = self._backoff = _power_of_two("backoff", backoff, 2.0**-100, 0.5)
            same["growth_interval"] = self._interval = whole_number(
                "growth_interval", growth_interval, 1)
        self._steps_in_row = self._skipped_at_smallest = 0
        # The last step of dp for which step() was called; 1 / scale of its gradients if finite.
        self._last_step = dp.steps
        self._unscale: float | None = None

    @property
    def scale(self) -> float:
        """Factor of the gradient of the loss; only `step` changes it."""
        return self._scale

    def step(self) -> bool:
        """Return True if the parameters are to be updated; set the scale of the next step.

        Call this on every rank, once after each `dp.wait()`. The result is the same on all ranks.
        If a rank does not call this, or has another scale, all ranks raise BufferMismatchError when
        the next gradients are sent.

        Raises:
            GradientError: `dp.wait()` has completed no step since the last call, or many steps in a
                row were skipped at the smallest scale; names the gradients that are not finite.

        Collective: yes, but sends nothing. Blocking: no.
        """
        if self._dp.steps == self._last_step:
            raise GradientError(
                f"rank {self._dp.comm.rank}: scaler.step() without new gradients; call it once "
                f"after each dp.wait()")
        self._last_step = self._dp.steps
        is_finite = self._dp.finite
        self._unscale = 1 / self._scale if is_finite else None
        if is_finite:
            self._count_step()
        else:
            self._count_skipped()
        self._dp.gradients.compared["loss scaler"] = (
            f"loss scale {self._scale:g} after step {self._last_step - 1}")
        return is_finite

    def unscaled(self, name: str) -> Array:
        """Return the gradient of a parameter, divided by the scale that it was computed with.

        Call this after `step()` has returned True, before gradients are written again.

        Args:
            name: Name of the parameter, as in `dp.grads`.

        Returns:
            A new array. Its dtype is float32 for gradients in 16 bits, otherwise the same.

        Raises:
            GradientError: `step()` was not called since `dp.wait()`, or returned False.

        Collective: no. Blocking: no.
        """
        if self._dp.steps != self._last_step or self._unscale is None:
            raise GradientError(
                f"rank {self._dp.comm.rank}: scaler.unscaled({name!r}) of a step that was not "
                f"accepted; call it after dp.wait(), and where scaler.step() returned True")
        gradient = self._dp.grads[name]
        wide_gradient: Array = gradient.astype(wide_dtype(gradient.dtype))
        wide_gradient *= self._unscale
        return wide_gradient

    def state_dict(self) -> dict[str, float | int]:
        """Return the state, the same on all ranks, for `load_state_dict`."""
        return {"scale": self._scale, "taken_in_row": self._steps_in_row,
                "skipped_at_smallest": self._skipped_at_smallest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, between two steps.

        The state of reducers depends on the scale, so restore it as well.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ConfigError: A value is missing or wrong, or the states of the ranks differ. In that
                case nothing has changed on any rank.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self._dp.comm, "the state of a LossScaler", remedy=SAME_STATE) as same:
            refuse_other_state(state, self.state_dict(), "of a LossScaler", only=True)
            same["scale"] = scale = _power_of_two(
                "scale", state["scale"], self._smallest, self._largest)
            same["taken_in_row"] = taken = whole_number("taken_in_row", state["taken_in_row"], 0)
            same["skipped_at_smallest"] = skipped = whole_number(
                "skipped_at_smallest", state["skipped_at_smallest"], 0)
        self._scale, self._steps_in_row, self._skipped_at_smallest = scale, taken, skipped
        self._last_step, self._unscale = self._dp.steps, None

    def _count_step(self) -> None:
        self._skipped_at_smallest = 0
        self._steps_in_row += 1
        if self._steps_in_row >= self._interval:
            self._steps_in_row = 0
            self._change(min(self._scale * self._growth, self._largest))

    def _count_skipped(self) -> None:
        self._steps_in_row = 0
        if self._scale > self._smallest:
            self._change(max(self._scale * self._backoff, self._smallest))
            return
        self._skipped_at_smallest += 1
        if self._skipped_at_smallest >= HOPELESS_STEPS:
            bad = [name for name, grad in self._dp.grads.items() if not np.isfinite(grad).all()]
            raise GradientError(
                f"rank {self._dp.comm.rank}: {self._skipped_at_smallest} steps in a row were "
                f"skipped at the smallest scale, {self._smallest:g}: means over ranks are not "
                f"finite in {', '.join(bad)}; look for the rank whose own gradients hold NaN or "
                f"Inf before dp.ready(): bad data, weights that have overflowed, or a learning "
                f"rate that is too large (or, with finite losses, allow a smaller smallest=)")

    def _change(self, scale: float) -> None:
        """Set the scale, also of the gradients that reducers store."""
        if scale != self._scale:
            self._dp.rescale(scale / self._scale)
            self._scale = scale


class MasterWeights(Views):
    """Copies of 16-bit parameters in float32, in which small updates are not rounded away.

    A mapping from names to arrays, to be updated in place. The arrays of 16-bit parameters are
    masters in float32; all other arrays are the parameters themselves. `round_off` copies the
    masters to the parameters. See LossScaler for a complete step.

    Args:
        dp: DataParallel with the parameters.

    Raises:
        ConfigError: `dp` is not a DataParallel of mpiring.numpy.

    Collective: no. Blocking: no.
    Source: Micikevicius et al., Mixed precision training, ICLR 2018.
    """

    _error, _reason = ConfigError, ""

    def __init__(self, dp: DataParallel) -> None:
        _refuse_other_than_wrappers(dp)
        self._dp = dp
        self._params = {name: array for name, array in dp.params.items() if has_master(array.dtype)}
        super().__init__({name: array.astype(np.float32) if name in self._params else array
                          for name, array in dp.params.items()}, "masters")

    def round_off(self) -> None:
        """Round the masters to the 16-bit parameters, in place: to nearest, ties to even.

        Collective: no. Blocking: no.
        """
        # Numbers that are too large become Inf.
        with np.errstate(all="ignore"):
            for name, array in self._params.items():
                array[...] = self._views[name]

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all arrays by name, bitwise identical on all ranks."""
        return {name: array.copy() for name, array in self._views.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy a state into all arrays, and round the masters to the parameters.

        Args:
            state: Arrays that `state_dict` returned.

        Raises:
            ConfigError: An array is missing, unknown, or of another shape or dtype, or differs
                between ranks. In that case nothing has changed on any rank.

        Collective: yes. Blocking: yes.
        """
        load_arrays(self._dp.comm, self._views, state, "of the MasterWeights")
        self.round_off()

    def own_state_dict(self) -> dict[str, Any]:
        """Return the DataParallel's own state on this rank."""
        return self._dp.own_state_dict()

    def load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the DataParallel's own state on this rank.

        Args:
            state_dict: Result of `own_state_dict`.

        Collective: yes. Blocking: yes.
        """
        self._dp.load_own_state_dict(state_dict)


def _refuse_other_than_wrappers(dp: object) -> None:
    if not isinstance(getattr(dp, "grads", None), Mapping):
        raise ConfigError(f"dp is a {type(dp).__name__}; pass a DataParallel of mpiring.numpy")


def _power_of_two(name: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    # frexp(2.0**k) is (0.5, k + 1). Comparisons with NaN are false.
    if not (least <= number <= most and math.frexp(number)[0] == 0.5):
        raise ConfigError(f"{name}={value!r}: expected a power of two from {least:g} to {most:g}")
    return number
