"""Bugs of the kind that these operators may have, a small edit each.  Random calls must catch every one.

None of them is a race, which a run may or may not show.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str  # of moecomm.overlap
    old: str  # occurs there exactly once
    new: str
    operators: tuple[str, ...]  # whose calls notice


GATHER, SCATTER, REDUCE, SEND, LOOKUP = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "embedding_all_to_all",
)

MUTANTS = [
    Mutant(
        "the scales of the own rows for all rows",
        "host",
        "of_peer = Fp8(*piece) if call.fp8 else piece[0]",
        "of_peer = Fp8(piece[0], mine[1]) if call.fp8 else piece[0]",
        (GATHER,),
    ),
    Mutant(
        "one scale for each row of w",
        "local",
        "return widen(*w, GROUP)",
        "return widen(w.data, w.scales.repeat_interleave(GROUP, dim=-2)[..., : w.data.shape[-2], :].roll(1, -2), 1)",
        (GATHER, SCATTER, REDUCE, SEND),
    ),
    Mutant(
        "the own part is not rounded before it is added",
        "host",
        "found = sum_in_order(views[half])",
        "parts = [of.float() for of in views[half]]\n"
        "                parts[self._rank] = x.float() @ w.float().mT\n"
        "                found = sum(parts).to(x.dtype)",
        (REDUCE,),
    ),
    Mutant(
        "a sum in the dtype",
        "local",
        "total = total + part.float()",
        "total = (total + part.float()).to(first.dtype).float()",
        (SCATTER, REDUCE),
    ),
    Mutant(
        "a product that is rounded between two blocks of K",
        "local",
        "return (x @ w.mT).to(dtype)",
        "return sum((x[..., n::2] @ w[..., n::2].mT).to(dtype) for n in (0, 1))",
        (GATHER, SCATTER, REDUCE, SEND),
    ),
    Mutant(
        "rows of ranks in the other order",
        "host",
        "y[peer * rows : (peer + 1) * rows]",
        "y[(ranks - 1 - peer) * rows : (ranks - peer) * rows]",
        (GATHER,),
    ),
    Mutant(
        "a part for another rank",
        "host",
        "[[of[self._rank] for of in by_rank] for by_rank in published]",
        "[[of[rank] for rank, of in enumerate(by_rank)] for by_rank in published]",
        (SCATTER, SEND, LOOKUP),
    ),
    Mutant(
        "the own shard of all experts",
        "host",
        "send(rows.transpose(0, 1), wide_weights(w))",
        "send([rows[:, self._rank]] * self.num_ranks, wide_weights(w))",
        (SEND,),
    ),
    Mutant(
        "samples in the place of the next rank's",
        "host",
        "parts = everybody.view(",
        "parts = everybody.roll(batch, 1).view(",
        (LOOKUP,),
    ),
    Mutant(
        "the last row for -1",
        "local",
        "torch.where((flat >= 0) & (flat < rows), row, tables * rows)",
        "torch.where(flat < 0, row + rows, row).clamp(min=0)",
        (LOOKUP,),
    ),
    Mutant(
        "an entry that ends a bag belongs to it",
        "local",
        "torch.bucketize(place, offsets[1:], right=True)",
        "torch.bucketize(place, offsets[1:])",
        (LOOKUP,),
    ),
]
