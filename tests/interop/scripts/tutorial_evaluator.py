"""The evaluators tutorial's way: training beside an evaluator, asked at once and in the background."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, Evaluator
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor


def make_env():
    """A CartPole that always begins in the same way."""
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(60))
    env.set_seed(0)
    return env


def make_policy():
    """A categorical actor for CartPole."""
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical)


log = []
torch.manual_seed(0)
policy = make_policy()
env = make_env()
collector = Collector(env, policy, frames_per_batch=50, total_frames=150)
judged = GymEnv("CartPole-v1")
judged.set_seed(7)
evaluator = Evaluator(judged, make_policy(), num_trajectories=1, max_steps=60, frames_per_batch=60)
for n, data in enumerate(collector):
    log.append(data.clone())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * (n + 1))
    collector.update_policy_weights_()
    if n:  # TorchRL plays on to the end of a batch: how many episodes it has begun by now is its own affair
        judged.set_seed(7 + n)
    if n < 2:
        result = evaluator.evaluate(policy, step=n)
    else:
        evaluator.trigger_eval(policy, step=n)
        result = evaluator.wait(timeout=30)
    log.append({key: float(result[key]) for key in ("eval/reward", "eval/episode_length")})
evaluator.shutdown()
collector.shutdown()
