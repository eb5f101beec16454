"""Lanes that are ready at different times, sorted into the stream of each."""
