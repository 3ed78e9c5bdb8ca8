"""Workers that other processes start and that join a running cluster by its port.

    WorkerNode (node) ── Caller ══ CurveZMQ ══ Listener ── Desk ──> Membership
                  └── engine, a process of its own, which ends with the WorkerNode's

`secret` is what both sides know, `channel` how they talk, `desk` the master's side, `node` the worker's.
Whether a worker may join is decided in `openclaw_nb.plan.joining`.
"""
