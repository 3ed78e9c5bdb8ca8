"""The strategies, made real on torch."""
