"""Measurements made while collecting: each episode, running statistics of values, and where the time goes."""
