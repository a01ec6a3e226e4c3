"""Print which ways of packing keep sequences apart in stock transformers models, by family, as a Markdown table.

    ./bazelw run //libs/seqpack:isolation_table          (the newest supported; isolation_table_tf517: the oldest)
    PYTHONPATH=libs/seqpack OMP_NUM_THREADS=1 python libs/seqpack/benchmarks/isolation_table.py

Tiny random models, five sequences in one row, checked by `seqpack.testing.isolation.check_packing`. A cell says
`right`; `LEAKS` (changing one sequence moves another) or `wrong, no leak`, each with the relative error of the worst
sequence's logits and of the worst parameter's gradient; or that the model refuses. Two versions in one table:

    ... isolation_table.py --save a.json    (in each environment)
    ... isolation_table.py --merge a.json b.json
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from seqpack.batches.packed import PackedBatch
from seqpack.testing.isolation import PackedForward, check_packing

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_ssm": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def hybrid(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": [f"{kind}_attention" for kind in kinds]}


FAMILIES = {
    "Llama": ("Llama", {**SIZES, **HEADS, "num_hidden_layers": 2}),
    "Qwen3": ("Qwen3", {**SIZES, **HEADS, "num_hidden_layers": 2, "head_dim": 16}),
    "Gemma 3 (sliding window)": (
        "Gemma3",
        {**SIZES, **HEADS, **hybrid("sliding", "full"), "head_dim": 16, "sliding_window": 8},
    ),
    "Qwen3.5, full attention only": ("Qwen3_5", {**SIZES, **HEADS, **DELTA, **hybrid("full", "full")}),
    "Qwen3.5": ("Qwen3_5", {**SIZES, **HEADS, **DELTA, **hybrid("linear", "full")}),
    "Qwen3.5 MoE": (
        "Qwen3_5Moe",
        {**SIZES, **HEADS, **DELTA, **EXPERTS, **hybrid("linear", "full"), "shared_expert_intermediate_size": 16},
    ),
    "Qwen3-Next": (
        "Qwen3Next",
        {**SIZES, **HEADS, **DELTA, **EXPERTS, **hybrid("linear", "full"), "shared_expert_intermediate_size": 16},
    ),
    "Mamba 2": (
        "Mamba2",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16,
         "n_groups": 2, "expand": 2, "chunk_size": 16},
    ),
    "Falcon-H1": ("FalconH1", {**SIZES, **HEADS, **MAMBA, "num_hidden_layers": 2, "mamba_chunk_size": 16}),
    "Bamba": (
        "Bamba",
        {**SIZES, **HEADS, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
         "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16},
    ),
    "Jamba": (
        "Jamba",
        {**SIZES, **HEADS, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8},
    ),
}  # fmt: skip


def build(prefix: str, options: dict[str, Any]) -> nn.Module:
    """Return the family's model for text, with random weights."""
    text = f"{prefix}TextConfig"
    config = getattr(transformers, text if hasattr(transformers, text) else f"{prefix}Config")(**options)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return model


def packing_of(**choices: bool) -> PackedForward:
    """Return a packed forward that passes the arguments named by `choices`."""

    def packed(model: nn.Module, row: PackedBatch) -> torch.Tensor:
        ids, cu = row.values["input_ids"][None], row.cu_seqlens
        number = torch.repeat_interleave(torch.arange(row.num_sequences, dtype=torch.int32), cu.diff().long())
        call: dict[str, Any] = {"position_ids": row.position_ids[None]}
        if choices.get("no_cache", True):
            call["use_cache"] = False
        if choices.get("ones"):
            call["attention_mask"] = torch.ones_like(ids)
        if choices.get("block"):
            allowed = (number[:, None] == number) & torch.ones(len(number), len(number), dtype=torch.bool).tril()
            call["attention_mask"] = allowed[None, None]
        if choices.get("boundaries"):
            call |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "seq_idx": number[None]}
            call |= {"max_length_q": row.max_seqlen, "max_length_k": row.max_seqlen}
        logits: torch.Tensor = model(input_ids=ids, **call).logits
        return logits

    return packed


WAYS = {
    "positions, no cache": packing_of(),
    "positions, cache left on": packing_of(no_cache=False),
    "positions, mask of ones": packing_of(ones=True),
    "4-D block mask": packing_of(block=True),
    "boundaries (`cu_seq_lens`, `seq_idx`)": packing_of(boundaries=True),
}


def cell(model: nn.Module, packed: PackedForward) -> tuple[str, str]:
    """Return one cell of the table, and the first layer whose packed output differs from that of sequences alone."""
    try:
        report = check_packing(model, packed)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{type(model).__name__}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return f"refuses ({type(error).__name__})", ""
    if report.isolated:
        return "right", ""
    origin = f"`{report.origin.name}` ({report.origin.kind})" if report.origin else ""
    verdict = "LEAKS" if report.moved else "wrong, no leak"
    assert report.worst_grad is not None
    return f"{verdict} ({max(report.logits):.0e}, {report.worst_grad[1]:.0e})", origin


def measure(families: Iterable[str]) -> dict[str, list[str]]:
    """Return {family: the cells of its row} for the installed transformers."""
    rows = {}
    for family in families:
        model = build(*FAMILIES[family])
        cells, origins = zip(*(cell(model, packed) for packed in WAYS.values()), strict=True)
        rows[family] = [*cells, origins[0]]
    return rows


def merged(results: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """Join the cells of several versions: one text where the verdicts agree, else each with its version."""
    versions = list(results)

    def join(cells: tuple[str, ...]) -> str:
        if len({text.split(" (")[0] for text in cells}) == 1:
            return cells[-1]
        return "; ".join(f"{version}: {text}" for version, text in zip(versions, cells, strict=True))

    families = results[versions[0]]
    return {
        family: [join(cells) for cells in zip(*(results[v][family] for v in versions), strict=True)]
        for family in families
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--save", type=Path, help="also write the cells to this JSON file")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="print the table of these JSON files instead of measuring"
    )
    arguments = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.merge:
        results = {key: rows for path in arguments.merge for key, rows in json.loads(path.read_text()).items()}
    else:
        results = {transformers.__version__: measure(arguments.families)}
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=1))
    print(f"transformers {', '.join(results)} without fused kernels\n")
    print(f"| family | {' | '.join(WAYS)} | parts first at |")
    print("|" + " --- |" * (len(WAYS) + 2))
    for family, cells in merged(results).items():
        print(f"| {family} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
