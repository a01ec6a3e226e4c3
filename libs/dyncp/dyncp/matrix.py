"""The exactness matrix: outputs and all gradients of n ranks against one process, for every cell that a model can ask for."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from seqpack.batch import make_batch
from seqpack.packed import PackedBatch
from tensordict import TensorDict

from dyncp.cost import CostModel
from dyncp.cp_methods import METHODS, Method
from dyncp.matrix_model import MatrixModel, Place, Sizes, build_model
from dyncp.planner import plan
from dyncp.shards import pack_group, shard, unshard
from dyncp.sizes import LAYOUTS, Layout

MIXES = {
    "all of length 1": (1, 1, 1, 1, 1),
    "one sequence": (29,),
    "not divisible": (13, 11, 5),
    "mixed": (7, 3, 17, 1, 12),
    "one long, many short": (2, 1, 47, 3, 1, 5, 2),
}
KINDS = ("attention", "gated delta net", "hybrid")
FEW_HEADS = Sizes(query_heads=4, kv_heads=2)
TOLERANCE = 1e-10


class Cell(NamedTuple):
    """One question of the matrix."""

    kind: str
    layout: Layout
    method: Method
    mix: str
    heads: int = 12

    @property
    def sizes(self) -> Sizes:
        """The model's sizes; with 4 query heads there are cells in which Ulysses cannot deal them."""
        return Sizes() if self.heads == 12 else FEW_HEADS


@dataclass(frozen=True)
class Verdict:
    """The answer: the largest relative differences, or why the cell is refused (at plan time and again at run time)."""

    cp_size: int
    kind: str
    layout: str
    method: str
    mix: str
    heads: int
    output_error: float = 0.0
    gradient_error: float = 0.0
    refused: str = ""


def cells() -> Iterator[Cell]:
    """All cells, refused ones included."""
    for kind in KINDS:
        for layout in LAYOUTS:
            for method in METHODS:
                for mix in MIXES:
                    yield Cell(kind, layout, method, mix)
    for method in METHODS:
        yield Cell("attention", "contiguous", method, "mixed", heads=4)


def must_refuse(cell: Cell, cp_size: int) -> bool:
    """What the matrix expects to be refused: a recurrence in zigzag, and heads that do not divide in Ulysses."""
    recurrent_zigzag = cell.layout == "zigzag" and cell.kind != "attention"
    return recurrent_zigzag or (cell.method == "ulysses" and cell.sizes.query_heads % cp_size != 0)


