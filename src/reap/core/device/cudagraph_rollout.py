"""CudaGraphRollout: run a whole rollout as one CUDA graph, `T` steps of env and policy in one replay.

    first rollout     runs without a graph, which allocates and compiles whatever is made at first use
    second            recorded; replayed; all state restored; run without a graph; the two compared, bit by bit
    from then on      one replay

State that a graph carries from replay to replay lies in tensors that keep their address. If an env assigns a new tensor
to an attribute, the end of the recording copies the new value to the old tensor's address. A graph cannot see state
elsewhere (Python numbers, tensors in closures): then the comparison fails, and the error says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reap.errors import ReapError, SpecMismatch, UsageError


class CudaGraphRollout:
    """Replays `fill`, a function without arguments that writes `columns` and changes `state`.

    `owners` are the objects whose tensor attributes are state too: env and policy.
    """

    def __init__(
        self, fill: Callable[[], None], columns: Sequence[Tensor], state: Sequence[Tensor], owners: Sequence[Any]
    ) -> None:
        self._fill, self._columns, self._state = fill, columns, state
        self._owners = list(owners)
        self._graph: Any = None
        self._seen: tuple[int, ...] = ()  # addresses the graph reads
        self._warm = False

    def look_again(self) -> None:
        """Have the next rollout recorded again if tensors that the graph reads have moved."""
        if self._graph is not None and self._seen != self._addresses():
            self._graph = None

    def play(self) -> None:
        """Fill a slot with one rollout."""
        if self._graph is not None:
            self._graph.replay()
            return
        if not self._warm:
            self._fill()
            self._warm = True
            return
        with torch.cuda.device(self._columns[0].device):  # the current device may be another one
            self._record()

    def _addresses(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for _, _, t in _tensors(self._owners))

    def _record(self) -> None:
        before = self._snapshot()
        graph = torch.cuda.CUDAGraph()
        for generator in _generators(self._owners):
            graph.register_generator_state(generator)
        kept = list(_tensors(self._owners))
        try:
            with _no_argument_checks(), torch.cuda.graph(graph):
                self._fill()
                _copy_back(kept)
        except Exception as cause:
            torch.cuda.synchronize()
            _reset_generators(_generators(self._owners))
            first = cause.__context__ if isinstance(cause.__context__, ReapError) else cause  # the error behind it
            why = (str(first) or repr(first)).split("\\n")[0].splitlines()[0]
            raise UsageError(
                f"cudagraph_policy: it cannot be recorded, {why}; env and policy must not read values from the device "
                f"(.item(), .cpu(), if tensor: …) while they act; leave cudagraph_policy out"
            ) from cause
        finally:
            for owner, name, old in kept:
                _set_tensor(owner, name, old)
        graph.replay()
        replayed = [t.clone() for t in (*self._columns, *self._state)]
        self._restore(before)
        self._fill()  # run once more without the graph: this rollout is delivered
        _copy_back(kept)
        for eager, replayed_value in zip((*self._columns, *self._state), replayed):
            if not torch.equal(_without_nan(eager), _without_nan(replayed_value)):
                raise SpecMismatch(
                    "cudagraph_policy: a recorded rollout differs from the same one made step by step; env or policy "
                    "keep state that a graph does not see (Python numbers, tensors that are not attributes); "
                    "leave cudagraph_policy out"
                )
        self._graph, self._seen = graph, self._addresses()

    def _snapshot(self) -> Any:
        tensors = [(t, t.clone()) for t in self._state] + [(t, t.clone()) for _, _, t in _tensors(self._owners)]
        return tensors, torch.cuda.get_rng_state(), [(g, g.get_state()) for g in _generators(self._owners)]

    def _restore(self, snapshot: Any) -> None:
        tensors, default, generators = snapshot
        for tensor, value in tensors:
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(value)
        torch.cuda.set_rng_state(default)
        for generator, state in generators:
            generator.set_state(state)


def _copy_back(kept: Sequence[tuple[Any, Any, Tensor]]) -> None:
    """Copy each new tensor that replaced one of `kept` into the old tensor, and put the old tensor back."""
    for owner, name, old in kept:
        new = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        if new is not old:
            old.copy_(new)
            _set_tensor(owner, name, old)


def _set_tensor(owner: Any, name: Any, tensor: Tensor) -> None:
    if isinstance(owner, dict):
        owner[name] = tensor
    else:
        setattr(owner, name, tensor)


def _without_nan(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def _tensors(owners: Sequence[Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield every CUDA tensor an owner holds as (holder, name, tensor); a module's parts are holders of their own."""
    for owner in owners:
        if isinstance(owner, nn.Module):
            for part in owner.modules():
                held = (part.named_parameters, part.named_buffers)
                every = (pair for named in held for pair in named(recurse=False, remove_duplicate=False))
                yield from ((part, name, t) for name, t in every if t.is_cuda)
            continue
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor) and value.is_cuda:
                yield owner, name, value
            elif isinstance(value, dict):
                yield from ((value, key, t) for key, t in value.items() if isinstance(t, Tensor) and t.is_cuda)
            elif isinstance(value, nn.Module):
                yield from _tensors([value])


def _generators(owners: Sequence[Any]) -> list[torch.Generator]:
    return [
        value
        for owner in owners
        for value in vars(owner).values()
        if isinstance(value, torch.Generator) and value.device.type == "cuda"
    ]


def _reset_generators(own: Sequence[torch.Generator]) -> None:
    """Give generators a fresh state: a recording that failed leaves them waiting for the rest of it."""
    for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *own):
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _no_argument_checks() -> Iterator[None]:
    """Turn off the argument checks of distributions, which read the device; the rollout before made them."""
    from torch.distributions import Distribution, Normal

    before, wrong = False, torch.full((), -1.0, device="cpu")
    try:
        Normal(wrong, wrong)  # torch has no public way to ask for the current setting
    except ValueError:
        before = True
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
