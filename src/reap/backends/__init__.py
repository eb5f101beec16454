"""Backends: where workers live, and how slots travel."""
