"""Re-exports `split_trajectories`, which scripts written for TorchRL import from here."""

from reap.trajectories import split_trajectories

__all__ = ["split_trajectories"]
