"""The command `moecomm simulate dlrm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moecomm.tools.options import real, whole
from moecomm_bench.options import Json
from moecomm_bench.simulate.options import NIC, NicEfficiency, NicGbs, NicLatency, NicMessages


def dlrm(
    domains: Annotated[str, typer.Option(help="Numbers of NVLink domains: one or several.")] = "2,4,8,16,32,64,128",
    ranks: Annotated[int, typer.Option(callback=whole(1, 1 << 16), help="GPUs of a domain.")] = 1,
    tables: Annotated[int, typer.Option(callback=whole(1), help="Embedding tables of all ranks.")] = 128,
    columns: Annotated[int, typer.Option(callback=whole(1), help="Columns of a table.")] = 128,
    pooling: Annotated[int, typer.Option(callback=whole(1), help="Rows of a bag.")] = 100,
    samples: Annotated[int, typer.Option(callback=whole(1), help="Samples of a rank.")] = 1024,
    bottom: Annotated[str, typer.Option(help="Widths of the bottom MLP, its input first.")] = "2000,1024,1024,128",
    top: Annotated[str, typer.Option(help="Widths of the top MLP, without its input.")] = "4096,4096,4096,1",
    projection: Annotated[
        int, typer.Option(callback=whole(0), help="Features that all are multiplied with; 0: all with all.")
    ] = 30,
    dtype: Annotated[str, typer.Option(help="Tables, sums and gradients: fp32 or bf16.")] = "fp32",
    nic_gbs: NicGbs = NIC[0],
    nic_latency_us: NicLatency = NIC[1],
    nic_mega_messages: NicMessages = NIC[2],
    nic_efficiency: NicEfficiency = 0.0,
    hbm_gbs: Annotated[
        float, typer.Option(callback=real(0), help="Data sheet's memory bandwidth of another GPU; 0: as measured.")
    ] = 0.0,
    gemm_tflops: Annotated[
        float, typer.Option(callback=real(0), help="Data sheet's dense 16-bit TFLOP/s of another GPU; 0: as measured.")
    ] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Also print each measured row beside the fit.")] = False,
    parameters: Annotated[
        Path | None, typer.Option(help="A fit of bench/refit.py; default: the one in the package.")
    ] = None,
    json: Json = None,
) -> None:
    """Predict a training iteration of a recommendation model, with the lookups and their all-to-all fused or not."""
    from moecomm_bench.options import numbers
    from moecomm_bench.results import write
    from moecomm_bench.simulate.dlrm.gpu import content, parse
    from moecomm_bench.simulate.dlrm.predict import predict
    from moecomm_bench.simulate.dlrm.shape import Dlrm
    from moecomm_bench.simulate.dlrm.table import show_dlrm, show_rows
    from moecomm_bench.simulate.domain import fitted_efficiency
    from moecomm_bench.simulate.nic import ModelNic
    from moecomm_bench.table import console

    layers = tuple(numbers("bottom", bottom)), tuple(numbers("top", top))
    model = Dlrm(tables, columns, pooling, samples, *layers, projection, dtype)
    fitted = content(parameters)
    nic = ModelNic(nic_gbs, nic_latency_us, nic_mega_messages, nic_efficiency or fitted_efficiency())
    gpu = parse(fitted).scaled(hbm_gbs, gemm_tflops)
    result = {**predict(model, gpu, nic, numbers("domains", domains), ranks), "fit": fitted}
    out = console()
    if check:
        show_rows(fitted, out)
        out.print()
    show_dlrm(result, out)
    if json is not None:
        out.print(str(write(json, result)), highlight=False)
