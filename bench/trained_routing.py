"""Routing of a small trained language model: trains it, and records its gates over text that it has not seen.

    OMP_NUM_THREADS=1 python bench/trained_routing.py --out bench/routing/byte-model.routing

The model predicts the bytes of the manual that comes with Python; every tenth topic is held out. It has three layers,
each with causal attention and 128 experts of which a token takes 4: the numbers of gpt-oss-120b, so that benchmarks of
that model replay the file. The gates are balanced as those of DeepSeek-V3 are: a bias of the scores, which takes part
in the choice alone, rises for an expert with less than the mean load of a step and falls for one with more.

After training, the model reads 8 batches of held-out text, without gradients and without a change of the biases.
Header entries of the file name the text, the steps of training and the loss on the recorded text.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

from moecomm.nn import ExpertParallel
from moecomm.routing import Recorded, RoutingRecorder

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS = 256, 128, 64, 4
LAYERS, EXPERTS, TOPK = 3, 128, 4
LENGTH, SEQUENCES = 128, 16  # of a sequence in bytes, of a batch of training
HELD_OUT = 10  # every so many topics, one is held out
CALLS, RECORDED_SEQUENCES = 8, 4
BIAS_RATE = 0.001


class Model(torch.nn.Module):
    """A transformer over bytes, whose feed-forward layers are mixtures of experts over the ranks of a group.

    `how`: further arguments of ExpertParallel.
    """

    def __init__(self, group: Any = "self", **how: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Embedding(LENGTH, HIDDEN)
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(LAYERS)])
        self.out = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS)])
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "topk": TOPK}
        gate: dict[str, Any] = {"gate": "sigmoid", "corrected": True, "max_tokens": SEQUENCES * LENGTH}
        self.moe = torch.nn.ModuleList(
            [ExpertParallel(group, **sizes, **gate, **how, seed=n, backend="host") for n in range(LAYERS)]
        )
        for layer in self.moe:
            layer.gate.register_forward_hook(balance)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next bytes of text [sequences, LENGTH + 1], in nats."""
        x = self.embedding(text[:, :-1]) + self.positions.weight
        for qkv, out, moe in zip(self.qkv, self.out, self.moe, strict=True):
            q, k, v = qkv(rms_norm(x, (HIDDEN,))).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + moe(rms_norm(x, (HIDDEN,)))
        return cross_entropy(self.head(rms_norm(x, (HIDDEN,))).flatten(0, 1), text[:, 1:].flatten())


def balance(gate: torch.nn.Module, _: Any, routing: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Move the bias of each expert by one step towards even load; a forward hook of a gate."""
    if gate.training:
        rows = torch.bincount(routing[0].flatten(), minlength=EXPERTS).float()
        gate.bias += BIAS_RATE * (rows.mean() - rows).sign()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on, and those that are held out."""
    different = sorted(set(topics.values()))
    held_out = different[::HELD_OUT]
    parts = ("\n".join(text for text in different if text not in held_out), "\n".join(held_out))
    first, second = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).long() for part in parts)
    return first, second


def train(model: Model, text: torch.Tensor, steps: int) -> None:
    """Train on sequences that are drawn from the text; prints the loss now and then."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        begin = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=generator)
        loss = model(text[begin + torch.arange(LENGTH + 1)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:5d}: {loss.detach():.3f} nats a byte", flush=True)


@torch.no_grad()
def record(model: Model, text: torch.Tensor, steps: int, path: Path) -> None:
    """Record the gates over sequences that are spread evenly over the text, in order."""
    model.eval()
    sequences = text.unfold(0, LENGTH + 1, LENGTH)
    chosen = sequences[torch.linspace(0, len(sequences) - 1, CALLS * RECORDED_SEQUENCES).long()]
    with RoutingRecorder(path, model="byte-model", watch=model) as recorder:
        losses = [model(batch) for batch in chosen.split(RECORDED_SEQUENCES)]
    (file,) = recorder.files
    recorded, loss = Recorded.load(file), float(sum(losses)) / len(losses)
    notes = {"text": f"manual of Python {platform.python_version()}", "steps": str(steps), "loss": f"{loss:.2f}"}
    print(replace(recorded, notes=recorded.notes | notes).save(file), notes)


def main() -> None:
    """Train, and record."""
    parser = argparse.ArgumentParser(description="Trains a small language model, and records its routing.")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("byte-model.routing"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model, (text, held_out) = Model(), texts()
    train(model, text, options.steps)
    record(model, held_out, options.steps, options.out)


if __name__ == "__main__":
    main()
