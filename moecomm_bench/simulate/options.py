"""Options of the NIC, which all predictions share."""

from __future__ import annotations

from typing import Annotated

import typer

from moecomm.tools.options import real

NicGbs = Annotated[
    float, typer.Option(callback=real(0), help="Bandwidth of a GPU's NIC in one direction, GB/s (default: 400 Gb/s).")
]
NicLatency = Annotated[
    float, typer.Option(callback=real(0), help="Put and signal, one way.  Default: half of GIN's round trip.")
]
NicMessages = Annotated[float, typer.Option(callback=real(0), help="Millions of puts and signals a second.")]
NicEfficiency = Annotated[
    float,
    typer.Option(
        callback=real(0, 1), help="Share of the NIC's bandwidth that rows reach; 0: as fitted to published times."
    ),
]
NIC = (50.0, 8.35, 215.0)  # the defaults of Nic; a test compares them
