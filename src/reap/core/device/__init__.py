"""Rollouts whose rows stay on a GPU, and CUDA graphs of policies and whole rollouts."""
