"""Batched inference: one policy that answers many who ask. Public names are in `reap.modules`."""
