"""Transforms: changes to observations and rewards between env and policy, vectorised over lanes."""

from __future__ import annotations

from reap.envs.transforms.base import Transform, TransformedEnv
from reap.envs.transforms.frame_stack import FrameStack
from reap.envs.transforms.normalize import NormalizeObservation, NormalizeReward
from reap.envs.transforms.observations import CastObservation, FlattenObservation, GrayscaleResize
from reap.envs.transforms.rewards import ClipReward, RewardSum, ScaleReward, StepCounter, TimeLimit

__all__ = [
    "CastObservation",
    "ClipReward",
    "FlattenObservation",
    "FrameStack",
    "GrayscaleResize",
    "NormalizeObservation",
    "NormalizeReward",
    "RewardSum",
    "ScaleReward",
    "StepCounter",
    "TimeLimit",
    "Transform",
    "TransformedEnv",
]
