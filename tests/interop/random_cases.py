"""Random chains of transforms, actors and changes between batches, each collected by TorchRL's collector and by ours.

python -m tests.interop.random_cases SEED SECONDS     as many as there is time for; what differs is printed
python -m tests.interop.random_cases SEED             this one

A case follows from its seed. Compared are the bits of every batch, the state of env and policy after each, what the
policy's module kept on itself, and whether anything that was handed out is still what it was when all is over.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TheirCollector
from torchrl.data import Bounded, OneHot
from torchrl.envs import (
    CatFrames,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    ExplorationType,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    TargetReturn,
    TimeMaxPool,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)

from reap.collectors import Collector as OurCollector

BATCHES = 5


# ---------------------------------------------------------------------------------------------------------------- envs


class Doubles(gym.Wrapper):
    """Observations in doubles."""

    def __init__(self, env):
        super().__init__(env)
        box = env.observation_space
        self.observation_space = gym.spaces.Box(
            box.low.astype(np.float64), box.high.astype(np.float64), dtype=np.float64
        )

    def step(self, action):
        observation, *rest = self.env.step(action)
        return (observation.astype(np.float64), *rest)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return observation.astype(np.float64), info


class Counts(gym.Env):
    """Counts its steps; how long an episode lasts is drawn at its start."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.last = 0, int(self.np_random.integers(1, 9))
        return self._seen(), {}

    def _seen(self):
        return np.array([self.n, -self.n, self.last, -0.0 * self.n], np.float32)

    def step(self, action):
        self.n += 1
        return self._seen(), float(action) * self.n - 0.5, self.n >= self.last, self.n == 5, {}


ENVS = {
    "cartpole": lambda: GymEnv("CartPole-v1"),
    "cartpole, doubles": lambda: GymWrapper(Doubles(gym.make("CartPole-v1"))),
    "pendulum": lambda: GymEnv("Pendulum-v1", g=9.5),
    "pendulum, doubles": lambda: GymWrapper(Doubles(gym.make("Pendulum-v1"))),
    "counts": lambda: GymWrapper(Counts()),
}

TRANSFORMS = {
    "VecNorm": lambda r: VecNorm(in_keys=["observation"], decay=r.choice([0.9, 0.999])),
    "VecNorm of rewards": lambda r: VecNorm(in_keys=["reward"], decay=0.9),
    "VecNormV2": lambda r: VecNormV2(in_keys=["observation"], decay=0.9),
    "Clip": lambda r: ClipTransform(
        in_keys=["observation"], low=r.choice([-1.0, -0.02, 0.0]), high=r.choice([0.02, 1.0])
    ),
    "RewardSum": lambda r: RewardSum(),
    "StepCounter": lambda r: StepCounter(max_steps=r.choice([None, 5, 13])),
    "InitTracker": lambda r: InitTracker(),
    "CatFrames": lambda r: CatFrames(
        N=r.choice([2, 3, 4]),
        dim=-1,
        in_keys=["observation"],
        out_keys=["stack"],
        padding=r.choice(["same", "constant"]),
        **r.choice([{}, {"padding_value": 1.5}]),
    ),
    "RewardScaling": lambda r: RewardScaling(loc=r.choice([0.0, 0.1]), scale=r.choice([1.0, -2.0])),
    "RewardClipping": lambda r: RewardClipping(-0.5, r.choice([0.5, 2.0])),
    "Sign": lambda r: SignTransform(in_keys=["reward"]),
    "DoubleToFloat": lambda r: DoubleToFloat(in_keys=["observation"]),
    "DTypeCast": lambda r: DTypeCastTransform(
        torch.float32, torch.float64, in_keys=["observation"], out_keys=["double"]
    ),
    "ObservationNorm": lambda r: ObservationNorm(
        loc=0.3, scale=r.choice([2.0, -0.5]), in_keys=["observation"], standard_normal=r.choice([True, False])
    ),
    "Unsqueeze": lambda r: UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["wide"]),
    "Rename": lambda r: RenameTransform(in_keys=["reward"], out_keys=["raw"], create_copy=True),
    "TargetReturn": lambda r: TargetReturn(target_return=10.0),
    "Permute": lambda r: Compose(
        UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["turned"]),
        PermuteTransform((-1, -2), in_keys=["turned"]),
    ),
    "TimeMaxPool": lambda r: TimeMaxPool(in_keys=["observation"], out_keys=["maxed"], T=r.choice([2, 3])),
}


