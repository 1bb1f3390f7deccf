"""Handles of GPU memory, and addresses of windows, are in no log, error or flight record."""

from __future__ import annotations

import base64
import gc
import json
import logging
import secrets
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import windows
from moecomm.backends.windows import nccl
from moecomm.ranks.rendezvous import LocalRank
from moecomm.testing import LocalBuffers
from tests.backends.conftest import run_ranks
from tests.backends.fake_driver import REFUSABLE, FabricHandle, FakeDriver, HandleType, Status

from ..live import shorten

Install = Callable[[FakeDriver], FakeDriver]
PIECE = 8  # bytes of a handle that are enough to be found


class SecretHandles(FakeDriver):
    """Fabric handles are random bytes: whoever knows such bytes can map the memory."""

    def __init__(self, fails: str | None) -> None:
        super().__init__(lambda function, thread: Status(function == fails and thread == "rank1"))
        self.secrets: dict[bytes, bytes] = {}

    def cuMemExportToShareableHandle(self, handle: int, handle_type: HandleType, flags: int) -> tuple[Any, ...]:
        status, fabric = super().cuMemExportToShareableHandle(handle, handle_type, flags)
        if isinstance(fabric, FabricHandle):
            secret = secrets.token_bytes(64)
            self.secrets[secret], fabric.data = fabric.data, secret
        return status, fabric

    def cuMemImportFromShareableHandle(self, shareable: int, handle_type: HandleType) -> tuple[Any, ...]:
        fabric = FabricHandle.by_address[shareable]
        fabric.data = self.secrets.get(fabric.data, fabric.data)
        return super().cuMemImportFromShareableHandle(shareable, handle_type)


def spellings(secret: bytes) -> Iterator[str]:
    """Yield the forms in which a text may contain these bytes."""
    for at in range(0, len(secret), PIECE):
        piece = secret[at : at + PIECE]
        yield piece.hex()
        yield piece.hex(" ")
        yield repr(piece)[2:-1]
        yield ", ".join(map(str, piece))
        for order in ("little", "big"):
            yield str(int.from_bytes(piece, order))
            yield f"{int.from_bytes(piece, order):x}"
    yield base64.b64encode(secret).decode()[:16]


def found_in(text: str, secret: bytes) -> list[str]:
    return [one for one in spellings(secret) if one.lower() in text.lower()]


def said(caplog: pytest.LogCaptureFixture, results: list[Any]) -> str:
    """All log records, and errors with their causes."""
    errors = [one for one in results if isinstance(one, BaseException)]
    texts = ["".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)) for error in errors]
    return "\n".join([caplog.text, *(str(vars(record)) for record in caplog.records), *texts])


def test_a_handle_in_a_text_would_be_found() -> None:
    secret = secrets.token_bytes(64)
    for text in (secret.hex().upper(), repr(secret), str(list(secret)), f"{int.from_bytes(secret[:8], 'little'):#x}"):
        assert found_in(f"rank 1: {text} failed", secret)
    assert not found_in(secrets.token_bytes(64).hex(), secret)


@pytest.mark.parametrize("fails", [None, *REFUSABLE])
def test_handles_of_memory(
    install_driver: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: str | None
) -> None:
    """Ranks of two hosts pass handles as bytes through the group. One call of the driver fails, or none does."""
    caplog.set_level(logging.DEBUG)
    driver = SecretHandles(fails)
    install_driver(driver)
    monkeypatch.setattr(nccl, "missing", lambda: "no NCCL here")
    monkeypatch.setattr(windows, "attribute", lambda name, device: 1)
    peers = [windows.Peer(bytes([rank]) * 32, bytes([rank]) * 16, None) for rank in range(2)]

    opened: dict[int, Any] = {}  # not a local variable: errors in the log keep frames

    def body(group: LocalRank) -> None:
        group.in_process = False  # type: ignore[misc]
        device, rank = torch.device("cuda", group.rank), group.rank
        opened[rank] = windows.open_window(group, peers, 3 << 20, device, 20.0, resident=100)
        windows.releasable(opened[rank]).release()
        windows.releasable(opened[rank]).restore(group)

    results = run_ranks(2, body)
    assert [isinstance(one, moecomm.Unsupported) for one in results] == [fails is not None] * 2
    text = said(caplog, results)
    assert "no NCCL here" in text
    assert len(driver.secrets) >= (6 if fails is None else 0)
    assert [found for secret in driver.secrets for found in found_in(text, secret)] == []
    while opened:
        opened.popitem()[1].close()
    results.clear()
    gc.collect()
    assert driver.nothing_left


def test_addresses_of_windows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8, "backend": "host"}
    with LocalBuffers(2, **sizes) as ranks:
        first, second = ranks.buffers
        addresses = {address for buffer in ranks.buffers for address in buffer.rounds.session.context.peers} - {0}
        x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 3], [1, 2]])
        for buffer in ranks.buffers:
            shorten(buffer, 2)
        ranks.dispatch([{"x": x, "topk_idx": ids}] * 2)
        errors = []
        for wrong in ({"x": x, "topk_idx": ids + 9}, {"x": x.double(), "topk_idx": ids}, {"x": x, "topk_idx": ids}):
            with pytest.raises(moecomm.MoecommError) as error:
                first.dispatch(**wrong)
            errors.append(error.value)
        with pytest.raises(moecomm.MoecommError) as error:
            second.dispatch(x, ids)
        records = [json.dumps(buffer.flight_record()) for buffer in ranks.buffers]
        text = "\n".join([said(caplog, [*errors, error.value]), *records, *map(repr, ranks.buffers)])
    assert len(addresses) == 2 and len(text) > 1000
    assert [address for address in addresses if str(address) in text or f"{address:x}" in text.lower()] == []
