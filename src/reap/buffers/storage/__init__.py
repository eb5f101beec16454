"""The rows of a buffer in memory shared by any number of processes, and the rules for writing and reading them."""
