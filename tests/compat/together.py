"""The ranks of a deep_ep program as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import moecomm


def together(ranks: int, body: Callable[[Any], Any]) -> list[Any]:
    """`body(group)` on every rank; what they return, by rank.  Raises what the first of them raises."""
    results: list[Any] = [None] * ranks

    def run(group: Any) -> None:
        try:
            results[group.rank] = body(group)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            results[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in moecomm.local_ranks(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
