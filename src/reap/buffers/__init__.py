"""Replay memory. Knows batches, knows nothing of collectors."""
