"""Every key of the configuration file: what it may hold, what it sets, and on which backend.

One table. What a key sets on running workers, and how that is seen, is `effects`; what is not built yet is
`unbuilt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from openclaw_nb.cluster.launch import BACKENDS, COMMUNICATIONS
from openclaw_nb.config.kinds import (
    Count,
    DeviceId,
    Either,
    Flag,
    Groups,
    Kind,
    Number,
    Size,
    Table,
    Text,
    Word,
    Words,
    capability,
    device_id,
)
from openclaw_nb.config.unbuilt import UNBUILT_BACKENDS
from openclaw_nb.strategies import ALIASES, STRATEGIES
from openclaw_nb.strategies.data_parallel import MODES
from openclaw_nb.strategies.pipeline import SCHEDULES
from openclaw_nb.strategies.precision import PRECISIONS

_STRATEGY = Word(tuple(STRATEGIES), ALIASES)
_DEVICES = Words("devices, such as [GPU-0, GPU-1]", device_id)
_LEVEL = Word(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), {"WARN": "WARNING"})
CAPABILITIES = (
    "capabilities: fp32, fp16, bf16, nccl, gloo, mpi, cuda, cuda with a version (cuda12), or a size (8GB)"
)
_DAY = 86_400.0
_SMALLEST_BUFFER = 1024


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes
    ----------
    kind : Kind
        What it may hold.
    sets : str
        What it sets, for people.
    default : object
        What holds in a cluster that was started from a configuration which does not name it; None for what would hold
        without one.
    example : object
        What `init` writes, as a comment.
    elsewhere : mapping of str to str
        Backends on which it sets nothing, with the reason; ``"cpu"`` stands for workers on cores.
    """

    kind: Kind
    sets: str
    default: Any = None
    example: Any = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)


_NO_GPU = {"cpu": "a core has no memory of its own, and the workers are on cores"}
_NO_MPI = "it is a setting of MPI; workers that were started otherwise sum in shared memory anyway (auto)"