def run_cells(group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Every cell over this group, as plain data (the same on all ranks). Collective."""
    cp_size = 1 if group is None else dist.get_world_size(group)
    return [asdict(run_cell(cell, cp_size, group, dtype, device)) for cell in cells()]


def run_sizes(
    sizes: Sequence[int], dtype: torch.dtype = torch.float64, device: torch.device | None = None
) -> dict[int, list[dict[str, Any]]]:
    """The cells of every group size that this rank takes part in: groups are ranks 0 .. size - 1. Collective."""
    device, found = device or torch.device("cpu"), {}
    for size in sizes:
        group = dist.group.WORLD if size == dist.get_world_size() else dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            found[size] = run_cells(group if size > 1 else None, dtype, device)
    return found


def run_cell(
    cell: Cell, cp_size: int, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """One cell, checked on this rank and reduced over the group. Collective."""
    facts = (cp_size, cell.kind, cell.layout, cell.method, cell.mix, cell.heads)
    planned = _refusal_when_planning(cell, cp_size)
    batch = make_mix(MIXES[cell.mix], cell.sizes.hidden).to(device)
    packed = pack_group(batch, range(len(MIXES[cell.mix])), cp_size, cell.layout)
    rank = 0 if group is None else dist.get_rank(group)
    try:
        output, gradients = run_sharded(build_model(cell.kind, cell.sizes, dtype, device), packed, rank, cell, group)
    except ValueError as error:
        if not planned:
            raise
        return Verdict(*facts, refused=f"{planned} | {error}")
    if planned:
        raise AssertionError(f"{cell} was refused by the planner and ran all the same")
    expected, expected_gradients = _reference(cell.kind, cell.sizes, cell.mix, dtype, device)
    output_error = relative_error(output[packed.token_mask], expected)
    worst = max(relative_error(g, e) for g, e in zip(gradients, expected_gradients, strict=True))
    return Verdict(*facts, output_error=_max_over(output_error, group), gradient_error=_max_over(worst, group))


def _refusal_when_planning(cell: Cell, cp_size: int) -> str:
    """Why the planner refuses one sequence that needs all cp_size ranks, or nothing."""
    cost = CostModel(
        attention_layers=cell.kind != "gated delta net",
        delta_layers=cell.kind != "attention",
        query_heads=cell.sizes.query_heads,
        kv_heads=cell.sizes.kv_heads,
    )
    try:
        plan([4 * cp_size], cp_size, 4, cost, method=cell.method, layout=cell.layout)
    except ValueError as error:
        return str(error)
    return ""


def make_mix(lengths: Sequence[int], hidden: int) -> TensorDict:
    """A batch of these lengths with random ids and a random cotangent [hidden, tokens] for each sample."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return make_batch(
        [
            {
                "input_ids": torch.randint(0, 11, (n,), generator=generator),
                "cotangent": torch.randn(hidden, n, generator=generator, dtype=torch.float64),
            }
            for n in lengths
        ]
    )


def run_sharded(
    model: MatrixModel, packed: PackedBatch, rank: int, cell: Cell, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(outputs of the whole stream, parameter gradients summed over the ranks). Collective over the group."""
    cp_size = 1 if group is None else dist.get_world_size(group)
    part = shard(packed, rank, cp_size, cell.layout)
    mask = packed.token_mask[part.index]
    output = model(part.values["input_ids"], Place(part.sharding, group, cell.method))
    cotangent = part.values["cotangent"].T.to(output.dtype)
    (output * cotangent)[mask].sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if group is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
    return unshard(output.detach(), part.sharding, group), gradients


@cache
def _reference(
    kind: str, sizes: Sizes, mix: str, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One process, naive operations, no padding; in float64 with the weights of the dtype."""
    model = build_model(kind, sizes, dtype, device).double()
    packed = pack_group(make_mix(MIXES[mix], sizes.hidden).to(device), range(len(MIXES[mix])), 1)
    output = model(packed.values["input_ids"], packed.cu_seqlens)
    cotangent = packed.values["cotangent"].T.to(dtype).double()
    (output * cotangent).sum().backward()
    return output.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _max_over(value: float, group: dist.ProcessGroup | None) -> float:
    if group is None:
        return value
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.item()


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The table: one line a kind, layout and method, one column a size; the worst error over all mixes."""
    sizes = sorted({verdict.cp_size for verdict in verdicts})
    lines = [
        "| layers | layout | method | " + " | ".join(f"CP {n}" for n in sizes) + " |",
        "|---" * (3 + len(sizes)) + "|",
    ]
    rows: dict[tuple[str, str, str], dict[int, list[Verdict]]] = {}
    for verdict in verdicts:
        kind = verdict.kind if verdict.heads == 12 else f"{verdict.kind}, {verdict.heads} heads"
        rows.setdefault((kind, verdict.layout, verdict.method), {}).setdefault(verdict.cp_size, []).append(verdict)
    for key, by_size in rows.items():
        entries = []
        for size in sizes:
            found = by_size[size]
            worst = max(max(v.output_error, v.gradient_error) for v in found)
            entries.append("refused" if found[0].refused else f"{worst:.0e} ({len(found)} mixes)")
        lines.append(f"| {' | '.join(key)} | {' | '.join(entries)} |")
    return "\n".join(lines)
