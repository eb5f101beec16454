"""Modules: `InferenceServer`, one policy for many who ask, here or in a process of its own; and its clients."""

from reap.errors import ServerGone
from reap.inference.clients import PolicyClient
from reap.inference.process_server import ProcessInferenceServer
from reap.inference.server import InferenceServer

__all__ = ["InferenceServer", "PolicyClient", "ProcessInferenceServer", "ServerGone"]
