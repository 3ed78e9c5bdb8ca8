"""Checkpoints of a strategy cell: the state of training on disk, all or nothing.

between two batches   checkpointer ── is one due? (plan/checkpoints)
│ state      parameters, buffers, optimizers, schedulers, scalers, random numbers
│ tensors    copied into memory of our own: only this holds training up
on a thread  ── writer ── store ── files under a temporary name, synced, renamed
later                 catalog    the newest valid one; damaged ones named   ──> state.restore, load
"""
