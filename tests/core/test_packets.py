"""How rows are cut into packets."""

from __future__ import annotations

import itertools

import pytest
import torch

from moecomm import _native
from moecomm.backends import lsa
from moecomm.base import packets
from moecomm.ranks.settings import Settings


def test_what_a_row_of_deepseek_v3_is_cut_into() -> None:
    assert packets.of_dispatch(14336, 0, 8) == packets.Packets(1792, 0, 16, 8)
    assert packets.of_dispatch(7168, 224, 8, scale_size=4) == packets.Packets(1792, 56, 16, 4)
    assert packets.of_dispatch(7168, 56, 8, scale_size=1) == packets.Packets(1024, 8, 10, 7)
    assert packets.of_combine(14336) == packets.Packets(1792, 0, 15, 8)
    assert packets.of_combine(7168, scaled=True) == packets.Packets(896, 32, 8, 8)
    assert packets.of_combine(16, scaled=True) == packets.Packets(128, 8, 2, 1), "a group has room for all its columns"
    assert [packets.room(ranks, 4096, 4 * 7168 + 32) >> 20 for ranks in (1, 4, 8, 32, 64, 128)] == [4, 4, 4, 4, 2, 1]
    assert packets.of_combine(4 * 7168).carry(128, 8, 4 << 20)


@pytest.mark.parametrize("most", [128, 4096])
@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_128_tokens_of_deepseek_v3_go_straight_to_other_domains(ranks: int, most: int) -> None:
    settings = Settings(ranks, 7168, 256, 8, most, torch.bfloat16, "lsa", None, ranks // 2)
    row = settings.staged_row_bytes
    shape = _native.Shape(
        ranks=ranks,
        slots=256,
        topk=8,
        max_tokens=most,
        ring_tokens=settings.ring_tokens(lsa),  # type: ignore[arg-type]
        staged_row_bytes=row,
        heap_bytes=1 << 20,
        packet_bytes=settings.packet_bytes(lsa),  # type: ignore[arg-type]
        domain_ranks=ranks // 2,
    )
    shape.receive_bytes = _native.received_token_bytes(shape, *settings.receive_payload_bytes)
    assert _native.goes_direct(shape, 128) and not _native.goes_direct(shape, 150)
    shape.domain_ranks = ranks
    assert not _native.goes_direct(shape, 128)


@pytest.mark.parametrize("scale_size", [0, 1, 4])
def test_every_byte_is_in_one_packet(scale_size: int) -> None:
    for columns, topk in itertools.product((16, 48, 128, 272, 2880, 7168, 16384, 65536), (1, 8, 32)):
        scales = -(-columns // 128) * scale_size
        cut = packets.of_dispatch(columns, scales, topk, scale_size=scale_size)
        if scales % 4:
            assert cut is None
            continue
        assert cut is not None
        assert cut.row_bytes % 16 == 0 and cut.scale_bytes % 8 == 0
        assert (cut.number - 1) * cut.row_bytes < columns <= cut.number * cut.row_bytes
        assert cut.number * cut.scale_bytes >= scales
        assert (cut.row_bytes + cut.scale_bytes) // 8 + topk <= cut.lines * 15 <= 16 * 15
        if scale_size:  # whole groups, whose scales are whole words
            assert cut.row_bytes // 128 * scale_size == cut.scale_bytes


def test_given_scales_are_cut_as_the_row_is() -> None:
    assert packets.of_dispatch(7168, 58, 8) is None, "not half words"
    for scale_bytes in (4, 8, 16, 56, 92, 224, 1024):
        cut = packets.of_dispatch(7168, scale_bytes, 8)
        assert cut is not None and cut.number * cut.scale_bytes >= scale_bytes


def test_few_tokens_are_few() -> None:
    cut = packets.of_dispatch(14336, 0, 8)
    assert cut is not None
    assert cut.carry(128, 8, 2 << 20) and not cut.carry(129, 8, 2 << 20), "of the room"
    small = packets.of_dispatch(16, 0, 8)
    assert small is not None
    assert small.carry(512, 8, 2 << 20) and not small.carry(513, 8, 2 << 20), "of mail"
    assert not small.carry(512, 9, 2 << 20), "of what every block counts by itself"
    assert cut.carry(0, 8, 256) and not cut.carry(0, 8, 0), "none at all where there is no room"
