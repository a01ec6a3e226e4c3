"""Prove every type of transformers with its default config: `python -m engines prove --all`.

Each type is proven in a process of its own, forked from this one so that nothing is imported again, with a limit of
time. The results are a JSON file, of which the tables in docs/certificates.md and in the library's README are drawn.
"""

import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engines.proofs.opened import step_difference, step_problem
from engines.prove.generic_family import is_inside
from engines.prove.proof import BUILD_ERRORS, prove
from engines.weights.empty_model import model_of

LIMIT = 60.0
"""Seconds of the processor that a proof may take."""
WAIT = 10.0
"""How many times as long it may take on a machine that does other things too."""
VERDICTS: Mapping[str, str] = {
    "equal": "equal, every field exercised",
    "equal in part": "equal, but fields of the config not exercised",
    "padded": "equal in padded rows alone (`batching='padded'`)",
    "refused": "refused: the number, or the missing operation",
    "not run": "not measured yet",
    "not built": "not proven: no model of its default config, a package that is missing, or not run on text alone",
}
_LAYERS = ["conv", "conv", "full_attention", "conv"] * 8
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
MISSING_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGAZ": 4}},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 11], "num_experts_per_tok": 6}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "emu3": {"vocabulary_map": {"<image>": 151851, "<|extra_200|>": 151846, "<|visual token 000000|>": 151854}},
    "gemma4": {"text_config": {"num_kv_shared_layers": 12}},
    "gemma4_text": {"num_kv_shared_layers": 12},
    "gemma4_unified": {"text_config": {"num_kv_shared_layers": 12}},
    "gemma4_unified_text": {"num_kv_shared_layers": 12},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": [*["mamba"] * 7, "attention"] * 4,
    },
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2_moe": {"layer_types": _LAYERS},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""Fields without which transformers runs no default config of a type at any width, or leaves out what checkpoints have:
Bamba's attention, keys that layers of Gemma 4 share, Granite 4's rotary embedding."""
COMMAND = "python -m engines prove --all"
LIBRARY_PAGE = Path("libs") / "engines" / "README.md"
_MARK = ("<!-- table: certificates -->", "<!-- end of table -->")


@dataclass(frozen=True)
class TypeResult:
    """What a proof says of one model type with its default config."""

    type: str
    images: bool
    """Whether it is a type of images and text, whose text part is trained."""
    verdict: str
    log_probs: float | None = None
    gradients: float | None = None
    seconds: float = 0.0
    """Of the processor."""
    not_exercised: tuple[str, ...] = ()
    reason: str = ""
    given: str = ""
    """Fields that the default config lacks, and the values that it was given."""
    step: float | None = None
    """Largest difference of a gradient of an engine's step, relative to its parameter's largest entry; float32."""


def _given(kind: str) -> str:
    return ", ".join(f"{name}={value}" for name, value in MISSING_FIELDS.get(kind, {}).items())


def all_types() -> list[str]:
    """Return the types of all causal language models of transformers, and of all of its models of images and text."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def result_of(kind: str) -> TypeResult:
    """Prove one type in this process."""
    start, images = time.process_time(), kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    try:
        certificate = prove(AutoConfig.for_model(kind, **MISSING_FIELDS.get(kind, {})))
    except (*BUILD_ERRORS, StrictDataclassError) as error:
        took, reason = time.process_time() - start, _line(f"{_why(kind, str(error))}{_inner(str(error))}")
        return TypeResult(kind, images, "not built", seconds=took, reason=reason, given=_given(kind))
    numbers = [value if value < float("inf") else None for value in (certificate.log_probs, certificate.gradients)]
    verdict = "equal in part" if certificate.not_exercised else "equal"
    if not certificate.holds:
        verdict = "padded" if certificate.admits("padded") else "refused"
    problems, step = [*certificate.problems], None
    if verdict != "refused":
        step, wrong = _step(kind, "padded" if verdict == "padded" else "packed")
        if wrong:
            verdict, problems = "refused", [*problems, wrong]
    return TypeResult(
        kind, images, verdict, numbers[0], numbers[1], time.process_time() - start, certificate.not_exercised,
        _line("; ".join(problems)), _given(kind), step,
    )  # fmt: skip


def _step(kind: str, batching: str) -> tuple[float | None, str]:
    """Return how far a step of an engine is from stock transformers, and what is wrong with it."""
    try:
        difference = step_difference(AutoConfig.for_model(kind, **MISSING_FIELDS.get(kind, {})), batching=batching)
    except ValueError as error:
        return None, str(error)
    return difference.gradients if difference.gradients < float("inf") else None, step_problem(difference)


def _why(kind: str, error: str) -> str:
    """Return why a type was not proven, in words before the error; none where it says so itself."""
    if re.search(r"\b(pixel_values|image_embeds|input_features)\b", error):
        return "it does not run on text alone: "
    if missing := re.search(r"No module named '(transformers\.\S+|\w+)'|requires the (\w+) library", error):
        own = (missing[1] or "").startswith("transformers.")
        return "transformers has no modelling code of it: " if own else "it needs a package that is not installed: "
    if "was double" in error or "!= double" in error or "without overflow" in error:
        return "stock transformers does not compute it in float64: "
    if re.search("encoder-decoder|writes no text|is no causal language model|Multiple valid text configs", error):
        return ""
    try:
        config = AutoConfig.for_model(kind)
        with torch.device("meta"):
            model_of(config, is_inside(config))
    except (*BUILD_ERRORS, StrictDataclassError):
        return "transformers builds no model of its default config: "
    return "its config in small does not run: "


