"""Weights: parameters of a policy, in every form users hold them."""
