"""Pages of their own: templates of `runlog/assets`, with all styles and scripts inside.

What a model wrote is treated as hostile: it travels as JSON in which `<`, `>` and `&` are escaped, and it reaches the
page as text nodes alone.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runlog import store
from runlog.extras import missing_extra_message

try:
    import jinja2
except ImportError as error:
    raise ImportError(missing_extra_message("the report needs jinja2", "report")) from error


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=lambda name: name is None or name.endswith(".j2"),  # styles and scripts stand as they are
        loader=jinja2.PackageLoader("runlog", "assets"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, data: Mapping[str, Any], live: bool = False, **values: Any) -> str:
    """Return a page with `data` for its script; `live`: one that asks its server for what is new."""
    return _templates().get_template(template).render(data=script_json(data), live=live, **values)


def write(target: Path, page: str) -> Path:
    """Write a page in place of an older one, at once; return its path."""
    partial = target.with_suffix(".writing")
    partial.write_text(page, encoding="utf-8")
    return partial.replace(target)


def script_json(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return JSON that is safe inside a <script> element, whatever its strings hold."""
    text = json.dumps(store.plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def size(value: Any) -> int:
    """Return the bytes that a value takes in a page."""
    return len(script_json(value).encode())
