"""Benchmarks: reap beside an expert's hand-written loop and beside TorchRL, as ratios from one run."""