def apart(kind: str, limit: float = LIMIT) -> TypeResult:
    """Prove one type in a process of its own; one that takes longer than `limit` seconds, or dies, is not built."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(kind, theirs))
    process.start()
    theirs.close()
    images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    try:
        if ours.poll(WAIT * limit):
            result: TypeResult = ours.recv()
            return result
        return TypeResult(kind, images, "not built", seconds=limit, reason=f"it took longer than {limit:.0f} s")
    except EOFError:
        return TypeResult(kind, images, "not built", reason="its process died")
    finally:
        process.kill()
        process.join()


def _send(kind: str, connection: Connection) -> None:
    connection.send(result_of(kind))


def measure(kinds: Sequence[str]) -> Iterator[TypeResult]:
    """Yield the result of each type."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for kind in kinds:
        yield apart(kind)


def main(docs: Path, date: str, kinds: Sequence[str] = ()) -> None:
    """Prove types (all of them unless some are named), print a line for each and the slowest; write the JSON and the
    table under `docs`, and the table of the README beside it."""
    path = docs / "benchmarks" / "certificates.json"
    results = {one.type: one for one in read(path)} if path.is_file() else {}
    results = {kind: one for kind, one in results.items() if kind in all_types()}
    for one in measure(kinds or all_types()):
        print(f"{one.type}: {one.verdict} ({one.seconds:.1f} s) {one.reason}", flush=True)
        results[one.type] = one
        rows = [results[kind] for kind in sorted(results)]
        write(path, rows, date)  # a stop loses nothing
    for page, lines in tables(docs, rows).items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), lines), encoding="utf-8")
    slowest = sorted(rows, key=lambda one: -one.seconds)[:5]
    print("Slowest: " + ", ".join(f"{one.type} {one.seconds:.1f} s" for one in slowest))


def write(path: Path, results: Sequence[TypeResult], date: str) -> None:
    """Write the results as JSON, with what they were made by."""
    made = {"date": date, "device": "cpu", "command": COMMAND}
    made |= {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = [{**asdict(one), "seconds": round(one.seconds, 1)} for one in results]
    path.write_text(json.dumps({**made, "types": rows}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[TypeResult]:
    """Read the results that `write` wrote."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [TypeResult(**{**row, "not_exercised": tuple(row["not_exercised"])}) for row in values["types"]]


def tables(docs: Path, results: Sequence[TypeResult]) -> dict[Path, list[str]]:
    """Return the lines of the table of each page that has one: docs/certificates.md, and the library's README."""
    return {docs / "certificates.md": [*table(results)], docs.parent / LIBRARY_PAGE: [*summary(results)]}


def table(results: Sequence[TypeResult]) -> Iterator[str]:
    """Yield the lines of a table: how many types have each verdict, and which."""
    yield "| verdict | causal | images and text | types |"
    yield "| --- | --- | --- | --- |"
    for verdict, text in VERDICTS.items():
        with_verdict = [one for one in results if one.verdict == verdict]
        texts = sum(not one.images for one in with_verdict)
        yield f"| {text} | {texts} | {len(with_verdict) - texts} | {', '.join(map(_named, with_verdict))} |"


def summary(results: Sequence[TypeResult]) -> Iterator[str]:
    """Yield the lines of a table of numbers alone: a column for each verdict."""
    yield f"| default configs of {len(results)} types | {' | '.join(VERDICTS)} |"
    yield "| --- " * (len(VERDICTS) + 1) + "|"
    for text, images in (("causal language models", False), ("text parts of images and text", True)):
        counts = [sum(one.verdict == verdict and one.images is images for one in results) for verdict in VERDICTS]
        yield f"| {text} | {' | '.join(map(str, counts))} |"


def with_table(page: str, lines: Sequence[str]) -> str:
    """Return a page with a table between its marks."""
    before, _, rest = page.partition(_MARK[0])
    _, _, after = rest.partition(_MARK[1])
    if not after:
        raise ValueError(f"the page has no {_MARK[0]} with {_MARK[1]} behind it")
    return "\n".join((f"{before}{_MARK[0]}", "", *lines, "", f"{_MARK[1]}{after}"))


def _named(result: TypeResult) -> str:
    notes = [*result.not_exercised, *([f"with {result.given}"] if result.given else [])]
    return f"`{result.type}` ({', '.join(notes)})" if notes else f"`{result.type}`"


def _inner(text: str) -> str:
    """Return the part of an error's text that says why."""
    _, _, inner = text.partition("on text alone (")
    return inner.removesuffix(")") if inner else text


def _line(text: str) -> str:
    """Return a text in one line without names of temporary folders, cut where it is long."""
    text = re.sub(r"\S*/tmp\w+/", "", " ".join(text.split()))
    return text if len(text) <= 240 else f"{text[:237]}..."
