"""What messages between workers cost: a latency for each, and bytes by the link's speed (the alpha-beta model).

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, for
the model and the collectives; Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", JPDC 2009, for the ring.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How fast workers exchange data.

    Attributes
    ----------
    latency_seconds : float
        Of a message, however short (alpha).
    bytes_per_second : float
        Speed of long ones (1 / beta).
    """

    latency_seconds: float
    bytes_per_second: float

    def message(self, num_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def all_gather(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds to have ``num_bytes`` on each worker, of which each has had its part; a ring."""
        steps = num_workers - 1
        return steps * self.latency_seconds + steps / num_workers * num_bytes / self.bytes_per_second

    def reduce_scatter(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds to sum ``num_bytes`` of each worker, each of which gets its part; a ring."""
        return self.all_gather(num_bytes, num_workers)

    def all_reduce(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds to sum ``num_bytes`` of each worker on all: a reduce-scatter, then an all-gather."""
        return self.reduce_scatter(num_bytes, num_workers) + self.all_gather(num_bytes, num_workers)


def fit_message(short: tuple[float, float], long: tuple[float, float]) -> Link:
    """Return the link on which a short and a long message take what was measured.

    Parameters
    ----------
    short, long : tuple of float
        Bytes and seconds.
    """
    (few, quick), (many, slow) = short, long
    seconds_per_byte = max((slow - quick) / (many - few), 1e-15)
    return Link(max(quick - few * seconds_per_byte, 0.0), 1 / seconds_per_byte)


def fit_all_reduce(short: tuple[float, float], long: tuple[float, float], num_workers: int) -> Link:
    """Return the link on which the ring all-reduces of two sizes take what was measured.

    Parameters
    ----------
    short, long : tuple of float
        Bytes and seconds of one all-reduce.
    num_workers : int
        How many took part, at least 2.
    """
    whole = fit_message(short, long)
    steps = 2 * (num_workers - 1)
    return Link(whole.latency_seconds / steps, whole.bytes_per_second * steps / num_workers)


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the part of a pipeline's time in which a stage is idle, (p - 1) / (m + p - 1).

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019;
    the same for 1F1B, Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021.

    Examples
    --------
    >>> bubble(4, 4)
    0.42857142857142855
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
