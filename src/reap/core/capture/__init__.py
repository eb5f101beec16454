"""Torch calls recorded once and replayed: how policies and transforms run without the Python around them."""
