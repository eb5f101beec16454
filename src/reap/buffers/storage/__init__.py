"""Where the rows of a buffer lie, and who may write and read them when: memory that any number of processes share."""
