"""What cannot be true at once in one configuration.

Pure: a configuration in, problems out.
"""

from __future__ import annotations

from collections.abc import Iterator

from openclaw_nb.config.kinds import shown
from openclaw_nb.config.schema import BESIDE, DEGREES, SAME, fields_of
from openclaw_nb.config.settings import Configuration
from openclaw_nb.core.errors import UsageError
from openclaw_nb.strategies import STRATEGIES

_NOT_FIELDS = ("name",)
# What a degree above 1 needs of the word in `parallel.strategy`, where the block says hybrid_parallel.
_AXIS_OF = {
    "data_parallel": "data_parallel_degree",
    "model_parallel": "model_parallel_degree",
    "pipeline": "pipeline_degree",
    "tensor_parallel": "tensor_parallel_degree",
}


def contradictions(configuration: Configuration) -> list[str]:
    """Return what in a configuration cannot be, with where it stands and what to do."""
    return [
        *_same_things(configuration),
        *_strategies(configuration),
        *_fields(configuration),
        *_threads(configuration),
        *_backends(configuration),
        *_workers(configuration),
    ]


def _same_things(found: Configuration) -> Iterator[str]:
    for one, other in SAME:
        if one in found.settings and other in found.settings and found.given(one) != found.given(other):
            yield (
                f"{found.place(other)}: {shown(found.given(other))} contradicts {shown(found.given(one))} of {one} "
                f"({found.where(one)}). Leave one of them out."
            )


def _strategies(found: Configuration) -> Iterator[str]:
    block, word = found.given("strategy.name"), found.given("parallel.strategy")
    if block is None or word is None or block == word:
        return
    # Degrees of 1 along all other axes make a hybrid what the word says.
    others = [degree for degree in DEGREES if degree != _AXIS_OF.get(word)]
    is_alike = all((found.given(f"strategy.{degree}") or 1) == 1 for degree in others)
    if block == "hybrid_parallel" and word in _AXIS_OF and is_alike:
        return
    yield (
        f"{found.place('parallel.strategy')}: {word!r} contradicts {block!r} of strategy "
        f"({found.where('strategy.name')}). Leave one of them out."
    )


def _fields(found: Configuration) -> Iterator[str]:
    """Check that the strategy takes what stands in its block, and can be made of it."""
    setting = found.settings.get("strategy.name") or found.settings.get("parallel.strategy")
    block = {path.partition(".")[2]: path for path in found.settings if path.startswith("strategy.")}
    names = [name for name in block if name not in _NOT_FIELDS]
    if setting is None:
        for name in names:
            if name not in BESIDE:
                yield f"{found.place(block[name])}: name: is missing in strategy, such as name: data_parallel."
        return
    takes = fields_of(setting.value)
    alien = [name for name in names if name not in takes]
    for name in alien:
        takers = ", ".join(each for each in STRATEGIES if name in fields_of(each))
        yield f"{found.place(block[name])}: {setting.value} does not take it. Taken by: {takers}."
    if alien:
        return
    try:
        STRATEGIES[setting.value](**{name: found.given(block[name]) for name in names})
    except UsageError as error:
        yield f"{setting.where}, {setting.written}: {error}"


def _threads(found: Configuration) -> Iterator[str]:
    if found.given("parallel.hybrid") is False and (found.given("parallel.omp_threads") or 1) > 1:
        yield (
            f"{found.place('parallel.omp_threads')}: {found.given('parallel.omp_threads')} threads a worker contradict "
            f"hybrid: false ({found.where('parallel.hybrid')}). Say hybrid: true, or leave omp_threads out."
        )


def _backends(found: Configuration) -> Iterator[str]:
    backend, communication = found.given("parallel.backend"), found.given("parallel.communication")
    if communication == "mpi" and backend not in (None, "mpi"):
        yield (
            f"{found.place('parallel.communication')}: mpi contradicts backend: {backend} "
            f"({found.where('parallel.backend')}): MPI's workers are started by mpiexec. Say backend: mpi."
        )
    if communication == "nccl" and backend == "thread":
        yield (
            f"{found.place('parallel.communication')}: nccl contradicts backend: thread "
            f"({found.where('parallel.backend')}), whose workers are on cores. Say communication: gloo or auto."
        )


def _workers(found: Configuration) -> Iterator[str]:
    if found.value("parallel.enabled") is False:
        return
    devices = [worker.device_id for worker in found.workers]
    count = found.given("parallel.workers")
    if devices and count is not None and count < len(devices):
        yield (
            f"{found.place('parallel.workers')}: {count} contradicts the {len(devices)} entries of workers "
            f"({found.workers[0].where}). Leave it out, or say at least {len(devices)}."
        )
    chosen = found.given("strategy.devices") or ()
    if not devices and count is not None and chosen and count < len(chosen):
        yield (
            f"{found.place('parallel.workers')}: {count} contradicts the {len(chosen)} devices of the strategy "
            f"({found.where('strategy.devices')}). Leave it out, or say at least {len(chosen)}."
        )
    if devices and (count is None or count == len(devices)):
        for device in (device for device in chosen if device not in devices):
            yield (
                f"{found.place('strategy.devices')}: {device} is none of the devices of workers: {', '.join(devices)}."
            )
    for index, worker in enumerate(found.workers):
        if worker.device_id in devices[:index] and _same_host(found, index):
            yield f"{worker.where}, workers[{index}].device_id: {worker.device_id} stands there twice on one host."


def _same_host(found: Configuration, index: int) -> bool:
    worker = found.workers[index]
    return any(w.device_id == worker.device_id and w.ip == worker.ip for w in found.workers[:index])
