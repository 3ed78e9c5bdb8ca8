"""The strategies as the notebook side knows them: names, no torch."""
