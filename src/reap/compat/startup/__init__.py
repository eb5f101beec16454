"""The folder that `python -m reap.compat` puts on PYTHONPATH: Python looks there for `sitecustomize` when it starts."""
