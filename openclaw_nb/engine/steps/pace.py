"""What a worker is told of its speed: the one that it counts with in a cell, and by how much it is to slow itself down.

Set on the control thread, also while the cell runs; read between two steps. Knows no ranks and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from openclaw_nb.protocol.messages import SetPace


@dataclass
class Pace:
    """The pace of one worker in one cell.

    Attributes
    ----------
    speed : float
        Samples per second that it counts with when batches are shared out; 0 when none was told.
    is_continuous : bool
        Whether it counts with what it measures by itself.
    slowdown : float
        How many times as long its work is to take.
    """

    speed: float = 0.0
    is_continuous: bool = False
    slowdown: float = 1.0

    def set(self, command: SetPace | None, worker: int) -> None:
        """Take over what a command says of this worker."""
        if command is not None:
            self.speed = command.speeds.get(str(worker), 0.0)
            self.slowdown = command.slowdowns.get(str(worker), 1.0)
            self.is_continuous = command.continuous
