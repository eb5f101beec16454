"""Roads: what a node can be asked to run, by name."""

from __future__ import annotations

from reap.backends.rpc_worker import run_rpc_guest
from reap.backends.torchdist_worker import run_gloo_guest

ROADS = {"gloo": run_gloo_guest, "rpc": run_rpc_guest}
