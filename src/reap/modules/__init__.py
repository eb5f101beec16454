"""Modules: inference servers, which run one policy for many clients, in this process or their own; and the clients."""

from reap.errors import ServerGone
from reap.inference.clients import PolicyClient
from reap.inference.process_server import ProcessInferenceServer
from reap.inference.server import InferenceServer

__all__ = ["InferenceServer", "PolicyClient", "ProcessInferenceServer", "ServerGone"]
