"""The wire between the notebook side and the workers."""
