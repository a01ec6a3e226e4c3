"""The exactness matrix: outputs and all gradients of n ranks against one process, for every cell that a model can ask
for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict

from dyncp.exactness.matrix_model import MatrixModel, Place, Sizes, build_model
from dyncp.planning.cost import CostModel
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.planner import plan
from dyncp.planning.sizes import LAYOUTS, Layout
from dyncp.sharding.shards import pack_group, shard, unshard
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import PackedBatch

MIXES = {
    "all of length 1": (1, 1, 1, 1, 1),
    "one sequence": (29,),
    "not divisible": (13, 11, 5),
    "mixed": (7, 3, 17, 1, 12),
    "one long, many short": (2, 1, 47, 3, 1, 5, 2),
}
KINDS = ("attention", "gated delta net", "hybrid")
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Setup:
    """Settings of the matrix. other: sizes of the cells marked so. oracle: the reference's backend, in float64."""

    sizes: Sizes = field(default_factory=Sizes)
    other: Sizes = field(default_factory=lambda: Sizes(query_heads=4, kv_heads=2, value_dim=3))
    mixes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MIXES)
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    oracle: str = "naive"


CPU = Setup()
_GPU_SIZES = Sizes(
    hidden=256,
    query_heads=8,
    kv_heads=2,
    head_dim=128,
    delta_key_heads=16,
    delta_value_heads=32,
    key_dim=128,
    value_dim=128,
)
GPU = Setup(
    sizes=_GPU_SIZES,
    other=replace(_GPU_SIZES, query_heads=6, kv_heads=3),
    mixes={
        "all of length 1": (1, 1, 1, 1, 1),
        "mixed": (1000, 517, 33, 1, 300),
        "one long, many short": (2, 1, 4001, 3, 700, 1, 5),
    },
    dtype=torch.bfloat16,
    device="cuda",
    oracle="torch",
)


class Cell(NamedTuple):
    """One question of the matrix."""

    kind: str
    layout: Layout
    method: Method
    mix: str
    other: bool = False


@dataclass(frozen=True)
class Verdict:
    """The answer: the largest relative differences, or why the cell is refused (at plan time and again at run time).

    worst: the parameter whose gradient differs most (on this rank's count).
    """

    cp_size: int
    kind: str
    layout: str
    method: str
    mix: str
    other: bool
    output_error: float = 0.0
    gradient_error: float = 0.0
    refused: str = ""
    worst: str = ""


def cells(setup: Setup = CPU) -> Iterator[Cell]:
    """Yield all cells, refused ones included. The `other` sizes have heads that Ulysses cannot divide everywhere."""
    for kind in KINDS:
        for layout in LAYOUTS:
            for method in METHODS:
                for mix in setup.mixes:
                    yield Cell(kind, layout, method, mix)
    for method in METHODS:
        yield Cell("attention", "contiguous", method, "mixed", other=True)
    for mix in ("mixed", "one long, many short"):
        yield Cell("gated delta net", "contiguous", "ring", mix, other=True)


def must_refuse(cell: Cell, cp_size: int, setup: Setup = CPU) -> bool:
    """Return whether the cell must be refused: a recurrence in zigzag, or heads that do not divide in Ulysses."""
    heads = (setup.other if cell.other else setup.sizes).query_heads
    undealt = cell.kind != "gated delta net" and cell.method == "ulysses" and heads % cp_size != 0
    return undealt or (cell.layout == "zigzag" and cell.kind != "attention")


