"""Recorder: record the torch calls a policy makes in one step, to replay them as straight-line code.

    the policy                           recorded               replayed
    ──────────────────────────────────   ─────────────────────  ──────────────────────────────────────────────
    nn.Module.__call__, dict look-ups,   linear(x, W, b)        once per rollout:  s = exp(log_std)
    TensorDicts, distribution objects,   tanh(·)                at each step:      h = tanh(linear(x, W, b)) …
    properties, shape checks             exp(log_std) …

The recording holds the very functions the policy called, in their order, on the policy's own parameters: the numbers
are the same, and so are the random numbers that are consumed. What depends on parameters alone is computed once per
rollout.

A policy is captured only if the replay does the same as the policy:

- no value computed from an input or a random number decides anything in Python (`if x.max() > 0`, `x.item()`), except
  for the argument checks of `torch.distributions`: the replay makes them after the rollout and raises then;
- nothing outside is written: no parameter, buffer, attribute or input;
- torch's generator is the only source of random numbers;
- two recordings on different inputs are the same, call by call, and the replay gives the same bits as the policy.

Before each rollout, `Captured.bind` checks whether anything the recording relied on has changed: attributes, hooks,
replaced parameters, `train()`. A decision that depends on parameters alone (`if self.scale.max() > 1`) is evaluated
again there.
"""

from __future__ import annotations

import enum
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from reap._foreign import torch_internals
from reap.core.capture.generator_state import is_shared

_TORCH = os.path.dirname(torch.__file__)
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions")
_ATTEMPTS = 8  # how often a recording is repeated because another thread may have drawn random numbers

# Questions about a tensor whose answers follow from its shape, dtype and device, which do not change.
# fmt: off
_METADATA = frozenset(
    {
        "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset",
        "is_contiguous", "element_size", "itemsize", "nbytes", "dtype", "device", "layout", "names",
        "is_floating_point", "is_complex", "is_signed", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_mps",
        "is_xpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_conj", "is_neg",
        "is_inference", "is_shared", "is_pinned", "requires_grad", "grad_fn", "get_device", "type", "has_names",
        "is_tensor", "is_same_size", "result_type", "can_cast", "promote_types", "__len__", "dense_dim",
        "sparse_dim", "broadcast_shapes", "is_storage", "is_vulkan", "is_ipu", "is_hpu", "is_maia", "is_xla",
        "is_mtia", "output_nr", "retains_grad", *torch_internals.METADATA
    }
)
# Calls whose results have a size that depends on values: with other values, what follows would be another program.
_SIZED_BY_VALUES = frozenset(
    {
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim", "bincount",
        "repeat_interleave", "masked_scatter", "nonzero_static", "histc", *torch_internals.SIZED_BY_VALUES
    }
)
# Calls that involve no tensor and change nothing that matters to a replay without gradients.
_HARMLESS = frozenset(
    {
        "set_grad_enabled", "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "finfo", "iinfo",
        "broadcast_shapes", "is_autocast_enabled", "is_warn_always_enabled", "get_default_device",
        "is_anomaly_enabled", "is_autocast_cache_enabled", *torch_internals.HARMLESS
    }
)
# fmt: on


class NotCaptured(Exception):
    """The policy does something that a replay would not do; the message says what."""


