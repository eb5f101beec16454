"""Batched inference: one policy serves many clients. The public names are in `reap.modules`."""
