"""Evaluator with TorchRL's envs: their normalisations rest, their videos keep their names, their counters count."""

import warnings

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from reap.collectors import Evaluator
from reap.testing import CountingEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.envs import GymWrapper, SerialEnv, StepCounter, TransformedEnv, VecNorm
    from torchrl.record import VideoRecorder

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(90)]


class Drawn(CountingEnv):
    """Four steps long, and to be seen."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    render_mode = "rgb_array"

    def __init__(self):
        super().__init__((4,))

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


def policy():
    return TensorDictModule(lambda observation: observation[..., :1] * 0, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("lanes", [False, True])
def test_moving_normalisations_rest(lanes):
    norms = [VecNorm(in_keys=["observation"]) for _ in range(1 + lanes)]
    made = [TransformedEnv(GymWrapper(Drawn()), norm) for norm in norms]
    for env in made:
        env.rollout(3)
    before = [norm.loc.clone() for norm in norms]
    env = SerialEnv(2, [lambda env=env: env for env in made]) if lanes else made[0]
    with Evaluator(env, policy(), num_trajectories=2, max_steps=3) as evaluator:
        evaluator.evaluate()
    for norm, loc in zip(norms, before):
        assert torch.equal(norm.loc["observation"], loc["observation"])


def test_videos_keep_their_names_and_hold_what_was_played():
    class Log:
        exp_name = "log"

        def __init__(self):
            self.videos = []

        def log_video(self, name, video, step=None, **_):
            self.videos.append((name, video.shape[1], step))

    log = Log()
    env = TransformedEnv(
        GymWrapper(Drawn(), from_pixels=True, pixels_only=False), VideoRecorder(logger=log, tag="seen", skip=1)
    )
    with Evaluator(env, policy(), num_trajectories=2) as evaluator:
        evaluator.evaluate(step=7)
        evaluator.evaluate()
    assert [(name, step) for name, _, step in log.videos] == [("seen", 7), ("seen", 0)]
    assert max(frames for _, frames, _ in log.videos) <= 2 * 4 + 6, "more than two episodes and resets"


@pytest.mark.parametrize(("limit", "length"), [(None, 3), (9, 3), (2, 2)])
def test_an_env_that_counts_its_steps(limit, length):
    env = TransformedEnv(GymWrapper(Drawn()), StepCounter(3))
    with Evaluator(env, policy(), num_trajectories=2, max_steps=limit) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == length


def test_weights_of_a_transform_by_path():
    env = TransformedEnv(GymWrapper(Drawn()), VecNorm(in_keys=["observation"]))
    with Evaluator(env, policy(), num_trajectories=1) as evaluator:
        with pytest.raises(AttributeError, match="nowhere"):
            evaluator.evaluate(weights_dict={"nowhere": {}})
        assert evaluator.evaluate()["eval/num_episodes"] == 1