class Call(NamedTuple):
    """One torch call: which function, its arguments with registers in place of tensors, and where its results go."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any  # registers in the structure of the result
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    changes: tuple[int, ...]  # registers of tensors that it changed in place
    random: bool
    foreign: bool = False  # whether `func` is not a torch function


class Register(NamedTuple):
    """Stands for a tensor of the recording, by its number."""

    at: int


class Decision(NamedTuple):
    """Says that `read` turned the tensor `at` into a Python value, and which."""

    read: Callable[..., Any]
    at: int
    value: Any
    checks: bool  # whether a distribution checked its own arguments: the other answer raises


class Shadows:
    """Makes copies of tensors with the same memory layout: tensors that share memory have copies that share memory."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}  # copied memory, by the address of the original
        self.original: dict[int, int] = {}  # address of the original, by the address of the copy
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy that stands for a tensor; always the same one."""
        if id(tensor) not in self._made:
            memory: Any = tensor.untyped_storage()
            at = memory.data_ptr()
            if at not in self._memory:
                self._memory[at] = memory.clone()
                self.original[self._memory[at].data_ptr()] = at
            copy = self._memory[at]
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            shadow = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(copy, *place)
            self._made[id(tensor)] = tensor, shadow
        return self._made[id(tensor)][1]


class Recorder(TorchFunctionMode):
    """Records torch calls as they are made."""

    def __init__(self, inputs: Sequence[Tensor], shadows: Shadows | None = None) -> None:
        super().__init__()
        self.shadows = shadows  # copies used in place of outside tensors, if the step may change those
        self.tensors: list[Tensor] = []  # by register; kept alive, so that no id is reused
        self.calls: list[Call] = []
        self.decisions: list[Decision] = []
        self._at: dict[int, int] = {}
        for tensor in inputs:
            self.register(tensor)
        self.inputs = len(inputs)
        self.paused = False
        self.moved = False  # whether NumPy's or Python's generator moved
        self.made: set[int] = set()  # registers that a call wrote

    def register(self, tensor: Tensor) -> int:
        """Return the register of a tensor, a new one if the tensor has none."""
        at = self._at.get(id(tensor))
        if at is None:
            at = self._at[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return at

    def foreign(self, func: Callable[..., Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Record a call of a function that is not torch's, which each replay calls with the registers of `given`."""
        reads = tuple(self.register(t) for t in given)
        writes = tuple(self.register(t) for t in made)
        self.made.update(writes)
        results = tuple(map(Register, writes))
        self.calls.append(Call(func, tuple(map(Register, reads)), {}, results, reads, writes, (), True, True))

    def _is_outside(self, tensor: Tensor) -> bool:
        at = self._at.get(id(tensor))
        return at is None or (at >= self.inputs and at not in self.made)

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Call `func`, on shadows of outside tensors; return its result and which of the given tensors it changed."""
        version_of = torch_internals.version_of
        given = list(tensors_in((args, kwargs)))
        if self.shadows is None:
            before = list(map(version_of, given))
            result = func(*args, **kwargs)
            return result, [t for t, version in zip(given, before) if version_of(t) != version]
        stands = {id(t): self.shadows.of(t) if self._is_outside(t) else t for t in given}
        originals = {id(stands[id(t)]): t for t in given}
        before = [version_of(stands[id(t)]) for t in given]
        result = func(*mapped(args, lambda t: stands[id(t)]), **mapped(kwargs, lambda t: stands[id(t)]))
        changed = [t for t, version in zip(given, before) if version_of(stands[id(t)]) != version]
        return mapped(result, lambda t: originals.get(id(t), t)), changed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = name_of(func)
        given = list(tensors_in((args, kwargs)))
        states = _torch_states(given)
        _refuse_by_values(name, func, args, kwargs)
        if name == "__getitem__":  # a mask decides how many rows result, like a value read in Python
            masks = [t for t in tensors_in(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
            mask_values = unrecorded(lambda: [mask.tolist() for mask in masks])
            self.decisions += [Decision(Tensor.tolist, self.register(m), v, False) for m, v in zip(masks, mask_values)]
        result, altered = self._run(func, args, kwargs)
        drawn = any(not torch.equal(a, b) for a, b in zip(states, _torch_states(given)))
        if name in _METADATA and not isinstance(result, Tensor):
            return result
        made = list(tensors_in(result))
        if not given and not made:
            if name not in _HARMLESS:
                raise NotCaptured(f"it calls torch.{name}")
            return result
        if any(t.requires_grad and t.grad_fn is not None for t in made):
            raise NotCaptured(f"{name} computes gradients")
        if name in ("__set__", "backward", "register_hook", "share_memory_", "resize_", "set_"):
            raise NotCaptured(f"it calls Tensor.{name}")
        reads = tuple(self.register(t) for t in given)
        changed = tuple(self.register(t) for t in altered)
        template = _registered(args, self.register), {k: _registered(v, self.register) for k, v in kwargs.items()}
        if not made and result is not None:
            return self._decide(name, func, template, reads, result)
        results = _registered(result, self.register)
        writes = tuple(dict.fromkeys(self.register(t) for t in made))
        if not drawn and not changed and all(at in reads for at in writes):
            return result  # the tensor it was given came back
        self.made.update(at for at in writes if at not in reads)
        self.calls.append(Call(func, *template, results, reads, writes, changed, drawn))
        return result

    def _decide(self, name: str, func: Any, template: Any, reads: tuple[int, ...], value: Any) -> Any:
        """Record that a tensor became a Python value; return the value that the policy receives."""
        args, kwargs = template
        if len(reads) != 1 or len(args) != 1 or kwargs or not isinstance(value, (bool, int, float, list)):
            raise NotCaptured(f"it turns a tensor into a {type(value).__name__} with {name}")
        question = _question()
        if question in (Question.IS_WITHIN, Question.IS_OUTSIDE, Question.BEGINS):
            return question is not Question.IS_WITHIN
        self.decisions.append(Decision(func, reads[0], value, question is Question.IS_VALID))
        return value


def _refuse_by_values(name: str, func: Any, args: Any, kwargs: Any) -> None:
    """Raise `NotCaptured` for calls whose result size depends on values, or that change their arguments unnoticed."""
    if name in _SIZED_BY_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
        raise NotCaptured(f"the size of what {name} returns depends on values")
    if name in ("batch_norm", "instance_norm"):
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        updates = given.get("training", False) if name == "batch_norm" else given.get("use_input_stats", True)
        if updates and given.get("running_mean") is not None:
            raise NotCaptured(f"{name} updates its running statistics")


class Question(enum.Enum):
    """Why known library code reads the value of a tensor, in cases that need not decide what happens next."""

    IS_VALID = "a distribution checks its arguments, and raises if they are invalid"
    # For these, the work that the answer could save is always done: it does not change values that do not need it.
    IS_WITHIN = "a spec clamps only if a value is outside its bounds"
    IS_OUTSIDE = "a truncated normal returns -inf only if a value is outside its bounds"
    BEGINS = "a GRU resets its state only if an episode begins in a lane"


def _question() -> Question | None:
    frame = sys._getframe(3)  # the caller of the torch function
    for _ in range(8):
        code = frame.f_code
        folder, file = os.path.split(code.co_filename)
        if folder == _DISTRIBUTIONS or (file == "truncated_normal.py" and code.co_name == "__init__"):
            return Question.IS_VALID if code.co_name in torch_internals.CHECKS_OF_DISTRIBUTIONS else None
        if file == "tensor_specs.py" and code.co_name == "project":
            return Question.IS_WITHIN if "Bounded" in type(frame.f_locals["self"]).__name__ else None
        if file == "continuous.py" and code.co_name == "log_prob":
            return Question.IS_OUTSIDE if type(frame.f_locals["self"]).__name__ == "TruncatedNormal" else None
        if file == "rnn.py" and code.co_name == "forward":
            return Question.BEGINS if type(frame.f_locals["self"]).__name__ == "GRUModule" else None
        if frame.f_back is None or not (code.co_filename.startswith(_TORCH) or file == "tensor_specs.py"):
            return None
        frame = frame.f_back
    return None


def name_of(func: Any) -> str:
    """Return the name of a torch function; for the getter of a property, that of the property."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", name) if name == "__get__" else name
    return name or (resolve_name(func) or repr(func)).rpartition(".")[-1]


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:]


