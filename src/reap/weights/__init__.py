"""Weights: a policy's parameters in every form users hold them, and how they reach other processes."""