# -------------------------------------------------------------------------------------------------------------- modules


class Custom(nn.Module):
    """A module somebody wrote: `scores` of actions, from which a choice is made."""

    def __init__(self, seen, acts, discrete):
        super().__init__()
        self.first, self.second = nn.Linear(seen, 8), nn.Linear(8, acts)
        self.discrete, self.gain = discrete, 1.0

    def chosen(self, scores):
        if self.discrete:
            return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])
        return scores.tanh() * 2

    def forward(self, x):
        x = x.float()
        scores = self.second(self.first(x).relu()) * self.gain
        return self.chosen(scores), scores


class InPlace(Custom):
    def forward(self, x):
        h = self.first(x.float())
        h.relu_()
        h += 0.1
        scores = self.second(h)
        before = scores
        scores.mul_(2)
        return self.chosen(scores), before


class Views(Custom):
    def forward(self, x):
        h = self.first(x.float())
        left, right = h[..., :4], h[..., 4:]
        left.add_(right.mean(-1, keepdim=True))
        right.t().zero_() if right.ndim == 2 else right.zero_()
        scores = self.second(h)
        return self.chosen(scores), h.transpose(0, -1).transpose(0, -1)[..., 1:2]


class Keeps(Custom):
    """Keeps what it saw and what it computed."""

    def forward(self, x):
        x = x.float()
        self.saw = x
        h = self.first(x).tanh()
        self.hidden = h
        self.views = h[..., :2]
        scores = self.second(h)
        self.scores = scores
        return self.chosen(scores), scores


class KeepsTheLast(Custom):
    """Acts on the difference to what it saw before."""

    def __init__(self, *args):
        super().__init__(*args)
        self.before = None

    def forward(self, x):
        x = x.float()
        d = x if self.before is None or self.before.shape != x.shape else x - self.before
        self.before = x
        scores = self.second(self.first(d).relu())
        return self.chosen(scores), d


class Buffers(Custom):
    """Changes buffers in place."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        self.mean.lerp_(x.float().mean().reshape(1), 0.1)
        scores = self.second(self.first(x.float() - self.mean).relu()) + self.steps.sin()
        return self.chosen(scores), self.mean.expand(*x.shape[:-1], 1).clone()


class NewBuffers(Custom):
    """Puts new tensors in the place of buffers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1
        scores = self.second(self.first(x.float()).relu()) + self.steps.cos()
        return self.chosen(scores), scores


class Aliases(Custom):
    """Its outputs lie in the memory of its input, of each other, and of a parameter."""

    def __init__(self, *args):
        super().__init__(*args)
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x):
        scores = self.second(self.first(x.float()).relu())
        return self.chosen(scores), x, x[..., :1], scores, scores.view(scores.shape), self.bias.expand(*x.shape[:-1], 2)


class Drops(Custom):
    def forward(self, x):
        h = nn.functional.dropout(self.first(x.float()), 0.3, self.training)
        return self.chosen(self.second(h)), h


class Normalised(Custom):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm, self.layer = nn.BatchNorm1d(8, momentum=0.3), nn.LayerNorm(8)

    def forward(self, x):
        h = self.first(x.float())
        h = self.norm(h) if h.ndim == 2 and len(h) > 1 else h
        scores = self.second(self.layer(h))
        return self.chosen(scores), h


