"""Two processes for a plain run of all tests, for `-m slow` and for `-m long`, through pytest-xdist.

Any other run has one, as has a run on GPUs.  A plain run of all tests leaves out those of tests/slow.txt.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

PROCESSES = 2
# Tests of such a directory share what they compile: one process runs them all.
DIRECTORIES = ("emulator", "native", "rma_plugin", "shims")
# Tests of such a file share nothing, and some take ten minutes: any process runs any of them.
FILES = ("tests/test_world.py",)


def is_one_of_several(config: pytest.Config) -> bool:
    """Return whether this process runs a part of the collected tests, which nobody knows yet."""
    return hasattr(config, "workerinput")


def share(config: pytest.Config) -> None:
    """Set the options of pytest-xdist, where it is installed and the command has none of them, and leave out tests."""
    option = config.option
    # A process of pytest-xdist comes here too, without the options of its parent: it must not start more.
    if is_one_of_several(config):
        option.markexpr = config.workerinput["markexpr"]  # type: ignore[attr-defined]
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not option.keyword
    plain = not any(word.startswith("-m") for word in config.invocation_params.args)
    if everything and plain:
        option.markexpr += " and not slow"
    if (
        everything
        and (plain or option.markexpr in ("slow", "long"))
        and not torch.cuda.device_count()
        and not option.usepdb
        and getattr(option, "numprocesses", 0) is None
    ):
        option.numprocesses, option.dist, option.loadscopereorder = PROCESSES, "loadfile", False


def tell(node: Any) -> None:
    """Tell a process of pytest-xdist, before it begins, which markers select its tests."""
    node.workerinput["markexpr"] = node.config.option.markexpr


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's loadfile, but for DIRECTORIES, which count as one file, and FILES, whose tests count as files."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if file in FILES:
                return nodeid
            directory = Path(file).parent
            return str(directory) if directory.name in DIRECTORIES else str(super()._split_scope(nodeid))

    return Scheduling(config, log)
