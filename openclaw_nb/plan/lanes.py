"""Which device has which stages: neighbouring parts on one device make one stage, devices come in turn.

Pure: names in, groups of names out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from openclaw_nb.core.errors import RefusedError, UsageError


@dataclass(frozen=True)
class Lanes:
    """Stages, each a list of parts, and the device of each lane; stage s is in lane s mod p."""

    stages: tuple[tuple[str, ...], ...]
    devices: tuple[str, ...]

    @property
    def num_chunks(self) -> int:
        """Stages a device."""
        return len(self.stages) // len(self.devices)


def on_devices(parts: Sequence[str], devices: Sequence[str]) -> Lanes:
    """Place each part on its device.

    Raises
    ------
    UsageError
        When there is not one device for each part.
    RefusedError
        When devices do not come again in the same order.

    Examples
    --------
    >>> on_devices(["embed", "block", "head"], ["CPU-0", "CPU-0", "CPU-1"]).stages
    (('embed', 'block'), ('head',))
    """
    if len(parts) != len(devices):
        raise UsageError(
            f"stage_devices names {len(devices)} devices for {len(parts)} stages: one for each is needed."
        )
    runs = [
        (device, tuple(part for part, _ in run))
        for device, run in groupby(zip(parts, devices, strict=True), key=lambda pair: pair[1])
    ]
    order = list(dict.fromkeys(device for device, _ in runs))
    wanted = [order[number % len(order)] for number in range(len(runs))]
    if len(runs) % len(order) or [device for device, _ in runs] != wanted:
        raise RefusedError(
            f"The devices come in the order {', '.join(device for device, _ in runs)}. Each has neighbouring stages, "
            f"or all come again in the same order, as for 'interleaved': {', '.join(order)}, {', '.join(order)}."
        )
    return Lanes(tuple(names for _, names in runs), tuple(order))


def in_turn(parts: Sequence[str], devices: Sequence[str], schedule: str) -> Lanes:
    """Spread parts over devices: as many neighbours to each, or in turn for ``interleaved``.

    With more devices than there are stages for, the first ones get stages.

    Raises
    ------
    RefusedError
        When ``interleaved`` does not have as many stages on each device.
    """
    if schedule == "interleaved":
        most = min(len(devices), len(parts) // 2)
        if most < min(2, len(devices)) or len(parts) % most:
            raise RefusedError(
                f"'interleaved' needs as many stages, two or more, on each device: {len(parts)} stages cannot be "
                f"spread over {len(devices)} so. Name another number of parts, or give stage_devices."
            )
        return Lanes(tuple((part,) for part in parts), tuple(devices[:most]))
    used = devices[: len(parts)]
    bounds = [round(number * len(parts) / len(used)) for number in range(len(used) + 1)]
    stages = tuple(tuple(parts[low:high]) for low, high in pairwise(bounds))
    return Lanes(stages, tuple(used))
