"""Columns of a batch: which there are, those without a fixed shape (text, objects, ragged), and skipped rows."""
