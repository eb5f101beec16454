"""Workers that data is sent to and from: Ray actors, torch RPC, torch.distributed with gloo."""
