"""The engine: envs, policies, slots and the one loop that joins them. Nothing here starts a process.

Read `env → policy → slot → rollout → worker → assemble`, in this order, and you know the library.
"""
