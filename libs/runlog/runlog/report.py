"""One self-contained page about a run: curves, a browser of sampled episodes, the configuration.

What a model wrote is treated as hostile: it travels as JSON in which `<`, `>` and `&` are escaped, and it reaches the
page as text nodes alone. Sizes are bounded whatever the run's length, and the page says what was left out.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from runlog import store
from runlog.curves import charts, headline
from runlog.episodes import view, within

REPORT = "report.html"


def write_report(
    run_dir: Path | str,
    title: str | None = None,
    max_points: int = 1500,
    max_episodes: int = 500,
    max_tokens: int = 1200,
    max_total_tokens: int = 120_000,
) -> Path:
    """Write `report.html` into the run folder and return its path. Needs the extra `tessera-runlog[report]`.

    A curve keeps at most `max_points` points (means of equal stretches), the browser at most `max_episodes` episodes
    spread over the run and `max_total_tokens` tokens in all, an episode at most `max_tokens` (its middle is cut out).
    ValueError: the folder has no metrics.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError('the report needs "tessera-runlog[report]" (jinja2 and plotly); install it') from error
    run_dir = Path(run_dir)
    metrics = store.read_metrics(run_dir)
    if not metrics:
        raise ValueError(f"{run_dir / store.METRICS} is missing or empty; log metrics before writing a report")
    logged, episodes = store.read_spread(run_dir / store.EPISODES, max_episodes)
    shown = within([view(e, i, max_tokens) for i, e in episodes], max_total_tokens)
    data = {
        "charts": charts(metrics, max_points),
        "episodes": shown,
        "episodes_logged": logged,
    }
    assets = files("runlog") / "assets"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((assets / "report.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        title=title or run_dir.resolve().name,
        tiles=headline(metrics, logged),
        episodes=logged,
        config=flat_config(_config(run_dir)),
        data=_script_json(data),
        css=(assets / "report.css").read_text(encoding="utf-8"),
        js=(assets / "report.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    path = run_dir / REPORT
    path.write_text(page, encoding="utf-8")
    return path


def _config(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / store.CONFIG
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def flat_config(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested configuration as (dotted name, value) rows, in its own order."""
    if isinstance(config, Mapping) and config:
        rows = []
        for name, value in config.items():
            rows += flat_config(value, f"{prefix}.{name}" if prefix else str(name))
        return rows
    if not prefix:
        return []
    return [(prefix, config if isinstance(config, str) else json.dumps(config, ensure_ascii=False))]


def _script_json(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON that may stand inside a <script> element, whatever its strings hold."""
    text = json.dumps(store.plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
