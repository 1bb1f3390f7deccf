"""Corrupt rows in the failure record.

The rank that finds one dispatches a token whose expert id says which row it is.  No such expert exists, so the
dispatch is invalid on every rank, and leaves the id, and the rank that passed it, in the record of each.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from moecomm import _native
from moecomm.errors import CorruptRow
from moecomm.ranks.session import Session

_OPS = ("dispatch", "combine")
# Bits of an id, from the lowest: rounds since, source rank, number of the token among those of all ranks, operation.
# Above them is a pattern that the id of an expert would have by accident only.
_ROUNDS, _RANK, _TOKEN, _OP = 8, 12, 23, 1
_FORWARDED = 1 << (_RANK - 1)  # in a source rank, of which there are fewer
_PATTERN = 0x2C0E7 << (_ROUNDS + _RANK + _TOKEN + _OP)
_PATHS = {
    "host": ("shared memory", "link between domains"),
    "lsa": ("NVLink store", "emulated NIC"),
    "gin": ("NVLink store", "NCCL's plugin"),
    "nvshmem": ("NVLink store", "NVSHMEM put"),
}


def fixed_bits(op: str, rounds_since: int) -> int:
    """Return an id without its row: see row_bits().

    Args:
        op: the operation that moved the row.
        rounds_since: number of the round that says so, less that of the operation.
    """
    return _PATTERN | _OPS.index(op) << (_ROUNDS + _RANK + _TOKEN) | min(rounds_since, (1 << _ROUNDS) - 1)


def row_bits(source: torch.Tensor, token: torch.Tensor, forwarded: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bits of a row, as int64.

    Args:
        source: the rank that sent it.
        token: `rank * max_tokens + token` of its token.
        forwarded: True if it went to the forwarder of that rank.
    """
    if forwarded is not None:
        source = source + _FORWARDED * forwarded
    return (source.long() << _ROUNDS) | (token.long() << (_ROUNDS + _RANK))


def error_of(record: _native.FailureRecordView, session: Session, masked: Collection[int] = ()) -> CorruptRow | None:
    """Return the error of a record that names a corrupt row; None for other records.

    `masked`: ranks that take no part.  Bits name a forwarder whether it does or not; the error names who stood in.
    """
    code = record.seen
    if record.code != _native.Failure.bad_input or record.argument != _native.Argument.topk_idx:
        return None
    if code >> (_ROUNDS + _RANK + _TOKEN + _OP) != _PATTERN >> (_ROUNDS + _RANK + _TOKEN + _OP):
        return None

    def take(bits: int) -> int:
        nonlocal code
        value, code = code & ((1 << bits) - 1), code >> bits
        return value

    since, sent_by, flat, op = take(_ROUNDS), take(_RANK), take(_TOKEN), take(_OP)
    forwarded, source = divmod(sent_by, _FORWARDED)
    shape = session.context.shape
    token_rank, token = divmod(flat, shape.max_tokens)
    if max(source, token_rank) >= shape.ranks:
        return None
    size = shape.domain_ranks or shape.ranks
    # On GPUs the rank that sent a row of a combine says so: it went to the token's rank, or to the forwarder of that.
    receiver = source // size * size + token_rank % size if forwarded else token_rank
    destination = receiver if record.peer == source else record.peer
    if forwarded:
        destination = _native.stand_in(shape, sorted(masked), destination)
    elif source != record.peer and _OPS[op] == "combine":  # a sum
        source = _native.stand_in(shape, sorted(masked), source)
    crosses = source // size != destination // size
    return CorruptRow(
        op=_OPS[op],
        round=record.round - since,
        source=source,
        destination=destination,
        token_rank=token_rank,
        token=token,
        path=_PATHS[session.name.partition("/")[0]][crosses],
    )