class Climbs(Custom):
    """Needs gradients while it acts."""

    def forward(self, x):
        with torch.enable_grad():
            y = x.float().detach().clone().requires_grad_()
            (g,) = torch.autograd.grad(self.first(y).square().sum(), y)
        scores = self.second(self.first(x.float() - 0.01 * g))
        return self.chosen(scores), g


class Decides(Custom):
    def forward(self, x):
        h = self.first(x.float())
        if h.mean() > 0:
            h = h.neg()
        return self.chosen(self.second(h)), h


class Samples(Custom):
    """Draws in every way there is."""

    def forward(self, x):
        scores = self.second(self.first(x.float()).relu())
        noisy = scores + 0.1 * torch.randn_like(scores) + torch.rand(scores.shape[-1]) * torch.empty(1).uniform_(0, 0.1)
        mixed = torch.bernoulli(scores.sigmoid())
        if self.discrete:
            at = torch.multinomial(noisy.softmax(-1), 1).squeeze(-1)
            return nn.functional.one_hot(at, scores.shape[-1]), mixed
        return torch.distributions.Normal(noisy, 0.2).sample().clamp(-2, 2), mixed


class Elsewhere(Custom):
    """Draws from NumPy and Python."""

    def forward(self, x):
        scores = self.second(self.first(x.float()))
        return self.chosen(scores + float(np.random.rand()) - random.random()), scores


class Deep(Custom):
    def __init__(self, seen, acts, discrete):
        super().__init__(seen, acts, discrete)
        self.net = nn.Sequential(
            nn.Linear(seen, 8),
            nn.ELU(inplace=True),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Softplus(),
            nn.Hardtanh(),
            nn.Linear(8, acts),
        )
        self.more = nn.ModuleList([nn.Linear(acts, acts), nn.Identity(), nn.PReLU()])

    def forward(self, x):
        scores = self.net(x.float())
        for part in self.more:
            scores = part(scores)
        stacked = torch.stack([scores, scores * 2], -1)
        return self.chosen(scores), stacked.sum(-1), stacked.amax(-1), scores.cumsum(-1), scores.sort(-1).values


