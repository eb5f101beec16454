"""Lanes stepped by threads and processes: ParallelEnv, AsyncEnvPool and what is behind them."""
