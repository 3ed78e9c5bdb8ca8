"""A model cut into stages, one a rank, behind one model call: what model parallel and pipeline are made of."""
