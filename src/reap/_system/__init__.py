"""Processes, messages, descriptors, interrupts, threads: what the OS provides. Nothing here knows about RL."""
