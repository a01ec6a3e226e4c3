"""The layouts that prove the Megatron backend, and how they are measured against one FSDP2 process.

`python -m engines megatron` prints the table; `layouts_test.py` asserts what it shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from engines.build import build_engine
from engines.config import EngineConfig, parse_context_parallel
from engines.experts.routers import routed_sizes
from engines.lora_config import LoraConfig
from engines.megatron.runtime.process_groups import release
from engines.proofs.family_cases import Case
from engines.protocol import TrainEngine
from engines.tiny import tiny_batch, tiny_model
from seqpack.batches.batch import jagged
from seqpack.batches.objective import Objective
from seqpack.batches.packed import PackedBatch
from seqpack.batches.schema import ROUTED_EXPERTS, SEVERAL
from seqpack.batches.view import BatchView, Totals

LENGTHS = (7, 3, 12, 5, 9, 2, 14, 6, 4)
STEPS = 2
RANKS = 4
OPTIONS: dict[str, Any] = {
    "device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1, "grad_clip": 0.5,
}  # fmt: skip
"""`eps` is large: with the usual one, a gradient of nearly zero moves a weight by the sign of its rounding error."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
PADDING = {"pad_token_id": 7}
"""A token that the batches hold: its embedding, zero at first, gets no gradient from there."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("attention", {"vocab_size": 49, **PADDING}),
    "Qwen3, LoRA": ("attention", {"vocab_size": 49, **PADDING}),
    "Qwen3 MoE, raw top k, tied": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "Qwen3 MoE, raw top k, replayed": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}),
    "Qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 49}),
    "Llama": ("llama", {}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True}),
    "Qwen3.5": ("dense", PADDING),
    "Qwen3.5, LoRA": ("dense", PADDING),
    "Qwen3.5, LoRA of q": ("dense", {"tie_word_embeddings": False}),
    "Qwen3.5, untied": ("dense", {"tie_word_embeddings": False}),
    "Qwen3.5 MoE": ("moe", PADDING),
    "Qwen3.5 MoE, router's loss": ("moe", {**PADDING, **BALANCED}),
    "Qwen3.5 MoE, router's losses": ("moe", {**PADDING, **BALANCED}),
    "Qwen3.5 MoE, router's losses, replayed": ("moe", {**PADDING, **BALANCED}),
}
"""Models by name: kind and changes of `engines.tiny.tiny_model`, or a model type and values of a config."""
TRAINED: dict[str, dict[str, Any]] = {
    "Qwen3.5 MoE, router's losses": {"router_z_loss_coef": 0.05},
    "Qwen3 MoE, raw top k, replayed": {"routing_replay": True},
    "Qwen3.5 MoE, router's losses, replayed": {"routing_replay": True, "router_z_loss_coef": 0.05},
    "Qwen3, LoRA": {"lora": LoraConfig(rank=3, alpha=7.0)},
    "Qwen3.5, LoRA": {"lora": LoraConfig(rank=3, alpha=7.0)},
    "Qwen3.5, LoRA of q": {"lora": LoraConfig(rank=2, targets=("q_proj",))},
}
"""Fields of `EngineConfig` that go with a model, under each backend."""

EXTRAS = {
    "recomputed": "gradient_checkpointing",
    "options": "transformer_options",
    "distributed optimizer": "distributed_optimizer",
    "on the host": "optimizer_on_host",
}
"""Words of a layout's name for fields that are not sizes."""


@dataclass(frozen=True)
class LayoutCase:
    """A model on a layout of four ranks; the ranks left over are data parallelism."""

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""

    @property
    def layout(self) -> str:
        """Its sizes in the field's abbreviations."""
        names = {
            "tensor_parallel": "TP",
            "pipeline_parallel": "PP",
            "expert_parallel": "EP",
            "expert_tensor_parallel": "ETP",
        }
        parts = [f"{short}{self.sizes[name]}" for name, short in names.items() if name in self.sizes]
        parts += [
            f"{size} layers {end}" for end in ("first", "last") if (size := self.sizes.get(f"{end}_stage_layers"))
        ]
        virtual = self.sizes.get("virtual_pipeline_parallel", 1)
        parts += [f"virtual {virtual}"] if virtual > 1 else []
        parts += [name for name, field_ in EXTRAS.items() if self.sizes.get(field_)]
        shared = parse_context_parallel(self.sizes.get("context_parallel", "off"))
        used = self.sizes.get("tensor_parallel", 1) * self.sizes.get("pipeline_parallel", 1)
        if shared == "dynamic":
            return "·".join([*parts, f"dynamic CP over {RANKS // used}"])
        parts += [f"CP{shared}"] if shared > 1 else []
        return "·".join([*parts, *([f"DP{RANKS // used // shared}"] if used * shared < RANKS else [])])

    def __str__(self) -> str:
        """Return its name for tests."""
        return f"{self.model}, {self.layout}"


