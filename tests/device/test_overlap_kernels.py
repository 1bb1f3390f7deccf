"""The kernels of fused operators compile for sm_90a, without a GPU, within their registers and shared memory."""

from __future__ import annotations

import pytest
import torch

from moecomm.fused.schedules import FP8_SCHEDULES, SCHEDULES
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.overlap import kernels
from moecomm.overlap.gpu import SPLIT_SCHEDULES
from moecomm.overlap.sizes import FP8

from ..compiled import check_kernel
from ..few import few

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL: dict[str, PlainKernel] = {
    **{f"gather, {name}": kernels.gather_kernel(BF16, schedule) for name, schedule in SCHEDULES.items()},
    **{
        f"{send}, {name}, {ranks} ranks": kernels.send_kernel(FP16, SCHEDULES[name], send, ranks)
        for send in kernels.SENDS
        for name in ("64x8c1", "256x4c2u16")
        for ranks in (1, 2, 3, 4, 8)
    },
    **{
        f"split all_reduce, {rows} rows by {split}, {ranks} ranks": kernels.send_kernel(
            BF16, schedule, "all_reduce", ranks, split
        )
        for rows, schedule in SPLIT_SCHEDULES.items()
        for split in (2, 4)
        for ranks in (1, 2, 8)
    },
    **{f"FP8 gather, {name}": kernels.gather_kernel(FP8, schedule) for name, schedule in FP8_SCHEDULES.items()},
    **{
        f"FP8 {send}, {name}, {ranks} ranks": kernels.send_kernel(FP8, FP8_SCHEDULES[name], send, ranks)
        for send in kernels.SENDS
        for name in FP8_SCHEDULES
        for ranks in (1, 2, 8)
    },
    **{
        f"GEMV, {rows} rows, {ranks} ranks": kernels.gemv_kernel(BF16, rows, ranks)
        for rows in (1, 16)
        for ranks in (2, 8)
    },
    **{
        f"all_reduce, {dtype}, {ranks} ranks": kernels.all_reduce_kernel(dtype, ranks)
        for dtype in (BF16, FP16)
        for ranks in (1, 2, 3, 8)
    },
    **{f"embedding, {dtype}": kernels.embedding_kernel(dtype) for dtype in (BF16, FP16, FP32)},
}
PLAIN = (
    *("gather, 256x4c2u16", "all_reduce, 64x8c1, 8 ranks", "GEMV, 16 rows, 8 ranks", f"embedding, {BF16}"),
    f"all_reduce, {BF16}, 8 ranks",
    "split all_reduce, 128 rows by 4, 8 ranks",
    *("FP8 gather, 128x4c1r", "FP8 all_reduce, 64x5c2, 8 ranks", "FP8 all_to_all, 128x4c1r, 8 ranks"),
)


@pytest.mark.compiled(ALL)
@pytest.mark.parametrize("name", few(ALL, *PLAIN))
def test_compiles_within_its_bounds(name: str) -> None:
    # The last warp of a launch calls a function, which reports what has failed.
    check_kernel(ALL[name], calls=True, awaits="first")
