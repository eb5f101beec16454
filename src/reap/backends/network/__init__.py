"""Connections between machines: listeners that ask for a secret, signed messages, node agents and their launchers."""
