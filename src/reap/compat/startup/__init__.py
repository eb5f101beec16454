"""The folder that `python -m reap.compat` adds to PYTHONPATH: Python imports its `sitecustomize` at start-up."""
