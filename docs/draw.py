"""Draw the pictures of docs/architecture.md: `./bazelw run //docs:draw`.

A picture is boxes and arrows in a coordinate system of its own; the texts are the names of the code.
"""

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

FONT = "font-family='Helvetica, Arial, sans-serif'"
COLORS = {"app": "#fde9c9", "lib": "#dceaf7", "data": "#e6f4e1", "none": "#ffffff"}


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines below it; x, y are of its upper left corner."""

    name: str
    x: int
    y: int
    width: int
    lines: tuple[str, ...] = ()
    kind: str = "lib"

    @property
    def height(self) -> int:
        """The height of the rectangle, by its lines."""
        return 34 + 17 * len(self.lines)

    def svg(self) -> str:
        """Return the rectangle and its texts."""
        shape = (
            f"<rect x='{self.x}' y='{self.y}' width='{self.width}' height='{self.height}' rx='6' "
            f"fill='{COLORS[self.kind]}' stroke='#555'/>\n"
            f"<text x='{self.x + 12}' y='{self.y + 22}' font-size='15' font-weight='bold' {FONT}>"
            f"{escape(self.name)}</text>"
        )
        out = [shape]
        for number, line in enumerate(self.lines):
            y = self.y + 41 + 17 * number
            out.append(f"<text x='{self.x + 12}' y='{y}' font-size='12.5' fill='#333' {FONT}>{escape(line)}</text>")
        return "\n".join(out)


@dataclass(frozen=True)
class Arrow:
    """A line through points, with a head at its end, and a label near the middle of its first part."""

    points: tuple[tuple[int, int], ...]
    label: str = ""

    def svg(self) -> str:
        """Return the line and its label."""
        path = " ".join(f"{x},{y}" for x, y in self.points)
        line = f"<polyline points='{path}' fill='none' stroke='#333' stroke-width='1.4' marker-end='url(#head)'/>"
        if not self.label:
            return line
        (x0, y0), (x1, y1) = self.points[:2]
        anchor = "middle" if y0 == y1 else "start"
        x, y = ((x0 + x1) // 2, y0 - 7) if y0 == y1 else (x0 + 8, (y0 + y1) // 2 + 4)
        return (
            line + f"\n<text x='{x}' y='{y}' font-size='12.5' text-anchor='{anchor}' {FONT}>{escape(self.label)}</text>"
        )


def picture(boxes: list[Box], arrows: list[Arrow], width: int, height: int) -> str:
    """Return the whole SVG file."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>\n"
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0,0 L10,5 L0,10 z' fill='#333'/></marker></defs>\n"
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>\n"
    )
    return head + "\n".join(item.svg() for item in [*arrows, *boxes]) + "\n</svg>\n"


def architecture() -> str:
    """Return the drawing of the libraries, the apps, and which may import which."""
    boxes = [
        Box(
            "apps: grpo, sft",
            20,
            20,
            820,
            ("thin: they compose the libraries below, and may import all of them",),
            "app",
        ),
        Box("schedules", 20, 110, 260, ("sync, one step off, fully async", "weight sync and its checks")),
        Box("runplan", 300, 110, 280, ("memory, time and requirements", "of a run, from its configs")),
        Box("runlog", 640, 110, 200, ("progress, metrics, report",)),
        Box("rollout", 20, 230, 260, ("generation, episodes, tools", "weight transfer: receiving")),
        Box("objectives", 300, 230, 200, ("advantages, losses,", "KL, off-policy weights")),
        Box("engines", 540, 230, 300, ("families, weights", "one step over executors: FSDP2, ...")),
        Box("dyncp", 600, 350, 240, ("plan, split, attend, merge", "over groups of ranks")),
        Box("chat_tools", 20, 465, 240, ("messages to tokens and masks", "text to tool calls")),
        Box(
            "seqpack",
            360,
            465,
            400,
            (
                "plans, packed batches, costs; the batch and its totals",
                "ops: packed attention, gated delta rule, convolution",
            ),
        ),
    ]
    arrows = [
        Arrow(((140, 178), (140, 230))),
        Arrow(((340, 178), (340, 204), (230, 204), (230, 230))),
        Arrow(((560, 178), (560, 230))),
        Arrow(((140, 298), (140, 465))),
        Arrow(((220, 298), (380, 465))),
        Arrow(((400, 298), (480, 465))),
        Arrow(((720, 298), (720, 350))),
        Arrow(((570, 298), (540, 465))),
        Arrow(((700, 418), (660, 465))),
    ]
    return picture(boxes, arrows, 860, 550)


def step() -> str:
    """Return the drawing of the data of one GRPO step, and of their makers."""
    boxes = [
        Box("tasks", 20, 40, 150, ("prompt, reference", "stable ids"), "app"),
        Box("rollout.run_group", 230, 40, 210, ("group_size episodes:", "ids, mask, log-probs,", "versions, reward")),
        Box("rollout.to_batch", 520, 40, 170, ("jagged TensorDict,", "aligned to input_ids")),
        Box("objectives.advantages", 770, 40, 215, ("one number an episode,", "by its group")),
        Box(
            "engine.train_batch",
            520,
            200,
            450,
            (
                "1  view_batch: lengths, totals, jagged parts, once",
                "2  plan: micro-batches under the cap, the same on every rank",
                "3  executor.train: packed micro-batches, loss summed over all",
                "4  clip, optimizer_step; metrics all-reduced",
            ),
        ),
        Box("engine.export_weights", 230, 232, 210, ("WeightPiece: name, shape,", "offset, flat")),
        Box("sampler", 20, 232, 150, ("weight sync,", "version + 1")),
    ]
    arrows = [
        Arrow(((170, 75), (230, 75)), "task"),
        Arrow(((440, 75), (520, 75)), "episodes"),
        Arrow(((690, 75), (770, 75)), "batch"),
        Arrow(((830, 108), (830, 200)), "batch + advantages"),
        Arrow(((520, 262), (440, 262)), "tensors"),
        Arrow(((230, 262), (170, 262)), "pieces"),
        Arrow(((95, 232), (95, 150), (300, 150), (300, 125)), ""),
    ]
    return picture(boxes, arrows, 1000, 320)


def main() -> None:
    """Write docs/architecture.svg and docs/step.svg."""
    docs = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")) / "docs"
    for name, text in {"architecture": architecture(), "step": step()}.items():
        (docs / f"{name}.svg").write_text(text)
        print(f"docs/{name}.svg")


if __name__ == "__main__":
    main()
