"""Remote workers, which exchange messages with the parent: Ray actors, torch RPC, torch.distributed with gloo."""
