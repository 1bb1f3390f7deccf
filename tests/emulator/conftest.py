"""The machine that runs rounds."""

from __future__ import annotations

import pytest

from .machine import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()
