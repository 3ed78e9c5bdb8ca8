"""Parameters, gradients and optimizer state in shards: one part of each on each rank, for the time of a cell."""
