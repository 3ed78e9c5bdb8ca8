"""A short profile of a cell, on copies: what predictions of its strategies are made from."""
