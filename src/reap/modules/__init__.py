"""Modules: `InferenceServer`, one policy for many who ask, and its clients."""

from reap.errors import ServerGone
from reap.inference.clients import PolicyClient
from reap.inference.server import InferenceServer

__all__ = ["InferenceServer", "PolicyClient", "ServerGone"]
