"""What reap collects when a private name of another library is gone: one fork for each name, each with small worlds.

    python -m tests.interop.without_names     prints as JSON what each world returns, by library and name

A name is taken away from reap, not from the library, which needs it: in the fork the one file that uses it is read
again with another name in its place, one that nobody has.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, distributions, nn
from torch.distributed import FileStore, HashStore, rpc

from reap._foreign import tensordict_internals, torch_internals, torchrl_internals
from reap.buffers.storage.rows import as_tensordict
from reap.collectors import Collector
from reap.collectors.parts.staleness import StalenessWatch
from reap.core.capture import recorder
from reap.core.policies.exploration import exploring
from reap.core.shared_slots import SharedFile
from reap.envs import GymEnv, SerialEnv
from reap.errors import MissingDependency, UsageError
from reap.weights.shared import Packing, SharedWeights

FILES = {"torch": torch_internals, "tensordict": tensordict_internals, "torchrl": torchrl_internals}
FRAMES = 12
# Names that concern these worlds alone, and no others.
_DISTRIBUTED = (
    *("_Options", "_devices", "_timeout", "_channels", "_transports", "_init", "_init_rpc_states"),
    "_update_group_membership",
)
APART = ("gloo", "rpc", "parallel")


class Counting(gym.Env[Any, Any]):
    """Five steps; what it shows follows from the actions since the last reset, and from nothing else."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self) -> None:
        self.ale, self.at, self.sum = self, 0, 0

    def lives(self) -> int:
        return 3 - self.at // 2

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = self.sum = 0
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.at, self.sum = self.at + 1, self.sum + int(action)
        return np.array([self.at, self.sum], np.float64), float(self.sum), self.at == 5, False, {}


def turns(observation: Tensor) -> Tensor:
    return (observation.sum(-1) % 3).long()


# ---- what is collected ----------------------------------------------------------------------------------------------


def cartpole(lanes: int = 2) -> Any:
    return SerialEnv(lanes, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def collected(env: Any, policy: Any, **options: Any) -> list[TensorDict]:
    torch.manual_seed(0)
    collector = Collector(env, policy, frames_per_batch=FRAMES, total_frames=3 * FRAMES, **options)
    collector.set_seed(0)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def net(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))


def actor(*, noise: bool = False) -> Any:
    """Samples from a distribution reap knows by heart; `noise`: from two, one of which it does not."""
    parts: list[Any] = [TensorDictModule(net(2), ["observation"], ["logits"])]
    if noise:
        parts.append(TensorDictModule(net(2), ["observation"], ["concentration"]))
        parts.append(TensorDictModule(nn.Softplus(), ["concentration"], ["concentration"]))
        dirichlet = {"distribution_class": distributions.Dirichlet, "default_interaction_type": InteractionType.RANDOM}
        parts.append(ProbabilisticTensorDictModule(["concentration"], ["mixture"], **dirichlet))
        parts.append(TensorDictModule(net(2), ["observation"], ["loc"]))
        parts.append(TensorDictModule(lambda loc: loc.abs() + 1, ["loc"], ["scale"]))
        parts.append(
            ProbabilisticTensorDictModule(["loc", "scale"], ["noise"], distribution_class=distributions.Normal)
        )
    last = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(*parts, last)


