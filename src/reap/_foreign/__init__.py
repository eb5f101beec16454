"""Private names of other libraries: one file for each, with the public, slower way where a name is gone."""
