"""Options that the commands which measure share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from moecomm.errors import BadInput
from moecomm.ranks.settings import MAX_FLAT_ROWS
from moecomm.tools.options import whole, written

if TYPE_CHECKING:
    from moecomm_bench.case import RoundsCase

_T = TypeVar("_T")


def numbers(name: str, text: str) -> list[int]:
    """Parse an option of one number, or of several separated by commas. Raises BadInput."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(name, repr(text), "a number, or several with commas between") from None
    if not 0 <= min(found) <= max(found) < MAX_FLAT_ROWS:
        raise BadInput(name, text, f"0 to {MAX_FLAT_ROWS - 1} each")
    return found


@dataclass(frozen=True)
class Default(Generic[_T]):
    """The default of an option: of GPUs, and a smaller one of CPU ranks, which share a few cores.

    With these, a command ends on two cores within half a minute.
    """

    gpus: _T
    cpus: _T

    def option(self, help: str, callback: Any = None) -> Any:  # noqa: A002 - as typer names it
        """Return the option, to be declared with the default None."""
        gpus = "the model's" if self.gpus is None else self.gpus
        return typer.Option(help=f"{help} Default: {gpus}; on CPU ranks {self.cpus}.", callback=callback)

    def of(self, given: _T | None, backend: str) -> _T:
        """Return what was given, or the default of (the first) backend.  Raises BadInput, Unsupported."""
        from moecomm_bench.ranks import plan

        if given is not None:
            return given
        return self.cpus if plan(backend.split(",")[0], None)[0] == "host" else self.gpus


def mode_of(asked: str | None, backend: str) -> str:
    """Return the mode of a measurement: by default graph on GPUs, eager on CPUs."""
    return asked if asked is not None else "eager" if backend == "host" else "graph"


def inner_of(model: str, intermediate: int | None) -> int:
    """Return the columns inside an expert: those given, or the model's."""
    from moecomm.router import MODELS

    return MODELS[model].intermediate if intermediate is None else intermediate


def case_of(
    sizes: tuple[str, int | None, int | None, int | None],
    lists: tuple[str, str, str, str],
    where: tuple[str, int | None, str | None],
    routing: Path | None = None,
    **more: Any,
) -> RoundsCase:
    """Make a case of the options that commands share.

    Args:
        sizes: model, hidden, topk, experts.
        lists: tokens, layout, payload, sms.
        where: backend, ranks, mode.
        routing: a file of moecomm record.
        more: other fields of the case.

    Raises:
        BadInput: an unknown model, or a list that is none.
        Unsupported: a backend that is not here.
    """
    from moecomm_bench.case import RoundsCase, model_sizes
    from moecomm_bench.ranks import plan

    tokens, layout, payload, sms = lists
    backend, ranks = plan(*where[:2])
    model, hidden, topk, experts = model_sizes(*sizes)
    return RoundsCase(
        model=model,
        hidden=hidden,
        topk=topk,
        experts=experts,
        ranks=ranks,
        backend=backend,
        tokens=numbers("tokens", tokens),
        layouts=layout.split(","),
        payloads=payload.split(","),
        sms=numbers("sms", sms),
        mode=mode_of(where[2], backend),
        routing_file="" if routing is None else str(routing),
        **more,
    )


Model = Annotated[str, typer.Option(help="Model that sets the sizes (a name in moecomm.router.MODELS).")]
Models = Annotated[str, typer.Option(help="Models that set the sizes (names in moecomm.router.MODELS).")]
GatedModel = Annotated[str, typer.Option(help="Model that sets sizes and gate (a name in moecomm.router.MODELS).")]
Hidden = Annotated[int | None, typer.Option(callback=whole(1), help="Columns of a token, replacing the model's.")]
Intermediate = Annotated[
    int | None, typer.Option(callback=whole(1), help="Columns inside an expert, replacing the model's.")
]
Topk = Annotated[int | None, typer.Option(callback=whole(1), help="Experts a token picks, replacing the model's.")]
Experts = Annotated[int | None, typer.Option(callback=whole(1), help="Experts of all ranks, replacing the model's.")]
Json = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, callback=written, help="Write the result to this file.")
]
Nic = Annotated[
    str, typer.Option("--nic", help="Emulated NIC between domains of lsa: GB/s,us,M messages/s, such as 50,3,10.")
]
DomainsRanks = Annotated[
    str, typer.Option("--domain-ranks", help="Ranks per domain, one or several; 0: all that load and store reach.")
]
Ranks = Annotated[int | None, typer.Option(help="Number of processes; default: 4 on CPUs, one per GPU.")]
Backend = Annotated[str, typer.Option(help="auto, host, lsa, gin or nvshmem.")]
INNER: Default[int | None] = Default(None, 16)  # columns inside an expert: a model's own would fill the memory
TOKENS = "Tokens of a rank: one number or several, 1,128,4096."
REPLAYED = "Timed repetitions of the chain, for percentiles."
Replays = Annotated[int, typer.Option(callback=whole(1), help=REPLAYED)]
Routing = Annotated[
    Path | None,
    typer.Option("--routing", help="Use the routing of this file of moecomm record."),
]
