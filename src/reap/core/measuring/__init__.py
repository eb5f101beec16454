"""What is measured while collecting: episodes one by one, and where the time goes."""
