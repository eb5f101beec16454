"""Parts: what a collector is made of, one idea in each file. None of them knows the collector that has it."""
