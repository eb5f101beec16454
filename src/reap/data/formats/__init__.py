"""Formats of datasets on disk: one file each, which writes episodes as they end and reads them back bit for bit."""
