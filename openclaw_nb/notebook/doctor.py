"""``%openclaw doctor``: all checks, as a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from openclaw_nb.config.load import load
from openclaw_nb.core.table import Table
from openclaw_nb.doctor.consult import consult, parse_reach
from openclaw_nb.doctor.findings import report
from openclaw_nb.session import Session


def doctor(session: Session, options: argparse.Namespace, tell: Callable[[str], None]) -> Table:
    """Make the checks that the options ask for; return what was found."""
    cluster = session.cluster
    configuration = load(options.config, os.environ)
    if cluster is not None and not options.config:
        configuration = cluster.configuration
    found = consult(
        session,
        configuration,
        workers=options.workers,
        reach=None if options.reach is None else parse_reach(options.reach),
        starts=not options.no_start,
        tell=tell,
    )
    about = "this host" if cluster is None else f"this host and the cluster {cluster.master.name}"
    return report(found, about)
