"""Metrics as curves: which there are, what they are called, how long ones are thinned."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runlog.display import clock_time, shown


@dataclass(frozen=True)
class Kind:
    """How the report shows a metric. `match`: names, or ends of them after a slash; with `{}` for a part of the name,
    which the title repeats. `marks`: drawn as points with first and last named (measured seldom, such as held-out
    accuracy). `always`: shown even if it never changes. `small`: tiny values mean something."""

    title: str
    match: tuple[str, ...]
    unit: str = ""
    marks: bool = False
    percent: bool = False
    always: bool = False
    small: bool = False

    def title_for(self, name: str) -> str | None:
        """Return the title of a metric of this kind; None for any other metric."""
        for pattern in self.match:
            head, _, tail = pattern.partition("{}")
            if head == pattern:
                if name == pattern or name.endswith("/" + pattern):
                    return self.title
            elif name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail):
                return self.title.format(name[len(head) : len(name) - len(tail)])
        return None


KINDS = (
    Kind("Reward", ("reward", "reward/mean"), "mean of the step's episodes", always=True),
    Kind(
        "Held-out accuracy",
        ("eval/accuracy", "held_out_accuracy"),
        "greedy answers",
        marks=True,
        percent=True,
        always=True,
    ),
    Kind("Held-out score", ("eval/score",), "mean reward, greedy answers", marks=True, always=True),
    Kind("Held-out share of {}", ("eval/reward/{}/share",), "of the held-out episodes", percent=True),
    Kind("Held-out reward, {}", ("eval/reward/{}",), "greedy answers", marks=True),
    Kind("Held-out loss", ("eval/loss", "held_out_loss"), "nats a token", marks=True),
    Kind("Reward spread", ("reward/std",), "mean deviation within groups", always=True),
    Kind("Share of {}", ("reward/environment/{}/share",), "of the step's episodes", percent=True),
    Kind("Reward, {}", ("reward/environment/{}",), "mean of its episodes"),
    Kind("Reward part, {}", ("reward/part/{}",), "mean of the step's episodes"),
    Kind("Entropy", ("entropy",), "nats a token", always=True),
    Kind("Response length", ("response/length",), "sampled tokens an episode", always=True),
    Kind("Truncated", ("response/truncated",), "share of episodes that a limit ended", percent=True, always=True),
    Kind("Failed", ("response/failed",), "share of episodes", percent=True, always=True),
    Kind("Calls of {}", ("tool/{}/calls",), "an episode"),
    Kind("Errors of {}", ("tool/{}/errors",), "share of its calls", percent=True),
    Kind("Timeouts of {}", ("tool/{}/timeouts",), "share of its calls", percent=True),
    Kind("Loss", ("loss",)),
    Kind("Trainer against stock", ("proof/log_prob_difference",), "RMS of log-prob differences", marks=True),
    Kind("Trainer against stock, worst", ("proof/log_prob_difference_max",), "maximum", marks=True),
    Kind("Sampler against trainer", ("mismatch/abs", "log_prob_difference"), "mean |log-prob difference|"),
    Kind("Sampler against trainer, worst", ("log_prob_difference_max", "mismatch/abs/max"), "maximum"),
    Kind("KL of sampler and trainer", ("mismatch/kl",), "nats"),
    Kind("KL", ("approx_kl", "kl"), "nats"),
    Kind("Throughput", ("tokens_per_second", "tokens_per_s"), "tokens/s"),
    Kind("Gradient norm", ("grad_norm",)),
    Kind("Learning rate", ("lr", "learning_rate"), small=True),
)
HIDDEN = ("step", "time", "version", "policy_version", "plan_hash")  # counters and names, no curves
ROUNDING = 1e-6  # what is smaller throughout is rounding: no curve to put in front


def kind_of(name: str) -> Kind | None:
    """Return the kind of a metric by its name, perhaps after a prefix ("train/loss"); None for an unknown name."""
    return next((kind for kind in KINDS if kind.title_for(name)), None)


def series(metrics: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of every numeric metric, where it was logged."""
    by_name: dict[str, tuple[list[int], list[float]]] = {}
    for row in metrics:
        for name, value in row.items():
            if name.rsplit("/", 1)[-1] in HIDDEN or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            steps, values = by_name.setdefault(name, ([], []))
            steps.append(int(row["step"]))
            values.append(float(value))
    return by_name


def downsample(steps: Sequence[int], values: Sequence[float], limit: int) -> tuple[list[int], list[float]]:
    """Return at most `limit` points: means of equal intervals, placed at each interval's last step."""
    if len(steps) <= limit:
        return list(steps), list(values)
    xs, ys = [], []
    for i in range(limit):
        low, high = i * len(steps) // limit, (i + 1) * len(steps) // limit
        xs.append(steps[high - 1])
        ys.append(sum(values[low:high]) / (high - low))
    return xs, ys


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the bias-corrected exponential mean over about `span` points."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        out.append(total / weight)
    return out


