"""Processes, messages, descriptors, interrupts, threads: what the operating system gives. Nothing here knows RL."""
