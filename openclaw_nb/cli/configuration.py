"""Commands about the configuration file: ``config``, ``init``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from openclaw_nb.cli._options import add_json
from openclaw_nb.core.errors import UsageError

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    config = commands.add_parser("config", help="check a configuration file and show what each key sets")
    config.add_argument("files", nargs="*", default=["openclaw_config.yaml"], help="openclaw_config.yaml")
    config.add_argument(
        "--effective", action="store_true", help="is known to the notebook: %%openclaw config"
    )
    config.set_defaults(run=_config)
    init = commands.add_parser("init", help="write a configuration file with every key explained")
    init.add_argument("path", nargs="?", default="openclaw_config.yaml", help="openclaw_config.yaml")
    init.add_argument("--force", action="store_true", help="replace a file that is there")
    init.set_defaults(run=_init)
    add_json(config)


def _config(options: argparse.Namespace) -> str:
    from openclaw_nb.config.effects import effects_table
    from openclaw_nb.config.load import load

    if options.effective:
        raise UsageError(
            "What took effect is known where the cluster was started: %openclaw config --effective in its notebook, "
            "or OpenClawCluster.effective_configuration() in its script. Without --effective a file is checked."
        )
    table = effects_table(load(options.files, os.environ), None)
    return json.dumps([asdict(each) for each in table], indent=2) if options.json else repr(table)


def _init(options: argparse.Namespace) -> str:
    from openclaw_nb.config.template import write_template

    path = write_template(options.path, overwrite=options.force)
    return f"Written: {path}. Change what you need, then: OpenClawCluster(config_path={str(path)!r}).start()"