KEYS: dict[str, Key] = {
    # --------------------------------------------------------------------------------------------- the master
    "master.host": Key(
        Text("an address of this host"),
        "the address on which the controller and the workers' stores listen",
        example="127.0.0.1",
    ),
    "master.port": Key(
        Count(0, 65535), "the port on which workers of other processes and hosts join", example=50051
    ),
    "master.log_level": Key(
        _LEVEL,
        "how much the controller writes into its log, and the notebook's logger openclaw_nb lets through",
        example="INFO",
    ),
    "master.metrics_port": Key(
        Count(0, 65535),
        "the port, on loopback, at which metrics are served to Prometheus; 0 takes one that is free",
        example=9464,
    ),
    # -------------------------------------------------------------------------------------------- the strategy
    "strategy.name": Key(
        _STRATEGY,
        "the strategy of training cells that name none",
        example="data_parallel",
    ),
    "strategy.devices": Key(
        _DEVICES, "the devices whose workers take part; with no workers named, where they are started"
    ),
    "strategy.sync_frequency": Key(
        Count(), "the default of --sync-frequency: synchronise every so many batches", example=1
    ),
    "strategy.data_parallel_degree": Key(Count(), "the default of --dp: how many parts a batch has"),
    "strategy.model_parallel_degree": Key(Count(), "into how many parts the model is cut, layer by layer"),
    "strategy.pipeline_degree": Key(Count(), "the default of --pp: into how many stages the model is cut"),
    "strategy.tensor_parallel_degree": Key(
        Count(), "the default of --tp: among how many workers a layer is shared out"
    ),
    "strategy.plan": Key(
        Table("a block of layers and how they are shared out, such as {net.0: column}"),
        "the default of --tp-plan",
    ),
    "strategy.model_layers": Key(
        Words("names of layers in order, such as [embed, head]"), "the layers, in order"
    ),
    "strategy.device_mapping": Key(
        Table("a block of layers and their devices, such as {embed: GPU-0}"), "the device of each layer"
    ),
    "strategy.stages": Key(
        Groups("a list of lists of layers, such as [[embed], [head]]"), "the layers of each worker"
    ),
    "strategy.microbatches": Key(
        Count(), "the default of --microbatches: into how many parts a batch is cut"
    ),
    "strategy.schedule": Key(Word(SCHEDULES), "the default of --schedule"),
    "strategy.mode": Key(Word(MODES), "the default of --mode: what is synchronised"),
    "strategy.accumulate": Key(Count(), "the default of --accumulate: how many batches make one step"),
    "strategy.precision": Key(Word(PRECISIONS), "the default of --precision"),
    "strategy.activation_checkpointing": Key(
        Either((Flag(), Words("words for layers, such as [encoder]"))),
        "the default of --activation-checkpointing",
    ),
    "strategy.shard_layers": Key(Words("names of layers, such as [Block]"), "the default of --shard-layers"),
    "strategy.reshard_after_forward": Key(Flag(), "the opposite of --no-reshard-after-forward"),
    "strategy.keep": Key(Count(), "the default of --keep: how many checkpoints are kept"),
    "strategy.fusion_buffer_size": Key(Size(_SMALLEST_BUFFER), "as parallel.fusion_buffer_size"),
    "strategy.memory_pinning": Key(Flag(), "as parallel.memory_pinning"),
    # ----------------------------------------------------------------------------------------- the checkpoints
    "checkpoint.dir": Key(
        Text("a directory"),
        "the default of --checkpoint: where cells write checkpoints, seen from the notebook's directory",
        example="./checkpoints",
    ),
    "checkpoint.interval": Key(
        Number(30 * _DAY, " of seconds"), "the default of --checkpoint-every, in seconds", example=300
    ),
    # ----------------------------------------------------------------------------------- how work is parallel
    "parallel.enabled": Key(
        Flag(), "false: one worker, and no strategy for cells that name none", default=True, example=True
    ),
    "parallel.backend": Key(
        Word((*BACKENDS, *UNBUILT_BACKENDS)), "how workers are started", default="local", example="local"
    ),
    "parallel.workers": Key(Count(), "how many workers are started", example=2),
    "parallel.strategy": Key(_STRATEGY, "as strategy.name", example="data"),
    "parallel.communication": Key(
        Word(COMMUNICATIONS),
        "what the workers communicate with; nccl falls back to gloo where it cannot work",
        default="auto",
        example="auto",
    ),
    "parallel.task_chunk_size": Key(Count(), "how many items of `map` a worker gets at once", example=100),
    "parallel.fusion_buffer_size": Key(
        Size(_SMALLEST_BUFFER),
        "the default of --fusion-buffer-size: bytes of gradients that are reduced at once",
        default=25 * 1024**2,
        example="25MB",
    ),
    "parallel.mpi_shared_memory": Key(
        Flag(),
        "OMPI_MCA_btl: whether Open MPI sends by shared memory, or by its TCP, which listens on every interface",
        elsewhere=dict.fromkeys(("local", "thread", "cuda"), _NO_MPI),
        example=True,
    ),
    "parallel.hybrid": Key(
        Flag(),
        "workers × threads: lets omp_threads be given, and more than the cores be refused",
        example=True,
    ),
    "parallel.omp_threads": Key(
        Count(1, 4096), "OMP_NUM_THREADS of each worker, and so torch's threads", example=1
    ),
    "parallel.async_io": Key(
        Flag(),
        "true: loaders without worker processes get one, which loads ahead; false: batches are loaded when they are "
        "asked for, and training waits for checkpoints",
        example=True,
    ),
    "parallel.sync_interval": Key(
        Count(), "as strategy.sync_frequency, under every strategy that takes it", example=1
    ),
    "parallel.memory_pooling": Key(
        Flag(),
        "the default of --memory-pooling: a GPU's pool of memory grows in place",
        example=False,
        elsewhere=_NO_GPU,
    ),
    "parallel.gpu_memory_fraction": Key(
        Number(1.0),
        "the default of --gpu-memory-fraction: the part of its GPU's memory that a worker may take",
        default=0.7,
        example=0.7,
        elsewhere=_NO_GPU,
    ),
    "parallel.timeout": Key(
        Number(30 * _DAY, " of seconds"),
        "how many seconds ranks may wait together in a collective before all are released",
        default=30.0,
        example=30,
    ),
    "parallel.socket_buffer_size": Key(
        Size(_SMALLEST_BUFFER),
        "SO_SNDBUF and SO_RCVBUF of the sockets of gloo, as far as the kernel allows",
        example="1MB",
    ),
    "parallel.memory_pinning": Key(
        Flag(),
        "the opposite of --no-memory-pinning: whether loaders pin memory where they were made to",
        default=True,
        example=True,
    ),
    "parallel.rdma": Key(
        Flag(),
        "NCCL_IB_DISABLE: whether NCCL may use InfiniBand",
        example=True,
        elsewhere={"cpu": "gloo in PyTorch's wheels has TCP only, and workers on cores use gloo"},
    ),
    "parallel.log_level": Key(_LEVEL, "how much each worker writes into its log", example="INFO"),
    # ------------------------------------------------------------------------------------------ where to run
    "fallback": Key(Word(("cpu",)), "GPUs that are not there are replaced by cores", example="cpu"),
    "network_interface": Key(
        Text("a network interface, such as eth0"), "the interface that every socket binds"
    ),
}

