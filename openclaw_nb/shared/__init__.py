"""Named tensors in memory that the notebook and the workers of one host have mapped: published once, copied never."""

from openclaw_nb.shared.memory import SharedMemory, attach_shared_memory

__all__ = ["SharedMemory", "attach_shared_memory"]
