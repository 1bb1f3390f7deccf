"""The question: a model or its recorded routing, the memory of a GPU, the tokens of a step, and a target."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm.balance import MOST_SLOTS
from moecomm.base.protocol import LAYOUTS, MAX_RANKS
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput
from moecomm.ranks.settings import MAX_FLAT_ROWS
from moecomm_bench import replay
from moecomm_bench.simulate.routing import DrawnGate

FORMATS = ("bf16", "fp8")  # of weights and dispatched rows: those that the model was fitted to


@dataclass(frozen=True)
class PlannedCase:
    """Case to plan for; sizes are in the units of the command's options.

    Attributes:
        model: its name; "" if the sizes are of no known model.
        hidden, intermediate: columns of a token and of an expert.
        gate: its experts and topk.
        memory_gib: of a GPU, for the weights of experts and the window.
        tokens: of a rank in a step.
        target_us: longest time of a layer; 0: the least time is wanted.
        layers: number of layers whose weights a GPU holds.
        ranks: numbers of GPUs to choose from.
        domain_ranks: most GPUs of a domain.
        formats, layouts: to choose from; of equally good ones the first is taken.
        routing_file: recorded routing; "": the gate chooses all experts equally often.
    """

    model: str
    hidden: int
    intermediate: int
    gate: DrawnGate
    memory_gib: float
    tokens: int
    target_us: float
    layers: int
    ranks: list[int]
    domain_ranks: int
    formats: list[str]
    layouts: list[str]
    routing_file: str = ""

    def check(self) -> None:
        """Raise BadInput if a value is out of range."""
        if self.gate.experts > MOST_SLOTS:
            raise BadInput("experts", self.gate.experts, f"at most {MOST_SLOTS}")
        self.gate.check()
        if self.memory_gib <= 0:
            raise BadInput("memory", self.memory_gib, "GiB, more than 0")
        for ranks in self.ranks:
            if not 1 <= ranks <= MAX_RANKS or (ranks > self.domain_ranks and ranks % self.domain_ranks):
                want = f"1 to {MAX_RANKS} each; beyond a domain, a multiple of its {self.domain_ranks}"
                raise BadInput("ranks", ranks, want)
        if not 1 <= self.tokens < MAX_FLAT_ROWS // max(self.ranks):
            raise BadInput("tokens", self.tokens, f"1 to {MAX_FLAT_ROWS // max(self.ranks) - 1}")
        for name, values, known in (("format", self.formats, FORMATS), ("layout", self.layouts, LAYOUTS)):
            if not values or any(value not in known for value in values):
                raise BadInput(name, ",".join(values), f"some of {', '.join(known)}")
        if self.hidden % 8:
            raise BadInput("hidden", self.hidden, "a multiple of 8")
        if self.routing_file:
            replay.check(self.routing_file, self.gate.experts, self.gate.topk, self.model)

    def domains(self, ranks: int) -> tuple[int, int]:
        """Return the number of domains, and of ranks in each."""
        return (1, ranks) if ranks <= self.domain_ranks else (ranks // self.domain_ranks, self.domain_ranks)


def expert_bytes(name: str, hidden: int, intermediate: int) -> int:
    """Return the bytes of the weights of an expert in one layer; FP8 has a float32 scale for each 128x128 block."""
    values = 3 * hidden * intermediate
    if name == "bf16":
        return 2 * values
    across, inside = -(-hidden // GROUP), -(-intermediate // GROUP)
    return values + 4 * across * (-(-2 * intermediate // GROUP) + inside)
