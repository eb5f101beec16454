"""Objects that processes share: how descriptors, shared memory and semaphores get from one process to another."""
