"""Parts: the objects a collector is made of, one in each file. None of them refers back to its collector."""
