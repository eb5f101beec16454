"""Connections between machines: authenticated listeners, signed messages, node agents and their launchers."""