WORKER_KEYS: dict[str, Key] = {
    "device_id": Key(DeviceId(), "the device of one worker", example="CPU-0"),
    "ip": Key(Text("an address"), "the host of the worker", example="127.0.0.1"),
    "capabilities": Key(
        Words(CAPABILITIES, capability),
        "what the worker may use; checked against what it has",
        example=["fp32", "gloo"],
    ),
}

BESIDE = {"devices": "strategy.devices", "sync_frequency": "strategy.sync_frequency"}
"""Keys of the top level that may stand beside ``strategy:`` when that is a word."""

SECTIONS = ("master", "workers", "strategy", "checkpoint", "parallel")

SAME: tuple[tuple[str, str], ...] = (
    ("parallel.sync_interval", "strategy.sync_frequency"),
    ("parallel.fusion_buffer_size", "strategy.fusion_buffer_size"),
    ("parallel.memory_pinning", "strategy.memory_pinning"),
)
"""Two keys for one thing: where both stand, they agree."""

DEGREES = ("data_parallel_degree", "model_parallel_degree", "pipeline_degree", "tensor_parallel_degree")


def keys_in(section: str) -> list[str]:
    """Return the names of a section's keys; of the top level for ``""``."""
    if section == "":
        return [*SECTIONS, *BESIDE, *(path for path in KEYS if "." not in path)]
    return [path.partition(".")[2] for path in KEYS if path.startswith(f"{section}.")]


def fields_of(strategy: str) -> set[str]:
    """Return what a strategy's description takes."""
    return {each.name for each in fields(STRATEGIES[strategy])}


def variable_names(path: str) -> tuple[str, ...]:
    """Return the variables of the environment that override a key, the exact one first.

    Examples
    --------
    >>> variable_names("parallel.omp_threads")
    ('OPENCLAW_PARALLEL_OMP_THREADS', 'OPENCLAW_OMP_THREADS')
    """
    section, _, name = path.rpartition(".")
    exact = f"OPENCLAW_{path.replace('.', '_').upper()}"
    if path == "strategy.name":
        return (exact, "OPENCLAW_STRATEGY")
    if path in BESIDE.values():
        return (exact, f"OPENCLAW_{name.upper()}")
    short = section == "parallel" and path != "parallel.strategy"
    return (exact, f"OPENCLAW_{name.upper()}") if short else (exact,)
