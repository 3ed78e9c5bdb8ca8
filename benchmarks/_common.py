"""What the benchmarks share: taking turns, child processes, medians and ratios, the table and the JSON file.

    take_turns ──> samples of ours and of the peer, A B A B … ──> Row ──> report ──> table, build/benchmarks/*.json

Knows numbers and processes; does not know what is measured. Numbers are reported, never asserted.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "benchmarks"
NUM_WORKERS = 2
_UNSTEADY = 0.15

T = TypeVar("T")


# ------------------------------------------------------------------------------------------- measuring


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure each side once a round, always in the same order, so that what disturbs one disturbs all."""
    samples: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            samples[name].append(measure())
    return samples


def environment() -> dict[str, str]:
    """Return the environment of every process that is measured: one thread each, settings of nobody."""
    folder = OUTPUT / "ipython"
    folder.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}


def use_environment() -> None:
    """Give this process, and those that it starts, the environment of measured processes."""
    os.environ.update(environment())


def run_side(script: str, side: str, timeout_seconds: float = 180.0) -> dict[str, float]:
    """Run ``script --side SIDE`` in a fresh Python process and return the JSON of its last line.

    Raises
    ------
    RuntimeError
        When it fails or does not end in time.
    """
    process = start_side(script, side)
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{script} --side {side} did not end within {timeout_seconds:.0f} s.") from None
    finally:
        end_tree(process)
    if process.returncode:
        raise RuntimeError(f"{script} --side {side} failed:\n{errors[-4000:]}")
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def start_side(script: str, side: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``script --side SIDE`` in a fresh Python process, with pipes for what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, script, "--side", side], env=environment(), text=True, **pipes)


def end_tree(process: subprocess.Popen[str]) -> None:
    """End a process that was started here and all of its descendants."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        members = [*parent.children(recursive=True), parent]
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(members, timeout=5)
    process.wait()


def side_asked_for() -> str | None:
    """Return the side that this process is to run, when it is a child that `start_side` started."""
    return sys.argv[sys.argv.index("--side") + 1] if "--side" in sys.argv else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what libraries print on stdout to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


# ---------------------------------------------------------------------------------- the notebook's side


def notebook_shell() -> Any:
    """Return a shell such as a notebook's kernel has, with nothing loaded."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell.instance(config=config, colors="nocolor")


def start_ours(shell: Any, num_workers: int = NUM_WORKERS, options: str = "") -> None:
    """Load the extension and start workers, as a person does."""
    shell.run_line_magic("load_ext", "openclaw_nb")
    shell.run_line_magic("openclaw", f"start -n {num_workers} {options}")


def start_ipyparallel() -> tuple[Any, Any]:
    """Start two ipyparallel engines with its defaults; return the cluster and the client."""
    import ipyparallel

    cluster = ipyparallel.Cluster(n=NUM_WORKERS)
    return cluster, cluster.start_and_connect_sync()


def activate_px(client: Any) -> None:
    """Make ``%%px`` run on all engines and wait for them."""
    view = client[:]
    view.block = True
    view.activate()


def form_group_on(client: Any) -> None:
    """Form a gloo group on the engines, as ipyparallel's users do by hand."""
    port = free_port()
    asked = [client[i].apply_async(_join, rank, NUM_WORKERS, port) for rank, i in enumerate(client.ids)]
    for answer in asked:
        answer.get(timeout=120)


def _join(rank: int, world_size: int, port: int) -> None:
    import os

    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo", init_method="env://")


# Shipped by value: the engines do not have this file.
_join.__module__ = "__main__"


def free_port() -> int:
    """Return a TCP port that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True)
class Row:
    """One line of a report: samples of ours, and of the peer at the same turns.

    ``reach`` is the target as it is printed; ``judged`` says what it is about: the ratio, or our value.
    """

    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    peer_name: str = ""
    reach: str = ""
    judged: str = "ratio"
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours through the peer's, turn by turn."""
        return [mine / theirs for mine, theirs in zip(self.ours, self.peer, strict=False) if theirs]

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None when there is none, or nothing to compare with."""
        judged = self.ratios if self.judged == "ratio" else list(self.ours)
        if not self.reach or not judged:
            return None
        relation, number = self.reach.split()[:2]
        limit, value = float(number.rstrip("x")), statistics.median(judged)
        return value <= limit if relation == "<=" else value >= limit

    @property
    def unsteady(self) -> bool:
        """Whether the first and the second half of our samples differ so much that the row says little."""
        half = len(self.ours) // 2
        if half < 2:
            return False
        early, late = statistics.median(self.ours[:half]), statistics.median(self.ours[half:])
        return abs(early - late) > _UNSTEADY * max(early, late)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def machine() -> dict[str, Any]:
    """Describe this machine and what is measured with."""
    packages = ("openclaw-nb", "ipyparallel", "ipykernel", "torch")
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def report(name: str, rows: Sequence[Row], **extra: Any) -> None:
    """Print the table of a benchmark and write it as ``build/benchmarks/<name>.json``."""
    place = machine()
    print(_machine_line(place))
    cells = [("what", "ours", "peer", "", "ours/peer", "reach", ""), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    content = {"name": name, "machine": place, "rows": [_as_json(row) for row in rows], **extra}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"-> {path.relative_to(ROOT)}")


def _machine_line(place: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    return (
        f"{place['at']}, {place['cores']} cores, {place['system']}, Python {place['python']}, {versions}; "
        f"load average {' '.join(map(str, place['load_average']))}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "reached", False: "missed"}[row.met]
    if row.unsteady:
        verdict += " (unsteady)"
    shown = row.note if not row.peer else _spread(row.peer, row.unit)
    return (
        row.what,
        _spread(row.ours, row.unit),
        shown,
        row.peer_name,
        _spread(row.ratios, "x"),
        row.reach,
        verdict.strip(),
    )


def _spread(values: Sequence[float], unit: str) -> str:
    """Return the median and, in brackets, the middle half."""
    if not values:
        return ""
    low, high = quartiles(values)
    middle = f"{statistics.median(values):.3g}"
    return f"{middle} {unit} [{low:.3g} {high:.3g}]" if len(values) > 1 else f"{middle} {unit}"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _as_json(row: Row) -> dict[str, Any]:
    ratios = row.ratios
    return {
        "what": row.what,
        "unit": row.unit,
        "ours": list(row.ours),
        "peer": list(row.peer),
        "peer_name": row.peer_name,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_quartiles": quartiles(ratios) if ratios else None,
        "reach": row.reach,
        "met": row.met,
        "unsteady": row.unsteady,
        "note": row.note,
    }
