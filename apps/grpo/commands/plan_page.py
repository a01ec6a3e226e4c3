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
counts (`//apps/grpo:tests/npu_memory_test`, by hand), and of what GPUs held
([figures](benchmark_history.md#plan_vs_memory), `python -m runplan.testing.plan_vs_memory --ranks N`).

Layers were recomputed in all of these runs, those of the stand-in too: what a plan says of activations that are "all
kept" was measured on no GPU.

Seconds of a step are operations, as `seqpack` counts them, at the share of the peak that one small model with layers of
its kind reached (`libs/runplan/runplan/estimates/rates.py`; a test holds each share to the tables of
[speed](engines-speed.md) and [Megatron](engines-megatron.md#speed), `8192` tokens a device): dense hybrids 47 %
compiled, 37 % with sharded weights, 25 % not compiled; with experts 20 % (1.0B, 141 ms); under Megatron 33 % with fused
pieces and 24 % without, its experts not measured. Larger models may reach more, devices that talk over a network less.
No NPU was measured: there a plan has the operations and the division.

This page is what `python -m apps.grpo.commands.plan_page` prints, and a test holds it to that. `--plan` behind a
command line of your own (`--recipe NAME` or `--model DIR`, and any flags) prints such a plan, also with what the run
still lacks; it ends with status 1 where the plan has problems.
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
