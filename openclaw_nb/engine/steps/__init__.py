"""The step engine: batches, weights, gradients and averages of a strategy cell."""