class Sampling(nn.Module):
    """As people write it: it samples in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(2)

    def forward(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.net(observation).clone().mul_(2)
        return distributions.Categorical(logits=logits).sample()


def hooked() -> list[TensorDict]:
    layers = net(2)
    layers.register_forward_hook(lambda module, given, out: -out)
    greedy = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return collected(cartpole(), TensorDictSequential(TensorDictModule(layers, ["observation"], ["logits"]), greedy))


def hooked_for_all() -> list[TensorDict]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out + 1 if isinstance(module, nn.Tanh) else None
    )
    try:
        return collected(cartpole(), actor())
    finally:
        handle.remove()


def weights_travel() -> list[Tensor]:
    module = net(2)
    named = {name: tensor.detach() for name, tensor in module.named_parameters()}
    file, packing = SharedFile(), Packing.of(named)
    here, there = SharedWeights(file, packing), SharedWeights(file, packing)
    here.publish({name: tensor + 1 for name, tensor in named.items()}, 7)
    into = [torch.zeros_like(tensor) for tensor in named.values()]
    assert there.refresh(into) == 7
    return into


def old_weights_are_seen() -> list[bool]:
    module = net(2)
    watch = StalenessWatch(module, who="all act", remedy="")
    seen = [watch.changed()]
    with torch.no_grad():
        module[0].weight.add_(1)
    seen.append(watch.changed())
    watch.rebase()
    module[2].bias = nn.Parameter(torch.ones(2))
    return [*seen, watch.changed(), watch.useful]


def a_group() -> list[Tensor]:
    group = torch_internals.gloo_group(HashStore(), 0, 1, "127.0.0.1", timedelta(seconds=20))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return [tensor]


def an_agent() -> Any:
    with tempfile.TemporaryDirectory() as folder, torch_internals.on_loopback("TP_SOCKET_IFNAME"):
        store = FileStore(f"{folder}/store", 1)
        try:
            agent = torch_internals.start_rpc_agent(
                store, "me", 0, None, {"rpc_timeout": 20, **torch_internals.ON_ONE_MACHINE}
            )
        except MissingDependency:
            return "refused"
        introduced = torch_internals.can_introduce_rpc_agents()
        if introduced:
            torch_internals.introduce_rpc_agent(agent, "nobody", 1, gone=True)
        found = rpc.rpc_sync("me", turns, args=(torch.ones(2, 2),))
        rpc.shutdown(graceful=False)
    return [found, introduced]


TORCH: dict[str, Callable[[], Any]] = {
    "flat": lambda: collected(cartpole(), actor(noise=True)),
    "captured": lambda: collected(cartpole(), Sampling()),
    "hooked": hooked,
    "hooked for all": hooked_for_all,
    "weights": weights_travel,
    "stale": old_weights_are_seen,
    "gloo": a_group,
    "rpc": an_agent,
}


def in_threads() -> list[Any]:
    """What a thread that collects sees, and what is there before and afterwards."""
    seen: list[Any] = [interaction_type()]

    def collect() -> None:
        with exploring(InteractionType.MODE):
            seen.append(interaction_type())

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    return [str(one) for one in (*seen, interaction_type())]


class Doubled(TensorDictModule):
    """Does something of its own with what its module returns."""

    def _write_to_tensordict(self, tensordict: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = tuple(-one for one in tensors) if isinstance(tensors, tuple) else -tensors
        return super()._write_to_tensordict(tensordict, doubled, *args, **kwargs)


def selected() -> list[TensorDict]:
    greedy = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    policy = TensorDictSequential(Doubled(net(2), ["observation"], ["logits"]), greedy)
    policy.select_out_keys("action")
    return collected(cartpole(), policy)


TENSORDICT: dict[str, Callable[[], Any]] = {
    "flat": lambda: collected(cartpole(), actor(noise=True)),
    "mode": lambda: collected(cartpole(), actor(), exploration_type="mode"),
    "own": selected,
    "threads": in_threads,
    "rows": lambda: [as_tensordict({("a",): torch.ones(2, 3), ("b", "c"): torch.zeros(2)}, 2)],
}


def torchrl_worlds() -> dict[str, Callable[[], Any]]:
    from torchrl import envs
    from torchrl.data import Composite, OneHot
    from torchrl.modules import MLP, AdditiveGaussianModule, EGreedyModule, QValueActor
    from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

    from reap.envs.torchrl.lanes import _share_state
    from reap.weight_update import _initial_weights_of

    def wrapped(**options: Any) -> Any:
        return envs.GymWrapper(Counting(), **options)

    def act(observation: Tensor) -> Tensor:
        return turns(observation)

    def one_hot(observation: Tensor) -> Tensor:
        return nn.functional.one_hot(turns(observation), 3)

    def transformed(env: Any, *more: Any) -> Any:
        return envs.TransformedEnv(
            env, envs.Compose(envs.StepCounter(max_steps=4), envs.RewardSum(), envs.DoubleToFloat(), *more)
        )

    def policy() -> Any:
        torch.manual_seed(3)
        value = QValueActor(
            MLP(in_features=4, out_features=2, num_cells=[8]),
            in_keys=["observation"],
            spec=Composite(action=OneHot(2)),
        )
        return TensorDictSequential(value, EGreedyModule(spec=OneHot(2), eps_init=0.5, eps_end=0.5))

    def noisy() -> Any:
        torch.manual_seed(4)
        mean = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        return TensorDictSequential(mean, AdditiveGaussianModule(spec=None))

    def sent() -> Any:
        """What two schemes were given; they are refused where they do not show it."""
        weights = TensorDict.from_module(net(2)).data
        pipes, memory = MultiProcessWeightSyncScheme(), SharedMemWeightSyncScheme()
        pipes.init_on_sender(model_id="policy", weights=weights, devices=[torch.device("cpu")])
        memory.init_on_sender(params_map={0: weights, 1: weights + 1})
        try:
            return [_initial_weights_of(pipes), *_initial_weights_of(memory).values()]
        except UsageError:
            return "refused"

    def shared() -> list[Any]:
        creator = envs.EnvCreator(lambda: transformed(wrapped(), envs.VecNorm(in_keys=["observation"])))
        _share_state(creator)
        return [all(value.is_shared() for value in creator.state_dict().values() if isinstance(value, Tensor))]

    def parallel() -> Any:
        return envs.ParallelEnv(2, lambda: envs.GymEnv("CartPole-v1"))

    def refusal() -> Any:
        from reap.envs.torchrl.parallel import NotTakenOver, _check_takeover

        try:
            _check_takeover(parallel())
        except NotTakenOver:
            return "left to TorchRL"
        return "taken over"

    categorical = {"categorical_action_encoding": True}
    return {
        "gym": lambda: collected(wrapped(**categorical), act),
        "one-hot": lambda: collected(wrapped(), one_hot),
        "seeded": lambda: collected(envs.GymEnv("CartPole-v1"), policy()),
        "noisy": lambda: collected(envs.GymEnv("Pendulum-v1"), noisy()),
        "serial": lambda: collected(envs.SerialEnv(2, lambda: wrapped(**categorical)), act, contiguous=True),
        "transformed": lambda: collected(transformed(wrapped(**categorical)), act),
        "inside": lambda: collected(transformed(envs.SerialEnv(2, lambda: wrapped(**categorical))), act),
        "lives": lambda: collected(transformed(wrapped(**categorical), envs.EndOfLifeTransform()), act),
        "weights": sent,
        "shared": shared,
        "parallel": refusal,
    }


# ---- a fork for each name -------------------------------------------------------------------------------------------


def plain(found: Any) -> Any:
    """Whatever a world returns, as something that can be compared and written down."""
    if isinstance(found, Tensor):
        return [str(found.dtype), list(found.shape), hashlib.sha1(found.numpy().tobytes()).hexdigest()]
    if hasattr(found, "keys"):
        return {str(key): plain(found.get(key)) for key in sorted(found.keys(True, True), key=str)}
    if isinstance(found, (list, tuple)):
        return [plain(one) for one in found]
    return found


def take_away(library: str, name: str) -> None:
    module = FILES[library]
    source = re.sub(rf"\b{name}\b", f"{name}_gone", Path(str(module.__file__)).read_text())
    exec(compile(source, str(module.__file__), "exec"), vars(module))
    for table in ("_METADATA", "_SIZED_BY_VALUES", "_HARMLESS"):  # made when the file was imported
        setattr(recorder, table, getattr(recorder, table) - {name})


def in_a_fork(library: str, name: str | None) -> Any:
    """Start the worlds of a library without this name; returns a function that waits for what they return."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)

        def wait() -> Any:
            with open(reading) as file:
                said = file.read()
            os.waitpid(pid, 0)
            return json.loads(said or '{"it": "died"}')

        return wait
    found: dict[str, Any] = {}
    with open(writing, "w") as file, contextlib.suppress(BaseException):
        if name is not None:
            take_away(library, name)
        for world, run in WORLDS[library].items():
            if name is not None and (world in APART) != (name in {*_DISTRIBUTED, *torchrl_internals.PARALLEL}):
                continue
            try:
                found[world] = plain(run())
            except BaseException:
                found[world] = traceback.format_exc()
        json.dump(found, file)
    os._exit(0)


def main() -> None:
    asked = json.load(sys.stdin)
    for worlds in WORLDS.values():  # what is imported and made once is there in every fork
        for world, run in worlds.items():
            if world not in APART:
                run()
    gc.collect()
    gc.freeze()  # else each fork would copy all that is there, to look for garbage in it
    found = {}
    for library, names in asked.items():
        usual = in_a_fork(library, None)()
        found[library] = {"usual": usual, "without": {}}
        for at in range(0, len(names), 2):
            waits = {name: in_a_fork(library, name) for name in names[at : at + 2]}
            found[library]["without"].update({name: wait() for name, wait in waits.items()})
    json.dump(found, sys.stdout)


WORLDS: dict[str, dict[str, Callable[[], Any]]] = {"torch": TORCH, "tensordict": TENSORDICT}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if importlib.util.find_spec("torchrl"):
        WORLDS["torchrl"] = torchrl_worlds()
    main()
