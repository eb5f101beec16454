"""Private names of other libraries: one file per library, each with a slower, public fallback for missing names."""
