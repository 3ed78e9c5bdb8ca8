"""The command ``metrics``: where this user's notebooks and scripts serve metrics, and what to do with them."""

from __future__ import annotations

import argparse
import json
import urllib.request
from dataclasses import asdict
from typing import TYPE_CHECKING

from openclaw_nb.cli._options import add_json
from openclaw_nb.core.errors import ClusterError, NotStartedError, UsageError
from openclaw_nb.core.text import aligned

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands
    from openclaw_nb.metrics.publish import Published

_ANSWER_SECONDS = 10
_NONE = (
    "No process of this user serves metrics. In a notebook: %openclaw metrics. For any cluster: master.metrics_port in "
    "its configuration, or the variable OPENCLAW_MASTER_METRICS_PORT."
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    metrics = commands.add_parser(
        "metrics", help="show where metrics are served, and what Prometheus and Grafana need"
    )
    what = metrics.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print the metrics")
    what.add_argument(
        "--scrape-config", action="store_true", help="print a configuration for Prometheus that reads them"
    )
    what.add_argument(
        "--dashboard", metavar="FILE", help="write Grafana's dashboard into a file; - prints it"
    )
    metrics.add_argument("--port", type=int, help="only those that are served at this port")
    metrics.set_defaults(run=_metrics)
    add_json(metrics)


def _metrics(options: argparse.Namespace) -> str:
    from openclaw_nb.metrics import setup
    from openclaw_nb.metrics.publish import find_published

    if options.dashboard == "-":
        return setup.dashboard()
    if options.dashboard is not None:
        return f"Written: {setup.write_dashboard(options.dashboard)}. In Grafana: Dashboards, New, Import."
    endpoints = [each for each in find_published() if options.port in (None, each.port)]
    if options.show:
        return _text(endpoints)
    if options.scrape_config:
        return setup.scrape_config(_some(endpoints)).rstrip()
    if options.json:
        return json.dumps([{**asdict(each), "url": each.url} for each in endpoints], indent=2)
    rows = [("process", "metrics", "token"), *((str(e.pid), e.url, e.token_file or "-") for e in endpoints)]
    return aligned(rows) if endpoints else _NONE


def _some(endpoints: list[Published]) -> list[Published]:
    if not endpoints:
        raise NotStartedError(_NONE)
    return endpoints


def _text(endpoints: list[Published]) -> str:
    endpoint, *others = _some(endpoints)
    if others:
        ports = ", ".join(str(each.port) for each in endpoints)
        raise UsageError(f"Several processes serve metrics. Say which: --port, one of {ports}.")
    headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token_file else {}
    asked = urllib.request.Request(endpoint.local_url, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=_ANSWER_SECONDS) as answer:
            return str(answer.read().decode().rstrip())
    except OSError as error:
        raise ClusterError(
            f"{endpoint.url} does not answer: {error}. Process {endpoint.pid} may be ending, or stopped."
        ) from error
