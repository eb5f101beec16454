"""Envs of other libraries as lanes, one library per file."""
