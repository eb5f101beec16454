"""The engine: envs, policies, slots and the one loop that joins them. No processes live here.

Read `env → policy → slot → rollout → worker → assemble` and you know the library.
"""
