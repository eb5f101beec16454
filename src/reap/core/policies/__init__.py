"""Turn every kind of policy into one object that reads a row and writes a row; one file for each kind."""