class Scratch(Custom):
    """Computes in memory of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.room = None

    def forward(self, x):
        scores = self.second(self.first(x.float()).relu())
        if self.room is None or self.room.shape != scores.shape:
            self.room = torch.zeros_like(scores)
        torch.add(scores, 1, out=self.room)
        self.room.mul_(0.5)
        return self.chosen(scores), self.room.clone()


class ChangesItsInput(Custom):
    """Clamps what it is given in place, on a copy."""

    def forward(self, x):
        y = x.clone()
        y.clamp_(-0.5, 0.5)
        z = y.float()
        z[..., 0] = 0
        return self.chosen(self.second(self.first(z))), y, z


class Indexes(Custom):
    def forward(self, x):
        scores = self.second(self.first(x.float()))
        order = scores.argsort(-1)
        picked = scores.gather(-1, order)
        mask = scores > 0
        low = torch.where(mask, scores, scores.new_zeros(()))
        low[..., :1] = 7
        filled = scores.masked_fill(mask, -0.0)
        return self.chosen(picked), low, filled, order, mask


CUSTOM = {
    kind.__name__: kind
    for kind in (
        Custom, InPlace, Views, Keeps, KeepsTheLast, Buffers, NewBuffers, Aliases, Drops, Normalised, Climbs, Decides,
        Samples, Elsewhere, Deep, Scratch, ChangesItsInput, Indexes,
    )
}  # fmt: skip


def _floats(x):
    return x.float()


def _params(r, seen, out):
    return TensorDictSequential(
        TensorDictModule(_floats, in_keys=["observation"], out_keys=["floats"]),
        TensorDictModule(
            nn.Sequential(MLP(in_features=seen, out_features=2 * out, num_cells=[8]), NormalParamExtractor()),
            in_keys=["floats"], out_keys=["loc", "scale"],
        ),
    )  # fmt: skip


def _actor(r, name, seen, acts, discrete, spec):
    """An actor by its name."""
    scored = TensorDictModule(
        MLP(in_features=seen, out_features=acts, num_cells=[8], activation_class=r.choice([nn.Tanh, nn.ReLU, nn.SiLU])),
        in_keys=["floats"], out_keys=["logits" if discrete else "action"],
    )  # fmt: skip
    floats = TensorDictModule(_floats, in_keys=["observation"], out_keys=["floats"])
    log_prob = r.choice([True, False])
    if name == "OneHot":
        return ProbabilisticActor(TensorDictSequential(floats, scored), in_keys=["logits"], spec=r.choice([spec, None]),
                                  distribution_class=OneHotCategorical, return_log_prob=log_prob)  # fmt: skip
    if name == "torch's OneHot":
        kind = torch.distributions.OneHotCategorical
        return ProbabilisticActor(TensorDictSequential(floats, scored), in_keys=["logits"],
                                  distribution_class=kind, return_log_prob=log_prob)  # fmt: skip
    if name == "QValue":
        q = QValueActor(MLP(in_features=seen, out_features=acts, num_cells=[8]), in_keys=["floats"], spec=spec)
        eps = r.choice([1.0, 0.3])
        return TensorDictSequential(floats, q, EGreedyModule(spec=spec, eps_init=eps, annealing_num_steps=200))
    if name == "ActorValue":
        common = TensorDictModule(nn.Linear(seen, 8), in_keys=["floats"], out_keys=["hidden"])
        head = TensorDictModule(nn.Linear(8, acts), in_keys=["hidden"], out_keys=["logits"])
        actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
        value = ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
        return TensorDictSequential(floats, ActorValueOperator(common, actor, value))
    if name in ("TanhNormal", "TruncatedNormal", "Normal"):
        kinds = {"TanhNormal": TanhNormal, "TruncatedNormal": TruncatedNormal, "Normal": torch.distributions.Normal}
        bounds = {} if name == "Normal" else {"distribution_kwargs": {"low": -2.0, "high": 2.0}}
        return ProbabilisticActor(_params(r, seen, acts), in_keys=["loc", "scale"], distribution_class=kinds[name],
                                  return_log_prob=log_prob, spec=r.choice([spec, None]), **bounds)  # fmt: skip
    if name in ("Gaussian", "OrnsteinUhlenbeck"):
        if name == "Gaussian":
            noise: Any = AdditiveGaussianModule(spec=spec, annealing_num_steps=200, mean=0.1, std=0.3)
        else:
            noise = OrnsteinUhlenbeckProcessModule(spec=spec, annealing_num_steps=200)
        return TensorDictSequential(floats, scored, noise)
    assert name in ("LSTM", "GRU")
    kind = LSTMModule if name == "LSTM" else GRUModule
    keys = {"in_key": "floats", "out_key": "hidden"}
    cell = kind(input_size=seen, hidden_size=6, **keys)
    head = TensorDictModule(nn.Linear(6, acts), in_keys=["hidden"], out_keys=["scores"])
    pick = TensorDictModule(Picks(discrete), in_keys=["scores"], out_keys=["action"])
    return TensorDictSequential(floats, cell, head, pick)


class Picks(nn.Module):
    def __init__(self, discrete):
        super().__init__()
        self.discrete = discrete

    def forward(self, scores):
        if self.discrete:
            return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])
        return scores.tanh() * 2


DISCRETE = ["OneHot", "torch's OneHot", "QValue", "ActorValue", "LSTM", "GRU"]
CONTINUOUS = ["TanhNormal", "TruncatedNormal", "Normal", "Gaussian", "OrnsteinUhlenbeck", "LSTM", "GRU"]


# ------------------------------------------------------------------------------------------------------ between batches


def change(what, env, policy, made):
    """One of the things people do between two batches."""
    norms = [part for part in env.modules() if isinstance(part, (VecNorm, VecNormV2))]
    if what == "freeze":
        [part.freeze() for part in norms]
    elif what == "unfreeze":
        [part.unfreeze() for part in norms]
    elif what == "env.eval":
        env.eval()
    elif what == "env.train":
        env.train()
    elif what == "scaling":
        for part in env.modules():
            if type(part) is RewardScaling:
                part.loc.fill_(0.25)
            if type(part) is RewardClipping:
                part.clamp_max = torch.tensor(0.75)
            if type(part) is ObservationNorm:
                part.loc.fill_(-0.125)
    elif what == "env.load":
        env.load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made["env"].items()})
    elif what == "env.reset":
        env.reset()
    elif what == "policy.eval":
        policy.eval()
    elif what == "policy.train":
        policy.train()
    elif what == "policy.load":
        policy.load_state_dict(made["policy"])
    elif what == "update":
        with torch.no_grad():
            [p.add_(0.05) for p in policy.parameters()]
    elif what == "data":
        for p in policy.parameters():
            p.data = p.data * 0.9
    elif what == "replace":
        for part in policy.modules():
            if type(part) is nn.Linear:
                part.bias = nn.Parameter(part.bias.detach() + 0.1)
                break
    elif what == "freeze weights":
        policy.requires_grad_(not next(policy.parameters()).requires_grad)
    elif what == "gain":
        for part in policy.modules():
            if isinstance(part, Custom):
                part.gain *= 1.5
    elif what == "step":
        for part in policy.modules():
            if isinstance(part, (EGreedyModule, AdditiveGaussianModule, OrnsteinUhlenbeckProcessModule)):
                part.step(40)
    elif what == "hook":
        policy.register_forward_hook(_looks_on)
    elif what == "draw":
        torch.rand(3)
    elif what == "append" and isinstance(env, TransformedEnv):
        env.append_transform(RewardScaling(loc=0.5, scale=1.0))


def _looks_on(module, given, result):
    return None


CHANGES = [
    "freeze", "unfreeze", "env.eval", "env.train", "scaling", "env.load", "env.reset", "policy.eval", "policy.train",
    "policy.load", "update", "update", "data", "replace", "freeze weights", "gain", "step", "step", "hook", "draw",
    "append", *[None] * 6,
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- one case


class Case:
    """What follows from a seed."""

    def __init__(self, seed):
        r = random.Random(seed)
        self.seed, self.kind = seed, r.choice(list(ENVS))
        self.names = r.sample(list(TRANSFORMS), r.randint(0, 6))
        self.form = r.choice(["one", "around", "inside", "both", "nested"])
        self.lanes = r.choice([1, 2, 3, 5, 8])
        self.discrete = "pendulum" not in self.kind
        known = r.random() < 0.5
        self.actor = r.choice(DISCRETE if self.discrete else CONTINUOUS) if known else r.choice(list(CUSTOM))
        self.wrapped = known or r.random() < 0.6  # as a TensorDictModule, or called by itself
        self.options = r.choice(
            [{}, {}, {}, {"max_frames_per_traj": r.choice([3, 7])}, {"init_random_frames": r.choice([20, 50, 130])},
             {"reset_at_each_iter": True}, {"split_trajs": True}]
        )  # fmt: skip
        if r.random() < 0.3:
            self.options["exploration_type"] = r.choice(
                [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MEAN, ExplorationType.MODE]
            )
        if "StepCounter" in self.names:
            self.options.pop("max_frames_per_traj", None)
        if self.actor in ("LSTM", "GRU", "OrnsteinUhlenbeck") and "InitTracker" not in self.names:
            self.names.append("InitTracker")
        self.changes = [r.choice(CHANGES) for _ in range(BATCHES)]
        self.frames = r.choice([24, 40, 120, 240])
        self.chance = r.random()

    def __repr__(self):
        told = {k: v for k, v in vars(self).items() if k not in ("chance", "discrete")}
        return " ".join(f"{k}={v!r}" for k, v in told.items())

    def env(self, policy):
        r = random.Random(self.chance)
        made = [TRANSFORMS[name](r) for name in self.names]
        if self.actor in ("LSTM", "GRU"):
            made += [
                part.make_tensordict_primer() for part in policy.modules() if isinstance(part, (LSTMModule, GRUModule))
            ]
        half = len(made) // 2
        if self.form == "one" or not made:
            return TransformedEnv(ENVS[self.kind](), Compose(*made))
        if self.form == "nested":
            return TransformedEnv(TransformedEnv(ENVS[self.kind](), Compose(*made[:half])), Compose(*made[half:]))
        if self.form == "around":
            return TransformedEnv(SerialEnv(self.lanes, ENVS[self.kind]), Compose(*made))
        if self.form == "inside" or not half:
            return SerialEnv(self.lanes, lambda: TransformedEnv(ENVS[self.kind](), self._copied(made)))
        inner = SerialEnv(self.lanes, lambda: TransformedEnv(ENVS[self.kind](), self._copied(made[:half])))
        return TransformedEnv(inner, Compose(*made[half:]))

    @staticmethod
    def _copied(made):
        return Compose(*(transform.clone() for transform in made))

    def policy(self):
        r = random.Random(self.chance)
        torch.manual_seed(7)
        seen = 4 if self.discrete else 3
        acts = 2 if self.discrete else 1
        spec = OneHot(2) if self.discrete else Bounded(-2.0, 2.0, (1,))
        if self.actor not in CUSTOM:
            return _actor(r, self.actor, seen, acts, self.discrete, spec)
        module = CUSTOM[self.actor](seen, acts, self.discrete)
        if not self.wrapped:
            return First(module)
        outputs = ["action", *(f"extra{i}" for i in range(_outputs(module, seen) - 1))]
        return TensorDictModule(module, in_keys=["observation"], out_keys=outputs)


class First(nn.Module):
    """The action alone, as a module that is called with observations returns it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, observation):
        return self.inner(observation)[0]


