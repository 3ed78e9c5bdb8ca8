"""What is said before anything starts: words that do not go together, and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.launch import BACKENDS, check_devices, check_installed, check_words
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.mpiexec import find_mpiexec, mpi_environment
from openclaw_nb.core.errors import UnknownNameError, UsageError
from openclaw_nb.session import OpenClawCluster


@pytest.mark.parametrize("backend", ["slurm", "", "MPI"])
def test_an_unknown_backend_is_told_with_those_there_are(backend: str) -> None:
    with pytest.raises(UnknownNameError, match=r"There is no backend .* Allowed: cuda, local, mpi, thread\."):
        MasterNode(backend=backend)


def test_mpi_communication_needs_the_mpi_backend() -> None:
    for start in (
        lambda: MasterNode(communication="mpi"),
        lambda: OpenClawCluster(workers=1, communication="mpi").start(),
    ):
        with pytest.raises(UsageError, match="--backend mpi --communication mpi"):
            start()
    for backend in BACKENDS:
        check_words(backend, "gloo")
    check_words("mpi", "mpi")


def test_mpi_communication_needs_the_hosts_memory() -> None:
    gpu, core = Device("GPU-1", "gpu", 1, "a card"), Device("CPU-0", "cpu", 0, "a core")
    with pytest.raises(UsageError, match=r"GPU-1.*auto takes nccl"):
        check_devices("mpi", [core, gpu])
    check_devices("mpi", [core])
    check_devices("auto", [gpu])


def test_a_missing_mpi4py_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as Python itself marks what cannot be imported
    with pytest.raises(UsageError, match=r"package mpi4py.*pip install 'openclaw-nb\[mpi\]'"):
        check_installed("mpi", "mpi")
    check_installed("mpi", "auto")


def program(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "mpiexec"
    path.touch(mode=0o755)
    return path


def test_mpiexec_is_taken_from_beside_python_then_from_the_path(tmp_path: Path) -> None:
    first, second = program(tmp_path / "environment"), program(tmp_path / "system")
    interpreter = str(first.parent / "python")
    assert find_mpiexec(interpreter, str(second.parent)) == str(first)
    first.unlink()
    assert find_mpiexec(interpreter, str(second.parent)) == str(second)
    second.chmod(0o644)
    with pytest.raises(UsageError, match=r"program mpiexec.*pip install 'openclaw-nb\[mpi\]'"):
        find_mpiexec(interpreter, str(second.parent))


def test_what_a_person_has_set_for_mpi_stays() -> None:
    names = mpi_environment("/d", "/m", as_root=False, given={})
    assert names["PRTE_MCA_prte_tmpdir_base"] == "/d"
    assert not any("ROOT" in name for name in names)
    ours = mpi_environment("/d", "/m", as_root=True, given={"OMPI_MCA_btl": "self,tcp"})
    assert "OMPI_MCA_btl" not in ours
    assert ours["OMPI_ALLOW_RUN_AS_ROOT"] == ours["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
