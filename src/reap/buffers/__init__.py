"""Replay memory: stores batches and samples them. This package knows nothing of collectors."""
