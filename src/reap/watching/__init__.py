"""Watching a run: samples of a collector ──► a view with rates and a diagnosis ──► a page, and a terminal."""
