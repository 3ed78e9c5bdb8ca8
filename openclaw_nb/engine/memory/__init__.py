"""A worker's memory: blocks computed twice instead of kept, the GPU's settings, and what used it when it ran out."""
