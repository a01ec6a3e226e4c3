"""Pictures with a question about them, drawn on the fly: how many shapes there are, and how high a bar of a plot is.

A picture is 4 x 4 cells of 8 pixels. The stream of problems has no end, and whether one is held out depends on the
picture and its question alone, so no seed, shard or restart can mix the two sides.
"""

import base64
import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

CELLS, CELL = 4, 8
HELD_OUT_PARTS = 16  # one problem in so many is held out
SHAPES = {"s": "squares", "d": "discs"}
SHAPE_COLORS = ((220, 40, 40), (40, 140, 60), (40, 70, 220))
BAR = (40, 70, 220)
MOST = 5  # of one shape in a picture
HIGHEST = 7  # of a bar, each step half a cell


@dataclass(frozen=True, slots=True)
class ImageProblem:
    """A picture and a question with one right answer. `spec` has a letter a cell, or a digit a bar; a digit after a
    letter is its colour."""

    spec: str
    question: str
    answer: str

    @property
    def solution(self) -> str:
        """The reply in a demonstration."""
        return f"\\boxed{{{self.answer}}}"

    @property
    def image(self) -> str:
        """The picture, a PNG as a `data:` URI."""
        return _data_uri(draw(self.spec))


def resized(problem: ImageProblem, size: tuple[int, int]) -> str:
    """Return the problem's picture in another width and height (pixels)."""
    return _data_uri(draw(problem.spec).resize(size))


def _data_uri(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def draw(spec: str) -> Image.Image:
    """Draw `ImageProblem.spec`."""
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    if spec.isdigit():
        for column, height in enumerate(map(int, spec)):
            left, bottom = column * CELL, CELLS * CELL
            if height:
                pen.rectangle((left + 1, bottom - height * CELL // 2, left + CELL - 2, bottom - 1), fill=BAR)
        return image
    for place, (shape, ink) in enumerate(zip(spec[::2], spec[1::2], strict=True)):
        left, top = place % CELLS * CELL, place // CELLS * CELL
        box = (left + 1, top + 1, left + CELL - 2, top + CELL - 2)
        if shape in SHAPES:
            (pen.rectangle if shape == "s" else pen.ellipse)(box, fill=SHAPE_COLORS[int(ink)])
    return image


def counting(rng: random.Random) -> ImageProblem:
    """Return a problem of shapes of two kinds in random cells: how many are there of one?"""
    counts = {shape: rng.randint(0, MOST) for shape in SHAPES}
    cells = [shape for shape, count in counts.items() for _ in range(count)]
    cells += ["."] * (CELLS * CELLS - len(cells))
    rng.shuffle(cells)
    shape_asked = rng.choice(list(SHAPES))
    spec = "".join(shape + str(rng.randrange(len(SHAPE_COLORS))) for shape in cells)
    return ImageProblem(spec, f"{SHAPES[shape_asked]}?", str(counts[shape_asked]))


def plot(rng: random.Random) -> ImageProblem:
    """Return a problem of four bars: how high is one of them?"""
    bars, bar = [rng.randint(0, HIGHEST) for _ in range(CELLS)], rng.randrange(CELLS)
    return ImageProblem("".join(map(str, bars)), f"bar {bar + 1}?", str(bars[bar]))


def is_held_out(problem: ImageProblem) -> bool:
    """Return whether a problem is only ever asked in evaluations."""
    digest = hashlib.blake2b(f"{problem.spec} {problem.question}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_PARTS == 0


def image_problems(rng: random.Random, held_out: bool = False) -> Iterator[ImageProblem]:
    """Yield counting and plot problems without end, all held out or none."""
    while True:
        problem = rng.choice((counting, plot))(rng)
        if is_held_out(problem) == held_out:
            yield problem