def _torch_states(given: Sequence[Tensor]) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if any(t.is_cuda for t in given):
        states.append(torch.cuda.get_rng_state())
    return states


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, dicts and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with every tensor and Register in it changed."""
    if isinstance(value, (Tensor, Register)):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*[mapped(v, change) for v in (value.start, value.stop, value.step)])
    return value


def _registered(value: Any, register: Callable[[Tensor], int]) -> Any:
    """Return `value` with a Register in place of each tensor."""
    if isinstance(value, Tensor):
        return Register(register(value))
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (tuple, list)):
        items = [_registered(v, register) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: _registered(v, register) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*[_registered(v, register) for v in (value.start, value.stop, value.step)])
    return value


class _ThreadState(threading.local):
    recorder: Recorder | None = None


_thread = _ThreadState()


def unrecorded(call: Callable[[], Any]) -> Any:
    """Return what `call` returns; its torch calls are not recorded."""
    recorder = _thread.recorder
    if recorder is None:
        return call()
    recorder.paused = True
    try:
        return call()
    finally:
        recorder.paused = False


def foreign(
    func: Callable[..., Any], given: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Record a call of `func`, which is not torch's, and return what `make` returns; each replay calls `func`."""
    made: Sequence[Tensor] = unrecorded(make)
    if _thread.recorder is not None:
        _thread.recorder.foreign(func, given, made)
    return made


