"""The promises of docs/containers.md on the environment that CPU ranks need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from .fresh_python import beside_packages

# Less than the defaults of a container: 64 KiB of /dev/shm, no capability, and no way to get one.
CONTAINER = """
mount -t tmpfs -o size=64k tmpfs /dev/shm
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


def in_container(*command: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("unshare and setpriv are not installed")
    made = ["unshare", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", *([] if os.geteuid() == 0 else ["-Ur"])]
    if subprocess.run([*made, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine makes no namespaces")
    return subprocess.run(
        [*made, "sh", "-ec", CONTAINER, "sh", *command],
        **beside_packages(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )


def test_ranks_need_no_capability_and_no_room_in_dev_shm() -> None:
    done = in_container(sys.executable, "-m", "moecomm", "demo", "--tokens", "16", "--ranks", "2", "--backend", "host")
    assert done.returncode == 0, done.stdout
    assert "Every output equals the single-rank layer" in done.stdout
