"""What Prometheus and Grafana need to be told: a scrape configuration, and the dashboard.

Knows files and endpoints; neither program is started or asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from openclaw_nb.core.errors import UsageError
from openclaw_nb.metrics.publish import Published


def dashboard() -> str:
    """Return Grafana's dashboard as JSON."""
    return (files("openclaw_nb.monitor") / "grafana.json").read_text(encoding="utf-8")


def write_dashboard(path: str | Path) -> Path:
    """Write Grafana's dashboard into a file; return where it is.

    Raises
    ------
    UsageError
        When it cannot be written.
    """
    target = Path(path)
    try:
        target.write_text(dashboard(), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The dashboard cannot be written to {target}: {error.strerror}. Name a file in a directory that is there."
        ) from error
    return target


def scrape_config(endpoints: Sequence[Published]) -> str:
    """Return a configuration with which Prometheus reads these endpoints."""
    return "\n".join(["scrape_configs:", *_jobs(endpoints)]) + "\n"


def _jobs(endpoints: Sequence[Published]) -> Iterator[str]:
    for token_file in dict.fromkeys(each.token_file for each in endpoints):
        targets = [each.target for each in endpoints if each.token_file == token_file]
        yield f"  - job_name: openclaw{'-with-token' if token_file else ''}"
        yield "    scrape_interval: 5s"
        if token_file:
            yield f"    authorization: {{credentials_file: {json.dumps(token_file)}}}"
        yield f"    static_configs: [{{targets: {json.dumps(targets)}}}]"
