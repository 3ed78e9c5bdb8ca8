"""What a loss is: a mean over the samples, a sum, or neither."""
