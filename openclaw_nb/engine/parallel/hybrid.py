"""Hybrid: data parallel times tensor parallel, as axes of one mesh.

Ranks that differ in their tensor coordinate see the same slice of each batch, and share the layers; ranks that differ
in their data coordinate have the same parts, and average their gradients.
"""

from __future__ import annotations

from openclaw_nb.engine.parallel.tensor import TensorParallel
from openclaw_nb.plan.parallelism import Degrees, check_fits


class HybridParallel(TensorParallel):
    """Composes a data axis with a tensor axis.

    Its options are those of `openclaw_nb.strategies.HybridParallelStrategy`.
    """

    def degrees(self) -> Degrees:
        """Return how many ranks there are along each axis, and tell where each rank is."""
        options = self.context.spec.options
        degrees = Degrees(
            data=int(options.get("data_parallel_degree", 1)),
            tensor=int(options.get("tensor_parallel_degree", 1)),
        )
        check_fits(degrees, self.context.ranks.size, {"pipeline": 1})
        self.context.notes.extend(degrees.lines())
        return degrees
