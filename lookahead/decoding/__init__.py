"""The Python API and the drop-in for `model.generate`."""
