"""A worker's variables as one pickle for another worker: aliases and shared memory kept, functions at home there.

    namespace ──> `pack`    one pickle of all names that can travel; those that cannot, with the reason
                     └────> `unpack` into the other namespace, which becomes that of the functions among them

Tensors go through ``torch.save``, which keeps what they share. Modules travel by name, classes and functions of the
notebook by value (cloudpickle). The pickle is in memory of the host that has no name (memfd): another process of the
same user reads it while the parcel is open, and nothing is left of it whatever happens.

Knows pickles; does not know cells or ranks.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from openclaw_nb.core.errors import OpenClawError

# What the shell itself keeps: histories of inputs and outputs.
_HISTORY = re.compile(r"_+|_i+|_i?\d+|_[dio]h|_exit_code")
_unpacked_into: ContextVar[dict[str, Any]] = ContextVar("unpacked_into")


@dataclass(frozen=True)
class Parcel:
    """What is sent.

    Attributes
    ----------
    path : str
        Where the pickle can be read as long as the parcel is open.
    left : dict of str to str
        Names that cannot travel, with their type and the reason.
    """

    path: str
    left: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Let go of the memory."""
        os.close(int(self.path.rpartition("/")[2]))


def pack(namespace: Mapping[str, Any], hidden: Mapping[str, Any], extra: Any = None) -> Parcel:
    """Pack the names of a namespace.

    Parameters
    ----------
    namespace : mapping
        A worker's variables.
    hidden : mapping
        Names that are the worker's own and stay.
    extra : object
        Travels in the same pickle, so that it shares objects with the variables.

    Raises
    ------
    Exception
        Whatever pickling ``extra`` raises.
    """
    names = {n: v for n, v in namespace.items() if n not in hidden and not _HISTORY.fullmatch(n)}
    try:
        return Parcel(_write((names, extra), namespace))
    except Exception:  # noqa: BLE001 - any object's own pickling may raise anything; looked into below
        left = _those_that_stay(names, namespace)
    kept = {name: value for name, value in names.items() if name not in left}
    return Parcel(_write((kept, extra), namespace), left)


def _those_that_stay(names: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, str]:
    left = {}
    for name, value in names.items():
        try:
            os.close(int(_write(value, namespace).rpartition("/")[2]))
        except Exception as error:  # noqa: BLE001 - told to the person
            reason = str(error).partition("\n")[0]
            left[name] = f"{type(value).__name__}: {reason}"
    return left


def unpack(path: str, namespace: dict[str, Any], hidden: Mapping[str, Any]) -> Any:
    """Take the names of a parcel into a namespace, but for the worker's own; return its ``extra``.

    Raises
    ------
    OpenClawError
        When what was given cannot be taken here.
    """
    own = {name: namespace[name] for name in hidden if name in namespace}
    token = _unpacked_into.set(namespace)
    try:
        names, extra = torch.load(path, weights_only=False)
    except Exception as error:
        raise OpenClawError(f"The variables could not be taken over: {error}") from error
    finally:
        _unpacked_into.reset(token)
    namespace.update(names)
    namespace.update(own)  # a function brings what it reads, the other worker's `rank` for one
    return extra


def _write(value: Any, namespace: Mapping[str, Any]) -> str:
    class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # untyped
        """Sends functions of the namespace to the namespace where they are unpacked."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.globals_ref[id(namespace)] = _Home()

    class Pickling:
        """What ``torch.save`` takes for a pickle module."""

    Pickling.Pickler = Pickler  # type: ignore[attr-defined]
    descriptor = os.memfd_create("openclaw-parcel", os.MFD_CLOEXEC)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    checks = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # it goes from memory to memory
    try:
        torch.save(value, path, pickle_module=Pickling, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        torch.serialization.set_crc32_options(checks)
    return path


class _Home:
    """Stands for the namespace in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _home, ()


def _home() -> dict[str, Any]:
    return _unpacked_into.get()
