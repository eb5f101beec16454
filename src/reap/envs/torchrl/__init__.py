"""TorchRL's envs as lanes: stepped by TorchRL, or its transforms replayed around the envs that reap steps."""
