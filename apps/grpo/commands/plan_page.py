"""The plans of all full-size runs as a page: `python -m apps.grpo.commands.plan_page > docs/plans.md`."""

import sys

from apps.grpo import registry
from apps.sft import registry as supervised
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec

HEAD = """# Plans of the full-size runs

What each recipe that restates a launch script would be, from its settings alone: no weights, no device. None of them
has run in full ([status](status.md)). Memory is counted by `libs/runplan/runplan/estimates/peak_memory.py`, with full
micro-batches in which every token trains; on small runs it is held to within a tenth of what the stand-in for NPUs
counts (`//apps/grpo:tests/npu_memory_test`, by hand, passed on 2026-11-26), and of what GPUs held
(`python -m runplan.testing.plan_vs_memory --ranks N`, torch 2.11, megatron-core 0.19.2; one H100 and two H200,
2026-11-26; packed lengths 12 to 1,090, in the last two 5 to 3,000, layers recomputed, bfloat16; the runs below the line
were chosen after the arithmetic, of which only the head of dense models under Megatron has changed since):

| backend | model | GPUs | planned MiB | measured MiB | |
| --- | --- | --- | --- | --- | --- |
| FSDP2 | dense, 96 layers | 1 | 1474.9 | 1515.2 | -2.7% |
| FSDP2 | dense, 24 layers, vocabulary 65,536 | 1 | 1076.8 | 998.7 | +7.8% |
| FSDP2 | attention alone, 96 layers | 1 | 1703.9 | 1659.4 | +2.7% |
| FSDP2 | 64 experts, 16 layers | 1 | 1924.5 | 1887.5 | +2.0% |
| Megatron | dense, 96 layers | 1 | 1934.9 | 1938.9 | -0.2% |
| Megatron | 64 experts, 16 layers | 1 | 2567.5 | 2536.7 | +1.2% |
| Megatron | attention alone, 24 layers, vocabulary 65,536 | 1 | 4910.7 | 4842.1 | +1.4% |
| FSDP2 | dense, 96 layers | 2 | 745.8 | 788.1 | -5.4% |
| FSDP2 | 64 experts, 16 layers | 2 | 972.3 | 1020.2 | -4.7% |
| --- | | | | | |
| FSDP2 | dense, 40 layers, vocabulary 32,768 | 1 | 1345.7 | 1324.0 | +1.6% |
| FSDP2 | 32 experts, 12 layers, vocabulary 16,384 | 1 | 2151.8 | 2062.5 (2026-11-25) | +4.3% |
| Megatron | dense, 40 layers, vocabulary 32,768 | 1 | 1768.6 | 1668.1 | +6.0% |
| FSDP2 | dense, 40 layers, vocabulary 32,768 | 2 | 688.8 | 702.8 (2026-11-23) | -2.0% |
| Megatron, TP 2 | dense, 24 layers, vocabulary 65,536 | 2 | 2352.6 | 2337.1 | +0.7% |
| Megatron, EP 2 | 64 experts, 16 layers | 2 | 1402.3 | 1402.8 | -0.0% |
| Megatron | 32 experts, 12 layers, vocabulary 16,384 | 1 | 2541.1 | 2473.1 | +2.7% |
| Megatron | 16 wide experts, 8 layers, vocabulary 32,768 | 1 | 2816.4 | 2729.0 | +3.2% |

Layers were recomputed in all of these runs, those of the stand-in too: what a plan says of activations that are "all
kept" was measured on no GPU.

Seconds of a step are operations, as `seqpack` counts them, at the share of the peak that one small model with layers of
its kind reached (`libs/runplan/runplan/estimates/rates.py`; a test holds each share to the tables of
[speed](engines-speed.md) and [Megatron](engines-megatron.md#speed), 8,192 tokens a device): dense hybrids 47 %
compiled, 37 % with sharded weights, 25 % not compiled; with experts 20 % (1.0B, 141 ms); under Megatron 33 % with fused
pieces and 24 % without, its experts not measured. Larger models may reach more, devices that talk over a network less.
No NPU was measured: there a plan has the operations and the division.

This page is what `python -m apps.grpo.commands.plan_page` prints, and a test holds it to that; `--recipe NAME --plan`
also says what a run still lacks.
"""


def full_size_runs() -> list[RunSpec]:
    """Return the specs of the recipes that restate a launch script, by name."""
    specs = [registry.spec_of(recipe.config) for recipe in registry.recipes().values() if recipe.origin]
    specs += [supervised.spec_of(recipe.config) for recipe in supervised.recipes().values() if recipe.origin]
    return sorted(specs, key=lambda spec: spec.recipe)


def page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD]
    for spec in full_size_runs():
        text = "\n".join(make_plan(spec).derived)
        parts.append(f"## {spec.recipe}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