class RecordedStep(NamedTuple):
    """The recording of one run of a policy, and the registers of what the policy returned."""

    recorder: Recorder
    outputs: tuple[int, ...]


def record(
    call: Callable[..., Sequence[Any]], inputs: Sequence[Tensor], shadows: Shadows | None = None
) -> RecordedStep:
    """Run `call` on copies of `inputs`, and on `shadows` of outside tensors if given; record its torch calls."""
    if not torch_internals.KNOWS_CHANGES:
        raise NotCaptured("this version of torch does not say which tensors a call has changed")
    inputs = [x.detach().clone() for x in inputs]  # no two of these are the same tensor
    version_of = torch_internals.version_of
    versions = list(map(version_of, inputs))
    numpy_state, python_state = _numpy_state(), random.getstate()
    recorder = Recorder(inputs, shadows)
    _thread.recorder = recorder
    try:
        with torch.no_grad(), recorder:
            outputs = call(*inputs)
    finally:
        _thread.recorder = None
    if list(map(version_of, inputs)) != versions:
        raise NotCaptured("it changes its input in place")
    recorder.moved = numpy_state != _numpy_state() or python_state != random.getstate()
    if recorder.moved and not is_shared():
        raise NotCaptured("it draws random numbers from NumPy or Python")
    for value in outputs:
        if not isinstance(value, Tensor):
            raise NotCaptured(f"it returns a {type(value).__name__}")
    return RecordedStep(recorder, tuple(recorder.register(v) for v in outputs))


def undisturbed(make: Callable[[], RecordedStep]) -> RecordedStep:
    """Return a recording; beside the learner one without random draws, repeated if the learner may have made them."""
    made = make()
    for _ in range(_ATTEMPTS):
        if not is_shared() or not (made.recorder.moved or any(c.random and not c.foreign for c in made.recorder.calls)):
            return made
        made = make()
    raise NotCaptured("it draws random numbers while another thread uses the same generator")


def from_outside(first: RecordedStep, second: RecordedStep) -> dict[int, Tensor]:
    """Return the outside tensors both recordings used, by register; raise `NotCaptured` if the recordings differ."""
    a, b = first.recorder, second.recorder
    if len(a.calls) != len(b.calls) or first.outputs != second.outputs or len(a.tensors) != len(b.tensors):
        raise NotCaptured("it makes different torch calls from call to call")
    for x, y in zip(a.calls, b.calls):
        if x.func != y.func or not _alike((x.args, x.kwargs, x[3:]), (y.args, y.kwargs, y[3:])):
            raise NotCaptured(f"it calls {name_of(x.func)} in different ways from call to call")
    if [(d.at, d.checks) for d in a.decisions] != [(d.at, d.checks) for d in b.decisions]:
        raise NotCaptured("its decisions depend on different tensors from call to call")
    outside = {}
    for at in range(a.inputs, len(a.tensors)):
        if at not in a.made:
            if b.tensors[at] is not a.tensors[at]:
                raise NotCaptured("it uses tensors not created by torch functions")
            outside[at] = a.tensors[at]
    return outside


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(v, b[k]) for k, v in a.items())
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, slice, torch.device, torch.dtype)) and a == b


def refuse_decisions(recorder: Recorder, moving: AbstractSet[int] | None = None) -> None:
    """Raise `NotCaptured` if a computed value decides something in Python: other values make another program."""
    if moving is None:
        computed = set(range(recorder.inputs))
        for call in recorder.calls:
            if call.random or computed.intersection(call.reads):
                computed.update(call.writes)
        moving = computed
    for decision in recorder.decisions:
        if decision.at in moving and not decision.checks:
            raise NotCaptured(f"its control flow depends on {name_of(decision.read)}() of a computed tensor")


def refuse_hooks(modules: Sequence[nn.Module]) -> None:
    """Raise `NotCaptured` if a module has a hook, which a replay would not call."""
    if not torch_internals.KNOWS_HOOKS:
        raise NotCaptured("this version of torch does not say whether there are hooks")
    for module in modules:
        for part in module.modules():
            hooks = torch_internals.forward_hooks(part)
            known = [getattr(hook, "__module__", "").startswith("torchrl.modules") for hook in hooks]
            if not all(known) or "forward" in vars(part):
                raise NotCaptured(f"its {type(part).__name__} has a hook or its own forward")
    if any(torch_internals.GLOBAL_HOOKS):
        raise NotCaptured("a global module hook is registered")
