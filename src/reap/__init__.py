"""reap: experience for reinforcement learning on PyTorch, at the speed of a hand-written loop.

>>> from reap.collectors import Collector
>>> for batch in Collector("CartPole-v1", frames_per_batch=100, total_frames=1000):
...     ...
"""

__version__ = "0.1.0"
