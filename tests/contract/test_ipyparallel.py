"""What this package uses of ipyparallel and ipykernel beyond their documented API has the expected shape.

Nothing is started. When one of these fails after an upgrade, `openclaw_nb/cluster/ipp.py`,
`openclaw_nb/engine/kernel.py` and `openclaw_nb/engine/process.py` are the places to adapt; the streams'
descriptor is used by `openclaw_nb/engine/outbox.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from ipyparallel import Client, Cluster
from ipyparallel.cluster import launcher
from ipyparallel.controller import app as controller_app
from ipyparallel.controller.app import IPController
from ipyparallel.controller.heartmonitor import HeartMonitor
from ipyparallel.engine import app as engine_app
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel

from openclaw_nb.engine import process
from openclaw_nb.engine.kernel import WorkerKernel


def arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ------------------------------------------------------------------------------------ the client


def test_send_takes_a_socket_a_type_content_and_an_identity() -> None:
    assert arguments(Client._send)[:3] == ["self", "socket", "msg_type"]
    assert {"content", "ident", "metadata"} <= set(arguments(Client._send))
    # The future of a control request is returned only if a reply is expected of that type of message.
    assert "return futures[0]" in inspect.getsource(Client._send)


def test_send_execute_request_takes_metadata() -> None:
    assert arguments(Client.send_execute_request)[:3] == ["self", "socket", "code"]
    assert {"silent", "metadata", "ident"} <= set(arguments(Client.send_execute_request))


@pytest.mark.parametrize("stream", ["_mux_stream", "_control_stream"])
def test_the_client_has_a_stream_for_each_channel(stream: str) -> None:
    assert f"self.{stream} = ZMQStream(" in inspect.getsource(Client._setup_streams)


@pytest.mark.parametrize("attribute", ["_registration_callbacks", "_engines", "_config", "_context"])
def test_the_client_has_the_attribute(attribute: str) -> None:
    assert attribute in inspect.getsource(Client)
    assert Client.class_traits().get(attribute) is not None or hasattr(Client, attribute)


def test_registrations_are_told_with_event_and_id() -> None:
    source = inspect.getsource(Client)
    assert "for callback in self._registration_callbacks" in source
    for handler in (Client._register_engine, Client._unregister_engine):
        assert "callback" in inspect.getsource(handler)
        assert "'id'" in inspect.getsource(handler)
    notices = inspect.getsource(Client._unregister_engine) + inspect.getsource(Client._register_engine)
    assert "'event': 'register'" in notices.replace('"', "'")
    assert "'event': 'unregister'" in notices.replace('"', "'")


def test_the_client_keeps_its_keys_for_further_sockets() -> None:
    for name in ("curve_serverkey", "curve_secretkey", "curve_publickey"):
        assert name in Client.class_trait_names()


def test_the_connection_file_names_what_a_further_session_needs() -> None:
    source = inspect.getsource(Client.__init__)
    for key in ("key", "signature_scheme", "pack", "unpack"):
        assert f"cfg['{key}']" in source or f'cfg["{key}"]' in source


# ---------------------------------------------------------------------------------- the processes


def test_the_cluster_starts_its_processes_as_we_ask() -> None:
    expected = {"profile_dir", "cluster_id", "controller_ip", "controller_args", "shutdown_atexit", "delay"}
    assert expected | {"send_engines_connection_env", "engines", "log_level"} <= set(
        Cluster.class_trait_names()
    )
    assert {"n", "engine_set_id"} <= set(arguments(Cluster.start_engines))
    for method in (Cluster.start_controller, Cluster.start_engines):
        assert inspect.signature(method).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    for name in ("start_controller", "start_engines", "connect_client"):  # "_sync" is put behind them
        assert inspect.iscoroutinefunction(getattr(Cluster, name))
    assert '"_sync"' in inspect.getsource(Cluster.__getattr__)


def test_an_engine_set_takes_command_arguments_and_environment() -> None:
    traits = set(launcher.LocalEngineSetLauncher.class_trait_names())
    assert {"engine_cmd", "engine_args", "environment", "launchers"} <= traits
    assert "environment" in launcher.LocalControllerLauncher.class_trait_names()
    assert "self.process" in inspect.getsource(launcher.LocalProcessLauncher)


def test_the_controller_takes_our_arguments() -> None:
    assert "enable_curve" in IPController.class_trait_names()
    assert {"period", "max_heartmonitor_misses"} <= set(HeartMonitor.class_trait_names())
    assert "nodb" in controller_app.flags


def test_an_engine_takes_its_number_and_waits_for_its_file() -> None:
    assert {"id", "wait_for_url_file"} <= set(IPEngine.class_trait_names())


# -------------------------------------------------------------------------------------- the engine


def test_the_engine_looks_its_kernel_up_by_a_name_that_we_set() -> None:
    assert engine_app.Kernel is IPythonParallelKernel
    assert "Kernel.instance(" in inspect.getsource(IPEngine)
    assert issubclass(process.WorkerApp, IPEngine)


def test_the_kernel_has_a_list_of_control_messages_and_looks_handlers_up_by_name() -> None:
    assert isinstance(IPythonParallelKernel.control_msg_types, list)
    assert set(IPythonParallelKernel.control_msg_types) < set(WorkerKernel.control_msg_types)
    assert "for msg_type in self.control_msg_types" in inspect.getsource(Kernel.__init__)
    assert arguments(WorkerKernel.openclaw_request) == ["self", "stream", "ident", "parent"]
    assert arguments(Kernel.execute_request) == ["self", "stream", "ident", "parent"]


def test_the_kernel_hands_metadata_to_do_execute() -> None:
    assert "cell_meta" in arguments(IPythonKernel.do_execute)
    assert arguments(WorkerKernel.do_execute) == arguments(IPythonKernel.do_execute)
    source = inspect.getsource(Kernel.execute_request)
    assert 'cell_meta = parent.get("metadata"' in source
    assert 'do_execute_args["cell_meta"] = cell_meta' in source


def test_the_kernel_asks_for_subshells_where_we_answer() -> None:
    assert "_supports_kernel_subshells" in vars(Kernel)
    assert "shell_channel_thread" in Kernel.class_trait_names()


def test_the_streams_keep_the_descriptor_of_the_engines_log() -> None:
    assert "_original_stdstream_copy" in inspect.getsource(OutStream)
    assert "engine_id" in IPythonParallelKernel.class_trait_names()
