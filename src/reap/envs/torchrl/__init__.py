"""TorchRL's envs as lanes: TorchRL steps them, or its transforms are replayed around envs that reap steps."""
