"""Settings that every test and every process started by one shares."""

from __future__ import annotations

import os

# Set before anything imports torch, and inherited by the engines. Tests start up to four workers, also on a
# machine of two cores: with a thread pool each they would mostly wait for each other, and the check that
# refuses more workers than cores would refuse them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
