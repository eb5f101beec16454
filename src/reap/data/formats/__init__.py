"""Formats of datasets on disk: each module writes episodes as they end and reads them back bit for bit."""
