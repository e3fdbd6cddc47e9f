"""An optimizer of which each rank runs a slice: of gradients, of state and of weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch

from ..arguments import number
from ..errors import ConfigError, GradientError
from ..memory.sliced import Sliced
from ..text import first_few
from .averaging import Averaging
from .data_parallel import DataParallel
from .elementwise import elementwise_state, refuse_whole_tensors
from .guarded import Guard, without_waiting
from .node_weights import NodeWeights
from .param_groups import param_groups, refuse_ungrouped
from .sharded_state import ShardedState, States, numbers_of, state_of
from .shards import Shard, cut, placeholder
from .tensors import tensor_of
from .weights import WeightBuckets

# Of squares: what is summed at once, in float64.
_BLOCK = 1 << 18
_WEIGHTS = {"rank": WeightBuckets, "node": NodeWeights}


class Sharded(torch.optim.Optimizer):
    """Runs an optimizer of PyTorch's on slices, one per rank, of a model's weights.

        model = mpiring.torch.DataParallel(model, comm)
        optimizer = mpiring.torch.Sharded(torch.optim.AdamW, model, lr=3e-4, fused=True)

    Each rank is left the means of its own slice of the gradients, updates that slice of the
    weights, with state of this slice only, and hands it to the others: as many bytes travel as in
    an allreduce, and no update is made twice. The result is that of the optimizer itself, to
    rounding. (ZeRO, stage 1: Rajbhandari et al. 2020, arXiv 1910.02054.)

    The training loop stays as it was, but for gradients: no rank has them as a whole. After
    backward, `p.grad` of the model raises an error where it is used, and `param_groups` has this
    rank's slices, as vectors. Clip with `clip_grad_norm_` of this class; torch.nn.utils' own would
    see one rank's slice. Each step takes the gradients of one backward pass; earlier ones may add
    to them in `model.no_sync()`.

    Where the gradient of any rank is not finite, `step` changes nothing on any rank, and rank 0
    warns; GradScaler finds the same on all ranks. A parameter that no rank has reached
    (find_unused_parameters=True) has a zero gradient.

    Args:
        optimizer_class: One that treats each element for itself: SGD, Adam, AdamW, NAdam, RAdam,
            Adagrad, RMSprop, Adadelta, Adamax, Rprop, ASGD; another one is tried on a small tensor
            first.
        model: What averages the gradients; on all ranks alike.
        params: Groups of its parameters, as the class takes them; all by default.
        overlap: Hand slices to the others while the next forward pass runs; see `synchronize`.
        weights: "rank": each rank has all weights. "node": they lie once in the memory of each
            node, for all its ranks, on CPUs; see `writing_weights`.
        defaults: The class's own arguments, such as `lr`, `foreach` and `fused`.

    Raises:
        ConfigError: The class looks at whole tensors; the parameters are not the model's, or one
            that is trained is missing; the model has such an optimizer already, or sparse
            gradients.

    Collective: yes, and so are `step`, `clip_grad_norm_`, `grad_norm`, `state_dict` and
    `sharded_state_dict`. Blocking: yes.
    """

    def __init__(self, optimizer_class: Any, model: DataParallel, params: Any = None, *,
                 overlap: bool = False, weights: str = "rank", **defaults: Any) -> None:
        refuse_whole_tensors(optimizer_class)
        if weights not in _WEIGHTS:
            raise ConfigError(f"weights={weights!r}: expected 'rank' (each has all weights) or "
                              f"'node' (the ranks of a node share them)")
        self._kind = _WEIGHTS[weights]
        if not isinstance(model, DataParallel):
            raise ConfigError(f"model is a {type(model).__name__}; pass the "
                              f"mpiring.torch.DataParallel, not the module in it")
        groups = param_groups(model.module, params)
        parameters = dict(model.module.named_parameters())
        self._class, self._given = optimizer_class, defaults
        self._elementwise: set[str] = set()
        for group in groups:
            for name in group.names[:1]:
                self._elementwise |= elementwise_state(
                    optimizer_class, defaults, group.settings, parameters[name], apart=overlap)
        self._names = [list(group.names) for group in groups]
        self._group_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._overlaps = bool(overlap)
        self._guard: Guard | None = None
        # Whether there are means that no step has used.
        self._is_fresh = False
        # Of parameters that are frozen at present.
        self._aside: States = {}
        self._model = model
        self._place(model.give_gradients_to(self))
        self._inner = self._cut({}, [group.settings for group in groups])
        # What hooks, schedulers and GradScaler look at.
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._is_made = True
        self._show()

    # A step

    def begin(self) -> None:
        """Refuse a backward pass on top of means that no step has used; called in backward.

        Raises:
            GradientError: There are such.

        Collective: no.
        """
        if self._is_fresh:
            raise GradientError(
                f"rank {self._comm.rank}: a second backward pass, without step() or zero_grad() "
                f"after the first: its gradients are means in slices already; to add up several "
                f"passes, let all but the last run in model.no_sync()")

    def take(self, averaging: Averaging) -> None:
        """Give this rank's slices of the means to the optimizer; called at the end of backward.

        Collective: yes. Blocking: where buckets were built anew.
        """
        self.synchronize()
        if self._buckets is not averaging.gradients.buckets:
            states = self._state().whole() | self._aside
            self._place(averaging)
            self._cut_again(states, self._settings(self.param_groups))
        finite = averaging.gradients.finite
        for shard in self._shards:
            if not shard.segments:
                shard.gradient.fill_(0 if finite else math.nan)
            shard.parameter.grad = shard.gradient
        self._is_fresh = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slices, and return when all weights are there.

        Args:
            closure: Makes a forward and a backward pass first, and returns the loss.

        Returns:
            The closure's result.

        Raises:
            GradientError: There are no new gradients; or some were replaced.

        Collective: yes. Blocking: yes.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._refuse_without_gradients("step()")
        if self._averaging.finite:
            self._update()
        else:
            self._averaging.gradients.nonfinite.report()
        self.zero_grad()
        return result

    def _update(self) -> None:
        self._weights.follow()
        self._inner.param_groups, self._inner.state = self.param_groups, self.state
        if self._overlaps:
            self._update_in_turn()
        else:
            self._inner.step()
        self._weights.updated()
        for bucket in () if self._overlaps else self._weights.buckets:
            self._weights.send(bucket.index)
        if self._guard is None:
            self.synchronize()
        else:
            for index in self._guard.unguarded:
                self._weights.wait(index)

    def _update_in_turn(self) -> None:
        """Update and send one bucket after the other.

        The next forward pass needs them in the reverse of the order in which the gradients came.
        """
        gradients = [shard.parameter.grad for shard in self._shards]
        for shard in self._shards:
            shard.parameter.grad = None
        for bucket in reversed(self._weights.buckets):
            mine = [(shard.parameter, gradient) for shard, gradient in zip(
                self._shards, gradients) if shard.bucket == bucket.index]
            for p, gradient in mine:
                p.grad = gradient
            if mine:
                self._inner.step()
            for p, _ in mine:
                p.grad = None
            self._weights.send(bucket.index)

    def synchronize(self) -> None:
        """Return when all weights are complete; for `overlap`.

        Modules wait for their own weights before they run; `module.weight`, `parameters()`,
        `state_dict()` and `load_state_dict()` wait for what they return. Call this before reading
        or writing parameters that you have kept in variables of your own since before the step.

        Collective: no. Blocking: yes.
        """
        self._weights.synchronize()

    def writing_weights(self) -> AbstractContextManager[None]:
        """Return a block in which weights may be written other than by `step`.

            with optimizer.writing_weights():
                for p in model.parameters():
                    p.clamp_(-1, 1)

        Needed with weights="node": there every rank but the first one of each node writes into
        copies of its own in the block, and what rank 0 has written is everybody's after it.
        `model.load_state_dict` needs no block.

        Collective: yes. Blocking: yes.
        """
        return self._weights.writing()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, of the model and of this rank's slices.

        Args:
            set_to_none: For compatibility: they are always None afterwards.

        Collective: no.
        """
        shards = (shard.parameter for shard in self._shards)
        for p in chain((p for _, p in without_waiting(self._model.module)), shards):
            p.grad = None
        if self._is_fresh and not self._averaging.finite:
            # Whoever has scaled by NaN has also scaled what is between the tensors.
            for bucket in self._buckets:
                bucket.clear_padding()
        self._is_fresh = False

    def _refuse_without_gradients(self, what: str) -> None:
        if not self._is_fresh:
            raise GradientError(
                f"rank {self._comm.rank}: {what} without new gradients: each step takes those of "
                f"one model(...) and backward(), which step() and zero_grad() drop")
        changed = [name for name, stand_in in self._averaging.stand_ins.items()
                   if self._parameters[name].grad is not stand_in]
        if changed:
            raise GradientError(
                f"rank {self._comm.rank}: {what} after the gradients of {first_few(changed, 5)} "
                f"were dropped or replaced: that changes nothing here, since this rank has the "
                f"means of its slices only; write into those of optimizer.param_groups, on all "
                f"ranks alike, or call optimizer.zero_grad() to drop all")

    # Norms

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """Return the norm of all gradients as one vector: all ranks' slices.

        Args:
            norm_type: Its p, above 0; also infinity.

        Returns:
            The same on all ranks; NaN where a gradient is not finite.

        Raises:
            GradientError: There are no gradients.

        Collective: yes. Blocking: yes.
        """
        self._refuse_without_gradients("grad_norm()")
        norm_type = number("norm_type", norm_type, lambda x: x > 0, "a number above 0")
        parts = [torch.linalg.vector_norm(block, norm_type, dtype=torch.float64)
                 for shard in self._shards for block in shard.gradient.split(_BLOCK)]
        mine = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        total = np.array([float(mine)])
        if norm_type == math.inf:
            return float(self._comm.allreduce(total, op="max")[0])
        return float(self._comm.allreduce(total ** norm_type)[0] ** (1 / norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *,
                        error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients down so that their norm is at most `max_norm`.

        As torch.nn.utils.clip_grad_norm_ does for whole gradients.

        Args:
            max_norm: From 0.
            norm_type: As in `grad_norm`.
            error_if_nonfinite: Raise GradientError where the norm is not finite.

        Returns:
            The norm before.

        Collective: yes. Blocking: yes.
        """
        max_norm = number("max_norm", max_norm, lambda x: x >= 0, "a number from 0")
        norm = self.grad_norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise GradientError(f"rank {self._comm.rank}: the norm of the gradients is {norm}")
        factor = max_norm / (norm + 1e-6)
        # A NaN stays one.
        if not factor >= 1:
            for shard in self._shards:
                shard.gradient.mul_(factor)
        return torch.tensor(norm)

    # State

    def state_dict(self, *, root: int | None = None) -> Any:
        """Return what the optimizer's own `state_dict` would: of whole parameters.

        The class itself can load it, for the same groups, without any rank but one; and
        `load_state_dict` of this one can load what that has returned.

        Args:
            root: Return it on this rank only, and None on the others; on all by default.

        Collective: yes. Blocking: yes.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        states = self._state().whole(root=root)
        if root not in (None, self._comm.rank):
            return None
        found = self._packed(states | self._aside)
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the same nest with this rank's slices of the state, as `mpiring` saves them.

            checkpoints.save(step, replicated=model.state_dict(),
                             sharded=optimizer.sharded_state_dict())

        Collective: yes. Blocking: yes.
        """
        return self._packed(self._state().sliced(self._aside))

    def _state(self) -> ShardedState:
        return ShardedState(self._shards, self.state, self._weights, self._parameters, self._comm)

    def _packed(self, states: States) -> dict[str, Any]:
        """Return state by the numbers that parameters have in their groups, one after the other."""
        names = list(chain.from_iterable(self._names))
        numbers = iter(range(len(names)))
        groups = [{**group, "params": [next(numbers) for _ in its]}
                  for group, its in zip(self.param_groups, self._names)]
        return {"state": {i: states[name] for i, name in enumerate(names) if name in states},
                "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict`, the class's own, or `sharded_state_dict` has returned.

        At any number of ranks; of `sharded_state_dict`, the slices of all ranks that have saved.

        Raises:
            ConfigError: It is of other groups or parameters, or slices are missing.

        Collective: no, but on all ranks.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != list(map(len, self._names)):
            raise ConfigError(
                f"rank {self._comm.rank}: the state is of groups with "
                f"{[len(group['params']) for group in groups]} parameters, but this optimizer's "
                f"have {list(map(len, self._names))}; make the same groups")
        numbers = chain.from_iterable(group["params"] for group in groups)
        states = {name: state_dict["state"][number]
                  for name, number in zip(chain.from_iterable(self._names), numbers)
                  if number in state_dict["state"]}
        self._cut_again(states, self._settings(groups))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @staticmethod
    def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{key: x for key, x in group.items() if key != "params"} for group in groups]

    # Slices

    def _place(self, averaging: Averaging) -> None:
        """Put the weights into buckets that are cut as those of the gradients are."""
        self._averaging, self._comm = averaging, averaging.comm
        self._buckets = averaging.gradients.buckets
        named = dict(self._model.module.named_parameters())
        self._parameters = {name: named[name] for name in averaging.gradients.views}
        refuse_ungrouped(self._parameters, set(self._group_of))
        with torch.no_grad():
            self._weights = self._kind(
                self._parameters, averaging.gradients, self._comm, self._model.module)
        if self._guard is not None:
            self._guard.remove()
        if self._overlaps:
            self._guard = Guard(self._model.module, self._weights, {
                self._parameters[name]: bucket.index
                for bucket in self._weights.buckets for name in bucket.views})

    def _cut_again(self, states: States, settings: Sequence[Mapping[str, Any]]) -> None:
        """Replace the inner optimizer; the groups stay the same dicts."""
        # What is cut now need not be kept whole.
        self._aside = {
            name: {key: tensor_of(x.whole()) if isinstance(x, Sliced) else x
                   for key, x in state.items()}
            for name, state in states.items() if name not in self._parameters}
        self._inner = self._cut(states, settings)
        self._show()

    def _cut(self, states: States, settings: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of new shards, with their state; of all parameters, as is known."""
        def kind_of(name: str) -> Any:
            return self._group_of[name], numbers_of(states.get(name, {}), self._elementwise)

        shards = cut(self._weights, self._buckets, kind_of)
        first = next(iter(self._parameters.values()))
        groups: list[list[Shard]] = [[] for _ in self._names]
        for shard in shards or [placeholder(first.device)]:
            name = shard.segments[0].name if shard.segments else self._names[0][0]
            groups[self._group_of[name]].append(shard)
        inner = self._class([{**its, "params": [shard.parameter for shard in group]}
                             for group, its in zip(groups, settings)], **self._given)
        self._shards = list(chain.from_iterable(groups))
        found = {i: state_of(shard, states, self._parameters, self._elementwise)
                 for i, shard in enumerate(self._shards)}
        numbers = iter(range(len(self._shards)))
        inner.load_state_dict({
            "state": {i: state for i, state in found.items() if state},
            "param_groups": [{**group, **its, "params": [next(numbers) for _ in group["params"]]}
                             for group, its in zip(inner.param_groups, settings)]})
        return inner

    def _show(self) -> None:
        """Let what this optimizer shows be the inner one's."""
        for mine, its in zip(self.param_groups, self._inner.param_groups):
            new = dict(its)
            mine.clear()
            mine.update(new)
        self.state, self.defaults = self._inner.state, self._inner.defaults

    def close(self) -> None:
        """Let the model's parameters have gradients again, from the next forward pass on.

        For another optimizer; this one can take no more steps.

        Collective: yes. Blocking: yes.
        """
        self.synchronize()
        self.zero_grad()
        self._weights.release()
        if self._guard is not None:
            self._guard.remove()
        self._model.give_gradients_to(None)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Refuse: slices are cut, and state is saved, by the groups from the beginning.

        Raises:
            ConfigError: Always, once the optimizer is made.
        """
        # PyTorch's own constructor adds them one by one.
        if getattr(self, "_is_made", False):
            raise ConfigError(
                f"rank {self._comm.rank}: add_param_group on a Sharded optimizer: its slices are "
                f"cut by the groups that it was made with; make those for parameters that are "
                f"frozen at first, too: frozen ones take no memory")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError("a Sharded optimizer cannot be pickled or copied: it holds MPI's memory; "
                          "save optimizer.state_dict()")