def _case(
    model: str,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: str = "off",
    vp: int = 1,
    first: int | None = None,
    **others: Any,
) -> LayoutCase:
    sizes = {
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "expert_parallel": ep,
        "expert_tensor_parallel": etp,
        "virtual_pipeline_parallel": vp,
    }
    chosen: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    chosen |= others if first is None else {"first_stage_layers": first, **others}
    return LayoutCase(model, chosen if cp == "off" else {**chosen, "context_parallel": cp})


SCHEDULE = ("deallocate_pipeline_outputs=true", "microbatch_group_size_per_vp_stage=4")
HELD = (
    _case("Qwen3 MoE, raw top k, tied", tp=2, pp=2, ep=2),
    _case("Qwen3.5", tp=2, pp=2, vp=2, transformer_options=SCHEDULE),
    _case("Qwen3.5 MoE", tp=2, ep=2, etp=2, distributed_optimizer=True),
    _case("Qwen3.5 MoE, router's losses, replayed", pp=2, vp=2, ep=2, cp="dynamic"),
    _case("Qwen3, LoRA", tp=2, pp=2, distributed_optimizer=True),
    _case("Qwen3.5", tp=2, cp="static:2", distributed_optimizer=True),
)
"""Cases of the tests: each feature, and combinations of them."""
HELD_LONG = (
    _case("Qwen3.5 MoE, router's losses, replayed", tp=2, pp=2, ep=2, first=1, gradient_checkpointing=True),
    _case("Qwen3.5, LoRA of q", pp=4),
    _case("Qwen3", tp=2, pp=2),
    _case("Qwen3.5", pp=4),
    _case("Qwen3.5, LoRA", tp=2, pp=2, vp=2, gradient_checkpointing=True),
    _case("Qwen3.5 MoE", pp=2, ep=2, cp="dynamic", last_stage_layers=1),
)
"""Cases of the long tests: what `HELD` has in other combinations."""
MAPPED = (
    _case("Qwen2, tied", tp=2, pp=2),
    _case("Qwen2, tied", pp=2, vp=2, cp="dynamic"),
    _case("Llama, tied", tp=2, pp=2, distributed_optimizer=True),
    _case("Llama", tp=2, cp="dynamic", gradient_checkpointing=True),
)
"""Cases of families whose weights mbridge maps, which the table leaves out: `peers/mbridge_test.py` holds them."""
CASES = (
    _case("Qwen3"),
    _case("Qwen3", tp=2),
    _case("Qwen3.5"),
    _case("Qwen3.5", tp=2),
    _case("Qwen3.5", pp=2),
    _case("Qwen3.5, untied", tp=2, pp=2),
    _case("Qwen3.5 MoE"),
    _case("Qwen3.5 MoE", ep=2),
    _case("Qwen3.5 MoE", tp=2),
    _case("Qwen3.5 MoE", tp=2, ep=4),
    _case("Qwen3.5 MoE", tp=2, distributed_optimizer=True, optimizer_on_host=True),
    _case("Qwen3.5", distributed_optimizer=True),
    _case("Qwen3.5 MoE", pp=2, distributed_optimizer=True),
    _case("Qwen3.5 MoE", tp=2, pp=2, etp=2),
    _case("Qwen3.5 MoE", pp=2, ep=2),
    _case("Qwen3.5 MoE, router's loss", pp=2, vp=2),
    _case("Qwen3.5 MoE, router's loss", tp=2),
    _case("Qwen3.5 MoE, router's loss", tp=2, pp=2, ep=2, gradient_checkpointing=True),
    _case("Qwen3.5 MoE, router's losses", tp=2),
    _case("Qwen3.5 MoE, router's losses", tp=2, pp=2, ep=2),
    _case("Qwen3.5 MoE, router's losses", ep=2, cp="dynamic"),
    _case("Qwen3 MoE, raw top k, replayed", tp=2, ep=2, etp=2),
    _case("Qwen3 MoE, raw top k, replayed", pp=2, cp="static:2"),
    _case("Qwen3.5 MoE, router's losses, replayed", tp=2, vp=2, pp=2, ep=2, gradient_checkpointing=True),
    _case("Qwen3, LoRA", tp=2),
    _case("Qwen3, LoRA", pp=2),
    _case("Qwen3.5, LoRA", tp=2),
    _case("Qwen3.5, LoRA", pp=2, distributed_optimizer=True),
    _case("Qwen3.5, LoRA", tp=2, pp=2),
    _case("Qwen3.5, LoRA", tp=2, cp="dynamic", optimizer_on_host=True),
    _case("Qwen3", tp=2, cp="dynamic"),
    _case("Qwen3.5 MoE", ep=2, cp="static:4"),
    _case("Qwen3", pp=2, first=1),
    _case("Qwen3.5", tp=2, pp=2),
    _case("Qwen3.5 MoE", tp=2, pp=2, ep=2),
    *HELD,
    *HELD_LONG,
)
"""Cases of the table."""


