"""Watching a run: samples of a collector ──► a view with rates and a diagnosis ──► a web page, a terminal."""
