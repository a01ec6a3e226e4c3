"""A rendered conversation to look at: its tokens coloured by mask, in a terminal or as one HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from chat_tools.rendering.render import Rendered

_LONGEST_CHARACTER = 8  # tokens; a character of more is shown as it decodes
_RESET = "\x1b[0m"
_TRAINED = ("\x1b[30;48;5;114m", "\x1b[30;48;5;150m")  # two greens, token by token
_CONTEXT = ("\x1b[38;5;250;48;5;236m", "\x1b[38;5;250;48;5;239m")
_MEDIA = ("\x1b[30;48;5;117m", "\x1b[30;48;5;153m")


def pieces(rendered: Rendered, tokenizer: Any = None) -> Iterator[tuple[int, int, str]]:
    """Yield (first token, end, text): one token each, or the few that make up one character."""
    tokenizer = tokenizer or (rendered.template.tokenizer if rendered.template else None)
    if tokenizer is None:
        raise ValueError("give the tokenizer: this conversation was not made by render()")
    ids = rendered.ids
    start = 0
    while start < len(ids):
        end = start + 1
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        while "\ufffd" in text and end < len(ids) and end - start < _LONGEST_CHARACTER:
            end += 1
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        yield start, end, text
        start = end


def _colour(rendered: Rendered, token: int) -> str:
    if rendered.assistant_mask[token]:
        return "trained"
    return "media" if rendered.mm_token_type_ids and rendered.mm_token_type_ids[token] else "context"


def terminal_view(rendered: Rendered, tokenizer: Any = None) -> str:
    """Return the conversation with ANSI colours: trained tokens green, media blue, the others grey."""
    colours = {"trained": _TRAINED, "context": _CONTEXT, "media": _MEDIA}
    parts = []
    for number, (start, _, text) in enumerate(pieces(rendered, tokenizer)):
        colour = colours[_colour(rendered, start)][number % 2]
        lines = _visible(text).split("\n")
        parts.append("\n".join(f"{colour}{line}{_RESET}" if line else "" for line in lines))
    return "".join(parts) + f"{_RESET}\n{summary(rendered)}\n"


def _visible(text: str) -> str:
    """Return text with line ends and cursor movements made visible."""
    text = text.replace("\r", "\u240d").replace("\t", "\u21e5   ").replace("\n", "\u23ce\n")
    return "".join(c if c == "\n" or c >= " " else chr(0x2400 + ord(c)) for c in text)


def summary(rendered: Rendered) -> str:
    """Return a line with the number of trained tokens, and the problems."""
    trained, count = sum(rendered.assistant_mask), len(rendered.ids)
    share = f"{100 * trained / count:.0f}%" if count else "none"
    line = f"{count} tokens, {trained} trained ({share}), {len(rendered.spans)} assistant turns"
    return "\n".join([line, *(f"problem: {problem}" for problem in rendered.problems)])


_STYLE = """
:root { color-scheme: light dark;
  --page: #fbfbf9; --ink: #22252a; --soft: #6b7078; --line: #dcdcd6;
  --trained: #bfe6c4; --trained2: #a5d8ad; --context: #ececea; --context2: #e0e0dc;
  --media: #c6dcf5; --media2: #aecdef; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --page: #17191c; --ink: #e8e8e4; --soft: #9aa0a8; --line: #34383e;
  --trained: #27553a; --trained2: #2f6645; --context: #24272b; --context2: #2c3035;
  --media: #24476b; --media2: #2c567f; --bad: #f2a19a; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.15rem; margin: 0 0 .2rem; } h2 { font-size: .95rem; margin: 1.8rem 0 .4rem; }
p { margin: .1rem 0; color: var(--soft); } .problem { color: var(--bad); font-weight: 600; }
.legend span { padding: .05rem .45rem; border-radius: .25rem; color: var(--ink); margin-right: .4rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13.5px/1.75 ui-monospace, "DejaVu Sans Mono", monospace;
  border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; margin: .5rem 0; }
i { font-style: normal; border-radius: .15rem; padding: .1rem 0; } i:hover { outline: 1.5px solid currentColor; }
i b { font-weight: 400; opacity: .4; }
.trained { background: var(--trained); } .trained.odd { background: var(--trained2); }
.context { background: var(--context); } .context.odd { background: var(--context2); }
.media { background: var(--media); } .media.odd { background: var(--media2); }
"""


def html_view(conversations: Sequence[Rendered], title: str = "Conversation", tokenizer: Any = None) -> str:
    """Return a self-contained page: every token coloured by mask, with its number and id on hovering."""
    body = []
    for number, rendered in enumerate(conversations):
        if len(conversations) > 1:
            body.append(f"<h2>{number}</h2>")
        body += [
            f"<p{' class=problem' if line.startswith('problem') else ''}>{html.escape(line)}</p>"
            for line in summary(rendered).splitlines()
        ]
        body.append(
            "<pre>" + "".join(_token(rendered, n, *p) for n, p in enumerate(pieces(rendered, tokenizer))) + "</pre>"
        )
    legend = "".join(
        f'<span class="{kind}">{words}</span>'
        for kind, words in (("trained", "trained"), ("context", "not trained"), ("media", "image or video"))
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="legend">{legend}</p>{"".join(body)}</main></body></html>\n'
    )


def _token(rendered: Rendered, number: int, start: int, end: int, text: str) -> str:
    shown = html.escape(_visible(text)).replace("\u23ce", "<b>\u23ce</b>")
    ids = " ".join(str(i) for i in rendered.ids[start:end])
    odd = " odd" if number % 2 else ""
    return f'<i class="{_colour(rendered, start)}{odd}" title="token {start}: id {ids}">{shown}</i>'
