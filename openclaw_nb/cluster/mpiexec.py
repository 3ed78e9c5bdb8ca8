"""What is needed to start workers by mpiexec: where it is, and what it is told.

Knows names of programs and of variables; starts nothing and imports no MPI.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping

from openclaw_nb.core.errors import UsageError

_INSTALL = "Install both mpiexec and mpi4py with: pip install 'openclaw-nb[mpi]'"


def find_mpiexec(interpreter: str = sys.executable, path: str | None = None) -> str:
    """Return the mpiexec to use: the one beside the interpreter, as pip installs it, else the first on the path.

    Parameters
    ----------
    interpreter : str
        The workers' Python.
    path : str, optional
        Folders to look in; those of ``PATH`` by default.

    Raises
    ------
    UsageError
        When there is none, with how to get it.
    """
    folders = os.environ.get("PATH", os.defpath) if path is None else path
    found = shutil.which("mpiexec", path=os.pathsep.join((os.path.dirname(interpreter), folders)))
    if found is None:
        raise UsageError(
            "The backend mpi needs the program mpiexec, which is neither beside this Python nor on the PATH. "
            f"{_INSTALL}; or use an MPI of the system; or leave --backend out: local workers need none of this."
        )
    return found


def require_mpi4py() -> None:
    """Raise a UsageError, with how to get it, when mpi4py is not installed; it is not imported."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "The communication mpi needs the package mpi4py, which is not installed in this Python. "
            f"{_INSTALL}; or leave --communication out."
        )


def mpi_environment(
    directory: str, memory: str, *, as_root: bool, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with which Open MPI runs as a part of a cluster on one host; other MPIs have other names.

    Parameters
    ----------
    directory : str
        Where its files go, so that they go with the cluster.
    memory : str
        The same, in shared memory.
    as_root : bool
        Whether root runs it, which it refuses unless it is told twice.
    given : mapping
        What the person has set: that stays.
    """
    wanted = {
        "PRTE_MCA_prte_tmpdir_base": directory,
        "OMPI_MCA_btl_sm_backing_directory": memory,
        # How many workers the cores bear is checked before, and each sizes its thread pool.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        # One host: no shell on another one, and no socket that others could reach.
        "PRTE_MCA_plm_ssh_agent": "false",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
    }
    if as_root:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in wanted.items() if name not in given}
