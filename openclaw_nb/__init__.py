"""Run ordinary PyTorch notebook cells on several devices."""