@dataclass
class Measured:
    """The results of one engine: `curve` are the metrics of its steps, `resumed` those of a step after a checkpoint."""

    curve: list[dict[str, float]]
    scores: list[Tensor]
    exported: dict[str, Tensor]
    """Weights before the first step."""
    trained: dict[str, Tensor]
    resumed: dict[str, dict[str, float]]
    same_bits: bool = True
    """Whether the engine that loaded its own checkpoint ended that step with the bits of the one that continued."""


@dataclass(frozen=True)
class WeightedNLL:
    """Over trained tokens -advantage * (log p + 0.1 log p of others and the rest) - 0.01 * entropy: every output of a
    scorer has a gradient."""

    required_keys: tuple[str, ...] = ("advantages",)
    needs_entropy: bool = True
    needs_tokens: str = "tokens"

    def zero_gradient_rows(self, batch: BatchView) -> Tensor:
        """Return None: no rows are left out."""
        return torch.zeros(len(batch), dtype=torch.bool)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, packed: PackedBatch, totals: Totals, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `seqpack.Objective`."""
        assert entropy is not None
        several = packed.values["several_log_probs"].sum(0) + packed.values["several_rest"]
        values = -packed.values["advantages"] * (log_probs + 0.1 * several) - 0.01 * entropy
        return torch.where(packed.values["loss_mask"], values, 0.0).sum() / totals.tokens, {}


def engine_of(case: LayoutCase, backend: str = "megatron", seed: int = 0, **options: Any) -> TrainEngine:
    """Build the case's engine; for FSDP2 without its sizes. `seed`: of weights, under adapters of these alone."""
    sizes = case.sizes if backend == "megatron" else {}
    torch.manual_seed(seed)
    trained = TRAINED.get(case.model, {})
    config = EngineConfig(backend=backend, **{**OPTIONS, **trained, **sizes, **options})
    return build_engine(config, model_of(case.model, 0 if config.lora.rank else seed))


def model_of(name: str, seed: int = 0) -> nn.Module:
    """Make one of `MODELS`."""
    kind, changes = MODELS[name]
    if kind in ("qwen3_moe", "qwen2", "llama"):
        case = Case(kind, name, changes)
        made = case.model(seed, scale=2.0)
        for buffer, first in zip(made.buffers(), case.model(scale=2.0).buffers(), strict=True):
            buffer.copy_(first)  # no checkpoint holds them: they are of the config, whatever the seed is
        return made
    return tiny_model(kind, seed=seed, scale=2.0, **changes)


