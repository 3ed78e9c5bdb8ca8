"""A cell both ways, on a single device and under its strategy, and what differs."""
