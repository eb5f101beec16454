"""Where scripts look for `split_trajectories`."""

from reap.trajectories import split_trajectories

__all__ = ["split_trajectories"]
