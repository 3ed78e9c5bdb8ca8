"""A newcomer enters a running cell: where the cell is, and the program that goes on from there."""