def _outputs(module, seen):
    state = {k: v.clone() for k, v in module.state_dict().items()}
    made = len(module(torch.zeros(2, seen)))
    _as_new(module, state)
    return made


def _as_new(policy, state):
    """Put a policy back as it was made: TorchRL's collectors try it once, and leave what came of it."""
    policy.load_state_dict(state)
    for part in policy.modules():
        for name in ("saw", "hidden", "views", "scores"):
            vars(part).pop(name, None)
        for name in ("before", "room"):
            if name in vars(part):
                setattr(part, name, None)


def kept_by(policy):
    """Tensors modules keep on themselves, by where they are."""
    found = dict(policy.state_dict())
    for path, part in policy.named_modules():
        found.update({(path, k): v for k, v in vars(part).items() if isinstance(v, torch.Tensor)})
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


class Found:
    """What came of a case."""

    def __init__(self):
        self.batches: list[TensorDictBase] = []  # as they were when they came
        self.held: list[TensorDictBase] = []  # the very ones
        self.kept: list[dict[Any, torch.Tensor]] = []
        self.held_kept: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self.env: list[dict[Any, torch.Tensor]] = []
        self.drawn: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.why = ""


def collected(cls, case: Case) -> Found:
    """Collect the batches of a case."""
    policy = case.policy()
    env = case.env(policy)
    env.set_seed(3)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    made = {"policy": {k: v.clone() for k, v in policy.state_dict().items()}}
    collector = cls(env, policy, frames_per_batch=case.frames, total_frames=case.frames * BATCHES, **case.options)
    _as_new(policy, made["policy"])
    made["env"] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in env.state_dict().items()}
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    found = Found()
    try:
        for n, batch in enumerate(collector):
            found.batches.append(batch.clone())
            if case.seed % 3:  # whoever holds batches is given copies before long
                found.held.append(batch)
            now = kept_by(policy)
            found.kept.append({k: v.clone() for k, v in now.items()})
            parameters = {*policy.state_dict()}
            found.held_kept += [(k, v, v.clone()) for k, v in now.items() if k not in parameters]
            found.drawn.append(torch.get_rng_state())
            if n < BATCHES - 1:
                # With `max_frames_per_traj` TorchRL's collector steps a copy of the env.
                state = env.state_dict() if "max_frames_per_traj" not in case.options else {}
                found.env.append({k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)})
                change(case.changes[n], env, policy, made)
            elif cls is OurCollector:
                found.why = collector.explain()
    except Exception as error:  # both may refuse
        found.error = error
    finally:
        with contextlib.suppress(Exception):
            collector.shutdown()
    return found


