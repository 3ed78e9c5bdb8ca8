"""``%openclaw metrics``: opens the endpoint for Prometheus, and writes what it and Grafana need."""

from __future__ import annotations

import argparse

from openclaw_nb.metrics.publish import Metrics, Published
from openclaw_nb.metrics.setup import scrape_config, write_dashboard
from openclaw_nb.notebook.tables import Message


def metrics(served: Metrics, options: argparse.Namespace) -> Message | Published:
    """Do what the options say; return the endpoint, or a line about what was done."""
    if options.off:
        return Message("Metrics are served no more." if served.stop() else "No metrics were served.")
    if options.dashboard is not None:
        path = write_dashboard(options.dashboard)
        return Message(f"Written: {path}. In Grafana: Dashboards, New, Import.")
    published = served.serve(options.host, options.port)
    return Message(scrape_config([published]).rstrip()) if options.scrape_config else published
