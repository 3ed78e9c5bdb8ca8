"""Mixed precision, made real on torch: which layers, in what, and the scale of the loss."""