def same(a, b):
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    a, b = (x.detach().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _unlike(a, b):
    return [*(a.keys() ^ b.keys()), *(k for k in a.keys() & b.keys() if not same(a[k], b[k]))]


def _leaves(batch):
    return dict(batch.items(True, True))


def difference(case: Case) -> str | None:
    """In what reap's differ from TorchRL's; None: in nothing."""
    theirs, ours = _tried(TheirCollector, case), _tried(OurCollector, case)
    if isinstance(theirs, Exception) or (isinstance(ours, Exception) and theirs.error is not None):
        return None  # reap may take what TorchRL refuses, and refuses at once what fails there later
    if isinstance(ours, Exception):
        return f"reap's cannot be made: {ours!r:.300}"
    if bad := _changed_later(ours):
        return bad
    if theirs.error is None and ours.error is not None:
        return f"only reap raises: {ours.error!r:.300}"
    for n, (a, b) in enumerate(zip(theirs.batches, ours.batches)):
        if bad := _unlike(_leaves(a), _leaves(b)):
            return f"batch {n}: {bad[:4]}"
        if bad := [k for k, v in b.items(True, True) if v.requires_grad]:
            return f"batch {n} needs gradients: {bad[:4]}"
        if bad := _unlike(theirs.kept[n], ours.kept[n]):
            return f"what the policy keeps after batch {n}: {bad[:4]}"
        if not torch.equal(theirs.drawn[n], ours.drawn[n]):
            return f"the generator after batch {n}"
    for n, (a, b) in enumerate(zip(theirs.env, ours.env)):
        if bad := _unlike(a, b):
            return f"the env's state after batch {n}: {bad[:4]}"
    return None if len(theirs.batches) <= len(ours.batches) else "how many batches there are"


def _changed_later(found: Found) -> str | None:
    """What is no longer as it was when it was delivered, or could never need gradients."""
    for n, (then, now) in enumerate(zip(found.batches, found.held)):
        if bad := _unlike(_leaves(then), _leaves(now)):
            return f"batch {n} changed after it was delivered: {bad[:4]}"
    # A module itself writes over its `room`.
    if bad := [k for k, tensor, then in found.held_kept if k[-1] != "room" and not same(tensor, then)]:
        return f"what the module kept changed: {bad[:4]}"
    if bad := [k for batch in found.held for k, v in batch.items(True, True) if v.is_inference()]:
        return f"tensors of inference mode in a batch: {bad[:4]}"
    if bad := [k for k, tensor, _ in found.held_kept if tensor.is_inference()]:
        return f"the module kept tensors of inference mode: {bad[:4]}"
    return None


def _tried(cls, case):
    try:
        return collected(cls, case)
    except Exception as error:
        return error


def main() -> None:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    seed = int(sys.argv[1])
    if len(sys.argv) < 3:
        case = Case(seed)
        print(case, "\n", difference(case), "\n", getattr(_tried(OurCollector, case), "why", ""))
        return
    start, tried = time.time(), 0
    while time.time() - start < float(sys.argv[2]):
        case = Case(seed + tried)
        tried += 1
        if found := difference(case):
            print(f"DIFFERS: {found}\n   {case}", flush=True)
    print("tried", tried)


if __name__ == "__main__":
    main()
