"""Predictions of a training iteration for each number of domains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moecomm.errors import BadInput
from moecomm_bench.simulate.dlrm.cluster import Cluster
from moecomm_bench.simulate.dlrm.gpu import Gpu
from moecomm_bench.simulate.dlrm.iteration import FORMS, FUSED, TORCH, UNFUSED, iteration
from moecomm_bench.simulate.dlrm.shape import SOURCE, Dlrm
from moecomm_bench.simulate.nic import SOURCES, ModelNic

MOST_GPUS = 1 << 16
# No measurement stands behind these; the JSON and the page list them.
ASSUMPTIONS = (
    "The fused kernel through a NIC is not written: moecomm.overlap runs inside one NVLink domain. Its puts are "
    "assumed to overlap the lookups as stores over NVLink were measured to.",
    "NCCL reaches the same share of the NIC's line rate as rows of expert parallelism do in published times.",
    "Tables are whole on one rank. All ranks have as many samples and the busiest rank counts. Indices are random, and "
    "caches hold as much of a table as they did of the measured ones, of 100000 rows.",
    "The update of tables reads and writes each row that was looked up, at the measured bandwidth of lookups. It is "
    "plain SGD, without sorting indices and without state of an optimizer.",
    "MLPs: products at measured speed, 16-bit; bias, activation and loss cost nothing. The backward pass has two "
    "products a layer.",
    "The bottom MLP runs beside the unfused all-to-all, and before the fused kernel.",
    "One network operation uses the NIC at a time. The all-reduce of MLP gradients, in one piece and in the dtype of "
    "the tables, waits for the all-to-all of gradients, and overlaps the update of tables.",
    "Indices are where they are needed: no all-to-all of indices.",
)


def predict(model: Dlrm, gpu: Gpu, nic: ModelNic, domains: list[int], ranks: int = 1) -> dict[str, Any]:
    """Return {benchmark, prediction, case, inputs, assumptions, rows}.

    A row is {domains, ranks, gpus, lookups, saving, saving_over_torch, forms}: `lookups` of the busiest rank, and in
    `forms` each form's {us, phases: [{name, us, start_us}]}. A saving is 1 - fused / unfused, or / torch.

    Args:
        model: sizes.
        gpu: every GPU.
        nic: of every GPU.
        domains: numbers of NVLink domains.
        ranks: GPUs of a domain.

    Raises:
        BadInput: a size is out of range.
    """
    model.check()
    nic.check()
    if not domains or min(domains) < 1 or max(domains) * ranks > MOST_GPUS:
        raise BadInput("domains, ranks", (domains, ranks), f"1 or more each, and at most {MOST_GPUS} GPUs")
    return {
        "benchmark": "simulate-dlrm",
        "prediction": "by a model, not measured",
        "case": asdict(model),
        "case_defaults_from": SOURCE,
        "inputs": {"gpu": asdict(gpu), "nic": asdict(nic), "nic_defaults_from": SOURCES},
        "assumptions": list(ASSUMPTIONS),
        "rows": [_row(model, Cluster(gpu, nic, number, ranks)) for number in domains],
    }


def saving(model: Dlrm, cluster: Cluster, form: str = FUSED, base: str = UNFUSED) -> float:
    """Return the part of an iteration in the form `base` that `form` saves."""
    return 1 - iteration(model, cluster, form).us / iteration(model, cluster, base).us


def _row(model: Dlrm, cluster: Cluster) -> dict[str, Any]:
    forms = {form: iteration(model, cluster, form) for form in FORMS}
    return {
        "domains": cluster.domains,
        "ranks": cluster.ranks,
        "gpus": cluster.gpus,
        "lookups": asdict(model.lookups(cluster.gpus)),
        "saving": round(saving(model, cluster), 4),
        "saving_over_torch": round(saving(model, cluster, base=TORCH), 4),
        "forms": {
            form: {
                "us": round(timeline.us, 3),
                "phases": [
                    {"name": one.name, "us": round(one.us, 3), "start_us": round(timeline.starts[one.name], 3)}
                    for one in timeline.phases
                ],
            }
            for form, timeline in forms.items()
        },
    }
