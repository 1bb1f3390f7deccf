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
        "unfused",
        "gathered = Fp8(*whole) if call.fp8 else whole[0]",
        "gathered = Fp8(whole[0], x[1].repeat(self.num_ranks, 1)) if call.fp8 else whole[0]",
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
        "unfused",
        "return reduced(mine)",
        "parts = self._exchange.all_gather([(call.result, call.dtype)])(mine)[0].float()\n"
        "            parts[self._exchange._rank] = x.float() @ w.float().mT\n"
        "            return parts.sum(0).to(x.dtype)",
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
        "unfused",
        "[of.flatten(0, 1) for of in collect(",
        "[of.flip(0).flatten(0, 1) for of in collect(",
        (GATHER,),
    ),
    Mutant(
        "a part for another rank",
        "exchanges",
        "self._rank * (sizes[nth] // ranks)",
        "rank * (sizes[nth] // ranks)",
        (SCATTER, SEND, LOOKUP),
    ),
    Mutant(
        "the own shard of all experts",
        "unfused",
        "return send(y.transpose(0, 1).contiguous())",
        "return send(torch.stack([y[:, self._exchange._rank]] * ranks))",
        (SEND,),
    ),
    Mutant(
        "samples in the place of the next rank's",
        "unfused",
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
