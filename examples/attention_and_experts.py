"""Greedy decoding with attention on some ranks and experts on others, and again in one process, with the same tokens.

    python examples/attention_and_experts.py
    python examples/attention_and_experts.py --attention 1 --experts 4

Attention ranks have the sequences, and everything of the model but its experts. Expert ranks have the experts, and no
tokens. All of them share one Buffer, whose placement gives attention ranks no expert. Every rank makes the same calls:
an expert rank passes no tokens, and an attention rank gets no rows.

Two micro-batches are in flight: while the rows of one are at the experts, attention ranks compute the other.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import moecomm
from moecomm.nn import Experts, Gate
from moecomm.router import Gating
from moecomm.tools.launch import launch

SEQUENCES, PROMPT, LENGTH = 12, 4, 20  # sequences, tokens that are given, and tokens with those that are chosen
VOCABULARY, HIDDEN, INTERMEDIATE, HEADS = 256, 64, 64, 4
LAYERS, EXPERTS, TOPK = 2, 8, 2


class Attention(torch.nn.Module):
    """Everything of the model but its experts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        self.embedding, self.positions = drawn(VOCABULARY, HIDDEN), drawn(LENGTH, HIDDEN)
        self.qkv, self.out = ([drawn(n * HIDDEN, HIDDEN) for _ in range(LAYERS)] for n in (3, 1))
        self.gates = torch.nn.ModuleList([Gate(Gating(HIDDEN, EXPERTS, TOPK), seed=n) for n in range(LAYERS)])


class MicroBatch:
    """Sequences of this rank that are decoded together; none on expert ranks."""

    def __init__(self, model: Attention, prompts: torch.Tensor) -> None:
        self.model, self.prompts, self.text = model, prompts, prompts[:, :1]
        self.cache: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]

    def embed(self) -> None:
        """Begin a step with the last token of each sequence."""
        at = self.text.shape[1] - 1
        self.states = self.model.embedding[self.text[:, at]] + self.model.positions[at]

    def attend(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run an attention layer; return the rows for the experts, and their routing."""
        model, count = self.model, len(self.states)
        projected = rms_norm(self.states, (HIDDEN,)) @ model.qkv[layer].T
        self.cache[layer].append(projected.view(count, 3, HEADS, HIDDEN // HEADS))
        q, k, v = torch.stack(self.cache[layer], dim=3).unbind(dim=1)  # [sequences, heads, tokens, columns]
        mixed = scaled_dot_product_attention(q[:, :, -1:], k, v).reshape(count, HIDDEN)
        self.states = self.states + mixed @ model.out[layer].T
        x = rms_norm(self.states, (HIDDEN,))
        return x, *model.gates[layer](x)

    def add(self, y: torch.Tensor) -> None:
        """Add what the experts have returned."""
        self.states = self.states + y

    def choose(self) -> None:
        """End a step: append a token of the prompt, or the most likely one."""
        at = self.text.shape[1]
        logits = rms_norm(self.states, (HIDDEN,)) @ self.model.embedding.T
        chosen = self.prompts[:, at] if at < PROMPT else logits.argmax(dim=1)
        self.text = torch.cat((self.text, chosen[:, None]), dim=1)


def step(buffer: moecomm.Buffer, batches: list[MicroBatch], experts: list[Experts]) -> None:
    """Decode one token of each sequence."""
    for batch in batches:
        batch.embed()
    stages = [(layer, batch) for layer in range(LAYERS) for batch in batches]
    sent = [buffer.dispatch_begin(*batches[0].attend(0))]
    for number, (layer, batch) in enumerate(stages):
        routed = buffer.dispatch_end(sent.pop())
        y = experts[layer](routed.x, routed.tokens_per_expert) if experts else routed.x
        if number + 1 < len(stages):
            following, other = stages[number + 1]
            sent.append(buffer.dispatch_begin(*other.attend(following)))
        batch.add(buffer.combine(y, routed.handle))
    for batch in batches:
        batch.choose()


@torch.no_grad()
def decode(group: Any, attention: int, experts: int) -> list[list[int]]:
    """Return the tokens of this rank's sequences.

    Args:
        group: of `attention` + `experts` ranks.
        attention: ranks with sequences, which come first.
        experts: ranks with experts; 0: the only attention rank has them.
    """
    torch.set_num_threads(1)
    each = EXPERTS // max(1, experts)
    held = [range(0)] * attention + [range(n * each, (n + 1) * each) for n in range(experts)]
    placement = moecomm.Placement(held if experts else [range(EXPERTS)])
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": SEQUENCES}
    with moecomm.Buffer(group, **sizes, dtype=torch.float32, backend="host", placement=placement) as buffer:
        prompts = torch.randint(VOCABULARY, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(1))
        mine = prompts[buffer.rank :: attention] if buffer.rank < attention else prompts[:0]
        model, half = Attention(), len(mine) // 2
        batches = [MicroBatch(model, some) for some in (mine[:half], mine[half:])]
        here = held[buffer.rank] if experts else range(EXPERTS)
        layers = [Experts(here, HIDDEN, INTERMEDIATE, seed=n) for n in range(LAYERS)] if here else []
        for _ in range(LENGTH - 1):
            step(buffer, batches, layers)
        return torch.cat([batch.text for batch in batches]).tolist()


def main() -> int:
    """Decode on several ranks and in one process; returns 1 if a token differs, else 0."""
    parser = argparse.ArgumentParser(description="Decodes with attention and experts on different ranks.")
    parser.add_argument("--attention", type=int, default=3, choices=[1, 2, 3, 4, 6], help="Ranks with sequences.")
    parser.add_argument("--experts", type=int, default=2, choices=[1, 2, 4, 8], help="Ranks with experts.")
    options = parser.parse_args()
    several = launch("attention_and_experts:decode", vars(options), options.attention + options.experts)
    (one,) = launch("attention_and_experts:decode", {"attention": 1, "experts": 0}, 1)
    for rank, found in enumerate(several):
        print(f"rank {rank}: {len(found)} sequences" + (f"; the first: {found[0]}" if found else ""))
    same = sorted(tokens for found in several for tokens in found) == sorted(one)
    print(f"the tokens of one process: {'the same' if same else 'others'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
