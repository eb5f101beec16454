"""Whatever acts, as one thing that reads a row and writes a row; one file for each kind."""