def run_sizes(sizes: Sequence[int], setup: Setup = CPU, all_blocks: bool = False) -> dict[int, list[dict[str, Any]]]:
    """Run the cells of every group size that this rank takes part in. Collective.

    Groups are ranks 0 .. size - 1; with `all_blocks` all blocks of `size` ranks at once, so that every device is warm
    and none waits long.
    """
    results, world, rank = {}, dist.get_world_size(), dist.get_rank()
    for size in sizes:
        for start in range(0, world - size + 1 if all_blocks else 1, size):
            members = list(range(start, start + size))
            group = dist.group.WORLD if size == world else dist.new_group(members)
            if rank in members:
                mine = group
        if rank < (world // size if all_blocks else 1) * size:
            results[size] = run_cells(mine if size > 1 else None, setup)
    return results


def run_cells(group: dist.ProcessGroup | None, setup: Setup = CPU) -> list[dict[str, Any]]:
    """Run every cell over this group; return plain data (the same on all ranks). Collective."""
    return [asdict(run_cell(cell, group, setup)) for cell in cells(setup)]


def run_cell(cell: Cell, group: dist.ProcessGroup | None, setup: Setup = CPU) -> Verdict:
    """Check one cell on this rank, and reduce the verdict over the group. Collective."""
    cp_size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sizes = setup.other if cell.other else setup.sizes
    facts = (cp_size, cell.kind, cell.layout, cell.method, cell.mix, cell.other)
    planned = _refusal_when_planning(cell, sizes, cp_size)
    packed = _packed(cell.mix, cell.other, cp_size, cell.layout, setup)
    model = build_model(cell.kind, sizes, setup.dtype, setup.device)
    try:
        output, gradients = run_sharded(model, packed, rank, cell, group)
    except ValueError as error:
        if not planned:
            raise
        return Verdict(*facts, refused=f"{planned} | {error}")
    if planned:
        raise AssertionError(f"{cell} was refused by the planner and ran all the same")
    expected, expected_gradients = _reference(cell.kind, cell.other, cell.mix, setup)
    output_error = relative_error(output[packed.token_mask], expected)
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    errors = (relative_error(g, e) for g, e in zip(gradients, expected_gradients, strict=True))
    gradient_error, name = max(zip(errors, names, strict=True))
    return Verdict(
        *facts,
        output_error=_max_over(output_error, group),
        gradient_error=_max_over(gradient_error, group),
        worst=name,
    )


def _refusal_when_planning(cell: Cell, sizes: Sizes, cp_size: int) -> str:
    """Return why the planner refuses one sequence that needs all cp_size ranks, or an empty text."""
    cost = CostModel(
        attention_layers=cell.kind != "gated delta net",
        delta_layers=cell.kind != "attention",
        query_heads=sizes.query_heads,
        kv_heads=sizes.kv_heads,
    )
    try:
        plan([4 * cp_size], cp_size, 4, cost, method=cell.method, layout=cell.layout)
    except ValueError as error:
        return str(error)
    return ""


def make_mix(lengths: Sequence[int], sizes: Sizes) -> TensorDict:
    """Return a batch of these lengths with random ids and a random cotangent [hidden, tokens] for each sample."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return make_batch(
        [
            {
                "input_ids": torch.randint(0, sizes.vocab, (n,), generator=generator),
                "cotangent": torch.randn(sizes.hidden, n, generator=generator, dtype=torch.float64),
            }
            for n in lengths
        ]
    )


def run_sharded(
    model: MatrixModel, packed: PackedBatch, rank: int, cell: Cell, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (outputs of the whole stream, parameter gradients summed over the ranks). Collective over the group."""
    cp_size = 1 if group is None else dist.get_world_size(group)
    part = shard(packed, rank, cp_size, cell.layout)
    mask = packed.token_mask[part.index]
    output = model(part.values["input_ids"], Place(part.sharding, group, cell.method))
    cotangent = part.values["cotangent"].T.to(output.dtype)
    (output * cotangent)[mask].sum().backward()
    wide = torch.promote_types(output.dtype, torch.float32)
    gradients = [parameter.grad.to(wide) for parameter in model.parameters() if parameter.grad is not None]
    if group is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
    return unshard(output.detach(), part.sharding, group), gradients


_PACKED: dict[tuple[str, bool, int, str, torch.dtype], PackedBatch] = {}


def _packed(mix: str, other: bool, cp_size: int, layout: Layout, setup: Setup) -> PackedBatch:
    """Return the packed batch of a mix, padded for the layout. Cached."""
    key = (mix, other, cp_size, layout, setup.dtype)
    if key not in _PACKED:
        lengths, sizes = setup.mixes[mix], setup.other if other else setup.sizes
        _PACKED[key] = pack_group(make_mix(lengths, sizes), range(len(lengths)), cp_size, layout).to(setup.device)
    return _PACKED[key]


_REFERENCES: dict[tuple[str, bool, str, torch.dtype], tuple[torch.Tensor, list[torch.Tensor]]] = {}


def _reference(kind: str, other: bool, mix: str, setup: Setup) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the reference: one process, no padding, the oracle's operations, float64 on the dtype's weights. Cached."""
    key = (kind, other, mix, setup.dtype)
    if key in _REFERENCES:
        return _REFERENCES[key]
    sizes = setup.other if other else setup.sizes
    model = build_model(kind, sizes, setup.dtype, setup.device).double()
    packed = _packed(mix, other, 1, "contiguous", setup)
    output = model(packed.values["input_ids"], packed.cu_seqlens, setup.oracle)
    cotangent = packed.values["cotangent"].T.to(setup.dtype).double()
    (output * cotangent).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    _REFERENCES[key] = output.detach(), gradients
    return _REFERENCES[key]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of b."""
    result: float = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
    return result


def _max_over(value: float, group: dist.ProcessGroup | None) -> float:
    if group is None:
        return value
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.item()


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the table of the worst errors over all mixes: a line a kind, layout and method, a column a size."""
    sizes = sorted({verdict.cp_size for verdict in verdicts})
    lines = [
        "| layers | layout | method | " + " | ".join(f"CP {n}" for n in sizes) + " |",
        "|---" * (3 + len(sizes)) + "|",
    ]
    rows: dict[tuple[str, str, str], dict[int, list[Verdict]]] = {}
    for verdict in verdicts:
        kind = f"{verdict.kind}, other sizes" if verdict.other else verdict.kind
        rows.setdefault((kind, verdict.layout, verdict.method), {}).setdefault(verdict.cp_size, []).append(verdict)
    for key, by_size in rows.items():
        entries = []
        for size in sizes:
            cells = by_size[size]
            worst = max(max(v.output_error, v.gradient_error) for v in cells)
            entries.append("refused" if cells[0].refused else f"{worst:.0e} ({len(cells)} mixes)")
        lines.append(f"| {' | '.join(key)} | {' | '.join(entries)} |")
    return "\n".join(lines)
