"""The names of flags: those of the field where a library's field has another one, and the names of earlier versions."""

import difflib
from collections.abc import Iterable, Iterator, Sequence

from runplan.settings import FLAGS

PREFIXES = (
    *((part, "") for part in ("data.", "plugins.", "teachers.", "shaping.", "cluster.")),
    *(("engine.lora.", "lora."), ("engine.", "trainer.")),
)
"""Prefixes of dotted paths, and those of their flags; the first that fits counts."""
NAMES = {
    "steps": "max-steps",
    "tracker": "logging.tracker",
    "log_groups": "logging.groups",
    "log_failures": "logging.failures",
    "engine.allow_untested": "allow-untested",  # it is of all parts, not of the engine alone
    "engine.family": "model-family",
    "engine.family_options": "model-family-options",
    "engine.lr": "learning-rate",
    "engine.tensor_parallel": "parallel.tensor",
    "engine.context_parallel": "parallel.context",
    "engine.pipeline_parallel": "parallel.pipeline",
    "engine.virtual_pipeline_parallel": "parallel.virtual-pipeline",
    "engine.expert_parallel": "parallel.expert",
    "engine.expert_tensor_parallel": "parallel.expert-tensor",
    "engine.first_stage_layers": "parallel.first-stage-layers",
    "engine.last_stage_layers": "parallel.last-stage-layers",
    "engine.shard_ranks": "parallel.shard-ranks",
    "objective.loss": "loss",
    "objective.loss_options": "loss-options",
    "objective.policy_loss_options": "loss-options",
    **{f"cluster.{path}": name for path, name in FLAGS.items()},
}
"""Flags that are not made of their path."""
EARLIER = {
    "cluster.environment": "env",
    "control": "control-run",
    "engine.allow-untested": "allow-untested",
    "keep-failures": "logging.failures",
    "keep-groups": "logging.groups",
    "processes": "nproc-per-node",
    "prompts": "prompts-per-step",
    "schedule": "schedule.mode",
}
"""Earlier names that no path gives."""
SHORT = frozenset({"schedule"})
"""Names that may be used without a word: they are aliases."""


def flag(path: str) -> str:
    """Return the flag of a dotted path."""
    if path in NAMES:
        return "--" + NAMES[path]
    before, after = next((pair for pair in PREFIXES if path.startswith(pair[0])), ("", ""))
    return "--" + after + path.removeprefix(before).replace("_", "-")


def earlier_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the names of earlier versions, with dashes, each with today's."""
    renamed = {f"--{old}": f"--{new}" for old, new in EARLIER.items()}
    for path in paths:
        whole = path.replace("_", "-")
        names = {whole, *(whole.removeprefix(part) for part in ("data.", "plugins.", "cluster.") if whole[0] != ".")}
        renamed |= {f"--{name}": flag(path) for name in names}
    today = {flag(path) for path in paths}
    positive = {old: new for old, new in renamed.items() if old not in today}
    return positive | {_negative(old): _negative(new) for old, new in positive.items()}


def unknown_flags(argv: Sequence[str], known: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    """Yield a text for each word that looks like a flag and is none, with the nearest names."""
    taken, earlier = {*known, *map(_negative, known)}, earlier_names(paths)
    names = {name: name for name in known} | {old: new for old, new in earlier.items() if new in known}
    lasts = {name.rpartition(".")[2].removeprefix("--"): name for name in known}
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and name not in taken:
            near = [names[one] for one in difflib.get_close_matches(name, names, n=3)]
            last = name.rpartition(".")[2].removeprefix("--")
            near += [lasts[one] for one in difflib.get_close_matches(last, lasts, n=2)]
            near += [one for one in known if last in one]
            meant = f": perhaps {' or '.join([*dict.fromkeys(near)][:3])}" if near else ""
            yield f"there is no flag {word.partition('=')[0]}{meant}"


def _negative(name: str) -> str:
    before, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{before}{dot}no-{last}"


def with_current_names(argv: Sequence[str], paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line with earlier names of flags replaced, and a line for each of them."""
    names, words, lines = earlier_names(paths), [], []
    for word in argv:
        name, equals, value = word.partition("=")
        new = names.get(name.replace("_", "-")) if name.startswith("--") else None
        words.append(word if new is None else f"{new}{equals}{value}")
        if new is not None and name.removeprefix("--") not in SHORT:
            lines.append(f"{name} is called {new} now")
    return words, list(dict.fromkeys(lines))