def noisy(values: Sequence[float]) -> bool:
    """Return whether a smoothed line helps: at least a dozen points whose changes far exceed their trend."""
    if len(values) < 12:
        return False
    travelled = sum(abs(b - a) for a, b in itertools.pairwise(values))
    return travelled > 3 * (max(values) - min(values))


def charts(metrics: Sequence[Mapping[str, Any]], max_points: int, keep: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the report's charts: known kinds first, in their order, then the others by name. A metric that never
    changes is left out (`unchanged` returns it), except of the kinds that are always shown, and of names in `keep`."""
    made = []
    for name, (steps, values) in series(metrics).items():
        kind = kind_of(name)
        if name not in keep and _is_flat(kind, values):
            continue
        xs, ys = downsample(steps, values, max_points)
        marks = kind.marks if kind else name.startswith("eval/")
        percent = kind is not None and kind.percent
        word = _worded(kind)
        made.append(
            {
                "name": name,
                "title": (kind.title_for(name) if kind else None) or name,
                "unit": kind.unit if kind else "",
                "known": kind is not None,
                "rounding": not (kind and (kind.always or kind.small)) and max(map(abs, ys)) <= ROUNDING,
                "marks": marks,
                "percent": percent,
                "x": xs,
                "y": [_short(y) for y in ys],
                "smooth": [_short(y) for y in smooth(ys, max(5, len(ys) // 20))] if not marks and noisy(ys) else [],
                "first": word(ys[0]),
                "last": word(ys[-1]),
            }
        )
    return sorted(made, key=_place)


def unchanged(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, value) of metrics that `charts` leaves out as they never changed: known kinds, then by name.

    A tool whose every call fails never changes, and people look for it.
    """
    flat = {name: values for name, (_, values) in series(metrics).items() if _is_flat(kind_of(name), values)}
    rows = []
    for name, values in flat.items():
        kind = kind_of(name)
        title = (kind.title_for(name) if kind else None) or name
        rows.append((KINDS.index(kind) if kind else len(KINDS), title, _worded(kind)(values[-1])))
    return [(title, value) for _, title, value in sorted(rows)]


def _is_flat(kind: Kind | None, values: Sequence[float]) -> bool:
    """Return whether a metric has no chart as it never changed."""
    return len(set(values)) < 2 and not (kind and kind.always)


def _worded(kind: Kind | None) -> Callable[[float], str]:
    """Return the function that formats values of a kind."""
    return _percent if kind is not None and kind.percent else shown


def _place(chart: Mapping[str, Any]) -> tuple[bool, int, str]:
    """Return a sort key: known kinds first, in their order; rounding errors last."""
    kind = kind_of(chart["name"])
    return chart["rounding"], KINDS.index(kind) if kind else len(KINDS), chart["name"]


def key_figures(metrics: Sequence[Mapping[str, Any]], episodes: int | None) -> list[dict[str, str]]:
    """Return the few numbers at the top of the page: label, value and a note; `episodes`: how many are kept, if the
    number of steps is among them."""
    by_name = series(metrics)
    by_title = {kind.title: by_name[name] for name in reversed(by_name) if (kind := kind_of(name))}
    tiles = []
    if accuracy := by_title.get("Held-out accuracy"):
        first, last = accuracy[1][0], accuracy[1][-1]
        tiles.append(
            _tile("Held-out accuracy", _percent(last), f"{_percent(first)} before, {100 * (last - first):+.1f} points")
        )
    elif score := by_title.get("Held-out score"):
        tiles.append(_tile("Held-out score", shown(score[1][-1]), f"{shown(score[1][0])} before"))
    elif loss := by_title.get("Held-out loss"):
        tiles.append(_tile("Held-out loss", shown(loss[1][-1]), f"{shown(loss[1][0])} before"))
    if reward := by_title.get("Reward"):
        tenth = max(1, len(reward[1]) // 10)
        start, end = (sum(part) / len(part) for part in (reward[1][:tenth], reward[1][-tenth:]))
        tiles.append(_tile("Reward", shown(end), f"{shown(start)} at first, {tenth}-step means"))
    if episodes is not None:
        kept = f"{episodes:,} episodes kept" if episodes else "no episodes kept"
        tiles.append(_tile("Steps", f"{metrics[-1]['step']:,}", kept))
    if rate := by_title.get("Throughput"):
        ordered = sorted(rate[1])
        tiles.append(_tile("Tokens per second", shown(float(round(ordered[len(ordered) // 2]))), "median step"))
    times = [float(row["time"]) for row in metrics if isinstance(row.get("time"), int | float)]
    if len(times) > 1:
        tiles.append(_tile("Time", clock_time(times[-1] - times[0]), "first to last step"))
    return tiles


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(value: float) -> float:
    return float(f"{value:.6g}")
