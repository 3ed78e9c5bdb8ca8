"""How long it takes from nothing to two workers with torch in a process group.

Each sample is a fresh Python process that imports the library, starts two workers and forms a gloo group; the
clock starts before the import. Ours is what ``%openclaw start -n 2`` calls. The peer is ipyparallel as it comes:
``Cluster(n=2).start_and_connect_sync()``, then ``import torch`` and ``init_process_group`` on its engines. Both
prove the group with an all-reduce after the clock has stopped.
"""

from __future__ import annotations

import json
import time
from functools import partial

from _common import (
    NUM_WORKERS,
    Row,
    form_group_on,
    quiet,
    report,
    run_side,
    side_asked_for,
    start_ipyparallel,
    take_turns,
)

_ROUNDS = 7
_PROOF = "import torch; _t = torch.tensor([rank + 1.0]); dist.all_reduce(_t); assert _t.item() == 3.0"


def ours() -> dict[str, float]:
    begin = time.perf_counter()
    from openclaw_nb import OpenClawCluster

    cluster = OpenClawCluster(workers=NUM_WORKERS, oversubscribe=True).start()
    seconds = time.perf_counter() - begin
    result = cluster.run_cell(_PROOF).wait(60)
    begin = time.perf_counter()
    cluster.stop()
    if result is None or not result.ok:
        raise RuntimeError(f"The group does not work: {result}")
    return {"start": seconds, "stop": time.perf_counter() - begin}


def ipyparallel() -> dict[str, float]:
    begin = time.perf_counter()
    cluster, client = start_ipyparallel()
    form_group_on(client)
    seconds = time.perf_counter() - begin
    client[:].execute("import torch.distributed as dist; rank = dist.get_rank(); " + _PROOF, block=True)
    begin = time.perf_counter()
    client.close()
    cluster.stop_cluster_sync()
    return {"start": seconds, "stop": time.perf_counter() - begin}


_SIDES = {"ours": ours, "ipyparallel": ipyparallel}


def main() -> None:
    if (side := side_asked_for()) is not None:
        with quiet():
            found = _SIDES[side]()
        print(json.dumps(found))
        return
    samples = take_turns({name: partial(run_side, __file__, name) for name in _SIDES}, _ROUNDS)
    rows = [
        Row(
            what,
            "s",
            [sample[key] for sample in samples["ours"]],
            [sample[key] for sample in samples["ipyparallel"]],
            "ipyparallel",
            reach,
        )
        for what, key, reach in (
            ("start 2 workers, group formed", "start", "<= 0.5x"),
            ("stop them", "stop", ""),
        )
    ]
    report("start", rows)


if __name__ == "__main__":
    main()
