"""Measures das-adapter on a GPU: `das-adapter bench`, `python -m das_adapter.bench`."""