def measure(
    case: LayoutCase, objective: Objective, saved: Path, load: Sequence[Path] = (), backend: str = "megatron"
) -> Measured:
    """Train, score and export; save to `saved` and make one more step; then make that step from each of `load`.

    An engine that loads what it saved itself must end with the same bits, its step in two halves.
    """
    engine = engine_of(case, backend)
    exported = exported_by(engine)
    curve = [engine.train_batch(batch_of(engine, step), objective) for step in range(STEPS)]
    curve += last_step(engine)
    scored = engine.forward(batch_of(engine, 0), entropy=True, top_k=3)
    scores = [scored[key].values().clone() for key in ("log_probs", "entropy", *SEVERAL[1:])]
    trained = exported_by(engine)
    engine.save(saved)
    last = batch_of(engine, STEPS)
    resumed = {"itself": engine.train_batch(last, objective)}
    same_bits = True
    for path in load:
        other = engine_of(case, backend, seed=1)
        other.load(path)
        resumed[path.name] = other.forward_backward(last, objective) | other.optimizer_step()
        if path == saved:
            same_bits = resumed[path.name] == resumed["itself"] and _same_bits(exported_by(other), exported_by(engine))
    return Measured(curve, scores, exported, trained, resumed, same_bits)


def last_step(engine: TrainEngine) -> list[dict[str, float]]:
    """Update by the gradients of two batches, with settings of that update."""
    added = [engine.forward_backward(batch_of(engine, step), WeightedNLL()) for step in range(2)]
    return [*added, engine.optimizer_step(lr=5e-3, betas=(0.8, 0.9), eps=2e-3, weight_decay=0.2, grad_clip=0.3)]


def batch_of(engine: Any, seed: int) -> TensorDict:
    """Make the batch of a step; where experts are replayed, with random ones for about two thirds of the tokens."""
    batch = tiny_batch(list(LENGTHS), seed=seed)
    vocabulary, draw = engine.executor.model.config.get_text_config().vocab_size, torch.Generator().manual_seed(seed)
    batch["tokens"] = jagged([torch.rand(n, vocabulary, generator=draw).topk(3).indices.T for n in LENGTHS])
    if not engine.config.routing_replay:
        return batch
    layers, top_k, experts = routed_sizes(engine.executor.model)
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.rand(n, layers, experts, generator=rng).topk(top_k).indices.to(torch.int16) for n in LENGTHS]
    for row in rows:
        row[torch.rand(len(row), generator=rng) < 1 / 3] = -1
    batch[ROUTED_EXPERTS] = jagged(rows, 0)
    return batch


def _same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)) for name, value in one.items())


def exported_by(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the weights of an export, flat, by name."""
    return {piece.name: piece.flat.clone() for piece in engine.export_weights(max_bytes=2**40)}


def measure_all(cases: Sequence[LayoutCase], objective: Objective, folder: Path) -> list[list[Measured]]:
    """Measure every case on `RANKS` ranks; return results by rank, then by case.

    A case loads what FSDP2 and the case of the model before it saved; the first of a model what it saved itself.
    """
    out: list[Measured] = []
    before: dict[str, Path] = {}
    for number, case in enumerate(cases):
        saved = folder / f"megatron {number}"
        load = [folder / f"fsdp2 {case.model}", before.get(case.model, saved)]
        out.append(measure(case, objective, saved, load))
        before[case.model] = saved
        release()
    everyone: list[list[Measured]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, out)
    return everyone


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference over all tensors; infinite where names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def relative(one: float, other: float) -> float:
    """Return the difference of two numbers, relative to the larger one."""
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def rows_of_table(cases: Sequence[LayoutCase], alone: dict[str, Measured], ranks: list[Measured]) -> list[list[str]]:
    """Return a line for each case: the largest differences from FSDP2 on one process."""
    rows = []
    for case, got in zip(cases, ranks, strict=True):
        want = alone[case.model]
        steps = list(zip(want.curve, got.curve, strict=True))
        loss, norm = (max(relative(a[key], b[key]) for a, b in steps) for key in ("loss", "grad_norm"))
        resumed = max(relative(want.resumed["itself"]["loss"], one["loss"]) for one in got.resumed.values())
        same = got.same_bits and _same_bits(want.exported, got.exported)
        scores = max(float((a - b).abs().max()) for a, b in zip(want.scores, got.scores, strict=True))
        weights = largest_difference(want.trained, got.trained)
        numbers = [f"{value:.0e}" for value in (loss, norm, scores, weights, resumed)]
        rows.append([case.model, case.layout, *numbers, "same" if same else "differ"])
    return rows
