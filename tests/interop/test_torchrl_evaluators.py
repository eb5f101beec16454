"""Evaluator with TorchRL's envs: their normalisations rest, their videos keep their names, their counters count."""

import re
import warnings

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from reap.collectors import Evaluator
from reap.errors import UsageError
from reap.testing import CountingEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors as theirs
    from torchrl.envs import (
        Compose,
        GymWrapper,
        RewardScaling,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNorm,
    )
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


def scaled(scale=1.0):
    return TransformedEnv(GymWrapper(Paid()), Compose(RewardSum(), RewardScaling(0.0, scale)))


class Paid(CountingEnv):
    """Pays one for each of its four steps."""

    def __init__(self):
        super().__init__((4,))

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 1.0, *rest


def test_where_an_env_sums_its_reward_up_that_is_the_return():
    """As in TorchRL: what is scaled for the learner is not what a policy is measured by."""
    found = {}
    for name, kind in (("reap", Evaluator), ("torchrl", theirs.Evaluator)):
        evaluator = kind(scaled(10.0), policy(), num_trajectories=2)
        found[name] = evaluator.evaluate()
        evaluator.shutdown()
    assert found["reap"]["eval/reward"] == found["torchrl"]["eval/reward"] == 4


@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_metrics_see_what_they_see_in_torchrl(layout):
    seen = {}
    for name, kind in (("reap", Evaluator), ("torchrl", theirs.Evaluator)):
        evaluator = kind(
            lambda: GymWrapper(CountingEnv((2, 5))),
            policy_factory=lambda env: policy(),
            num_trajectories=3,
            collector_kwargs={"traj_format": layout},
            metrics_fn=lambda batch, name=name: seen.setdefault(name, batch) is None or {"frames": batch.numel()},
        )
        evaluator.evaluate()
        evaluator.shutdown()
    mine, other = seen["reap"], seen["torchrl"]
    assert mine.batch_size == other.batch_size
    assert set(mine.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        if key != ("collector", "traj_ids"):
            assert torch.equal(mine[key], other[key]), key


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_weights_of_a_transform_by_path(backend):
    def make():
        return TransformedEnv(GymWrapper(Paid()), RewardScaling(0.0, 1.0))

    with Evaluator(make, policy(), num_trajectories=1, backend=backend) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 4
        weights = {"loc": torch.tensor(0.0), "scale": torch.tensor(3.0)}
        assert evaluator.evaluate(weights_dict={"env.transform": weights})["eval/reward"] == 12
        for wrong, said in (("nowhere", "'nowhere', which is not there"), ("env.transform[7]", "which is not there")):
            with pytest.raises(UsageError, match=rf"{re.escape(said)}.*'policy' \(TensorDictModule\), 'env.transform'"):
                evaluator.evaluate(weights_dict={wrong: weights})
        assert evaluator.evaluate()["eval/num_episodes"] == 1, "a wrong name ends nothing"


def test_a_wrong_name_is_told_where_it_is_given():
    """In this thread, not when the result of the background is asked for."""
    with Evaluator(scaled(), policy(), num_trajectories=1) as evaluator:
        with pytest.raises(UsageError, match="'critic', which is not there"):
            evaluator.trigger_eval(weights_dict={"critic": policy()})
        with pytest.raises(UsageError, match="'frames_per_batch', a int without weights"):
            evaluator.evaluate(weights_dict={"frames_per_batch": policy()})


def test_videos_of_a_process_are_written_there(tmp_path):
    """TorchRL's process backend dumps them in the worker."""

    class Log:
        exp_name = "log"

        def log_video(self, name, video, step=None, **_):
            (tmp_path / f"{name}-{step}").write_text(str(video.shape[1]))

    def make():
        recorder = VideoRecorder(logger=Log(), tag="seen", skip=1)
        return TransformedEnv(GymWrapper(Drawn(), from_pixels=True, pixels_only=False), recorder)

    with Evaluator(make, policy(), num_trajectories=2, backend="process") as evaluator:
        evaluator.evaluate(step=7)
    assert [path.name for path in tmp_path.iterdir()] == ["seen-7"]
