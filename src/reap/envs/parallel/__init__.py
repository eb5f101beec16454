"""Lanes stepped by threads and processes: ParallelEnv, AsyncEnvPool and their implementation."""
