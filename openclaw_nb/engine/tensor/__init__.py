"""Tensors of which each rank has a part: tensor parallelism under code that takes them for whole."""
