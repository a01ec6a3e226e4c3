"""The plans of all full-size runs as a page: `python -m apps.grpo.plans > docs/plans.md`."""

import sys

from apps.common.plan.report import make_plan
from apps.common.plan.work import Work
from apps.grpo import registry
from apps.sft import registry as supervised

HEAD = """# Plans of the full-size runs

What each recipe that restates a launch script would be, from its settings alone: no weights, no device. None of them
has run in full ([status](status.md)). Memory is counted by `apps/common/plan/peak.py`, with full micro-batches in which
every token trains; on small runs it is held to within a tenth of what the stand-in for NPUs counts
(`//apps/grpo:npu_memory_test`, by hand), on a GPU it has not been measured yet. This
page is what `python -m apps.grpo.plans` prints,
and a test holds it to that; `--recipe NAME --plan` also says what a run still lacks.
"""


def works() -> list[Work]:
    """Of the recipes that restate a script, by name."""
    found = [registry.work_of(recipe.config) for recipe in registry.recipes().values() if recipe.origin]
    found += [supervised.work_of(recipe.config) for recipe in supervised.recipes().values() if recipe.origin]
    return sorted(found, key=lambda work: work.recipe)


def page() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    for work in works():
        text = "\n".join(make_plan(work).derived)
        parts.append(f"## {work.recipe}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
