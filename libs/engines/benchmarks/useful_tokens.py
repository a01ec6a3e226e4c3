"""Useful tokens/s of one batch of long-tailed lengths: packed by the engine, and in padded rows of stock transformers.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/useful_tokens.py
        [--device cuda|cpu] [--cases padded sorted packed plain] [--widths N ...] [--out FILE]

The model on a GPU is that of `step_gpu.py` (0.67 B parameters), on a CPU a tiny one. A step is a whole one: forward,
backward, clipping and AdamW over the same sequences, with the same weights; the first losses are compared. Stock
transformers is under FSDP2, has the fused kernels that transformers finds, and four rows a micro-batch with an
attention mask, each padded to the smallest of `--widths` that its rows fit: on a CPU to its own longest row, on a GPU
to one of two, because a new shape tunes the kernels anew.

padded: in the order in which they came. sorted: by length, the best that padding can do, and no order to train in.
packed: the engine as it comes. plain: the engine with FSDP2 and without compiled layers.

Useful tokens are those of the sequences. `padded_to` says how many tokens padding computes, `to_longest` how many it
would, were each micro-batch padded to its own longest row; the ratio named so is that of this padding at the same
seconds a computed token, a bound in favour of padding where few tokens at once are slower.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from step_gpu import SHAPE, batch_of
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, pad

from engines import EngineConfig, build_engine
from engines.launch import launch
from objectives import SFT

ROWS_AT_ONCE = 4
STEPS = 5
OUT: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Setting:
    """The sizes of a run on one kind of device. `widths`: of padded rows, none for the longest row's; `shape`: changes
    to the model of `step_gpu.py`."""

    device: Literal["cuda", "cpu"]
    sequences: int
    middle: int
    longest: int
    widths: tuple[int, ...]
    capacity: int
    tolerance: float
    shape: dict[str, Any] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        """Draw from a lognormal: half are shorter than `middle`, one in fifty is eight times as long."""
        draws = torch.randn(self.sequences, generator=torch.Generator().manual_seed(0)).exp() * self.middle
        return [int(n) for n in draws.clamp(16, self.longest)]


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SETTINGS = {
    "cuda": Setting("cuda", 64, middle=256, longest=2048, widths=(512, 2048), capacity=16384, tolerance=0.02),
    "cpu": Setting("cpu", 32, middle=32, longest=256, widths=(), capacity=1024, tolerance=1e-4, shape=TINY),
}


def say(**facts: Any) -> None:
    OUT.append(facts)
    print(json.dumps(facts), flush=True)


def model(setting: Setting) -> Any:
    """Make the model, with the same random weights in every case."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{**SHAPE, **setting.shape}, use_cache=False)
    return Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()


def sequences(setting: Setting) -> Any:
    """Return the batch that every case trains on."""
    batch = batch_of(setting.lengths())
    batch["input_ids"] = torch.nested.nested_tensor(
        [ids % setting.shape.get("vocab_size", SHAPE["vocab_size"]) for ids in batch["input_ids"].unbind()],
        layout=torch.jagged,
    )
    return batch


def measure(what: str, setting: Setting, step: Callable[[], tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Time `step`, which returns its loss and more to print: the first call, one more, and the median of the rest."""
    wait: Callable[[], None] = torch.cuda.synchronize if setting.device == "cuda" else lambda: None
    began = time.perf_counter()
    loss, facts = step()
    wait()
    first = time.perf_counter() - began
    step()
    times = []
    for _ in range(STEPS):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    middle = sorted(times)[STEPS // 2]
    useful = sum(setting.lengths())
    row = {"what": what, "useful_tokens_per_s": round(useful / middle), "ms": round(middle * 1e3, 1), **facts}
    row |= {"fastest_ms": round(min(times) * 1e3, 1), "first_s": round(first, 1), "first_loss": round(loss, 5)}
    if setting.device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    say(**row)
    return row


def packed(what: str, setting: Setting, **options: Any) -> dict[str, Any]:
    """Measure the engine on packed micro-batches."""
    made = model(setting).to(setting.device)
    config = EngineConfig(device=setting.device, lr=1e-5, max_tokens_per_rank=setting.capacity, **options)
    engine, batch, objective = build_engine(config, made), sequences(setting), SFT()

    def step() -> tuple[float, dict[str, Any]]:
        engine.prefetch(batch, objective)  # the next one, as a run has it
        metrics = engine.train_batch(batch, objective)
        return metrics["loss"], {"micro_batches": int(metrics["micro_batches"]), "fill": round(metrics["fill"], 3)}

    return measure(what, setting, step)


@dataclass(frozen=True)
class PaddedRows:
    """`ids`, `mask` (attention) and `trained` (of the next token's loss), each (rows, width)."""

    ids: Tensor
    mask: Tensor
    trained: Tensor


def padded_rows(setting: Setting, by_length: bool) -> list[PaddedRows]:
    """Cut the batch into micro-batches of right-padded rows."""
    batch = sequences(setting)
    rows = list(zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True))
    if by_length:
        rows.sort(key=lambda row: len(row[0]))
    micro_batches = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        longest = max(len(ids) for ids, _ in some)
        width = next((width for width in setting.widths if width >= longest), longest)

        def full(tensors: list[Tensor], width: int = width) -> Tensor:
            return torch.stack([pad(one, (0, width - len(one))) for one in tensors]).to(setting.device)

        ids, trained = full([ids for ids, _ in some]), full([mask for _, mask in some])
        mask = full([torch.ones_like(ids) for ids, _ in some])
        micro_batches.append(PaddedRows(ids, mask, trained))
    return micro_batches


def stock(what: str, setting: Setting, by_length: bool) -> dict[str, Any]:
    """Measure stock transformers under FSDP2 on padded rows, with gradients added up over micro-batches."""
    net = model(setting).to(setting.device)
    reduced = torch.bfloat16 if setting.device == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh(setting.device, (1,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    parts = padded_rows(setting, by_length)
    total = sum(int(part.trained.sum()) for part in parts)
    longest = sum(part.ids.shape[0] * int(part.mask.sum(1).max()) for part in parts)
    facts = {
        "micro_batches": len(parts),
        "padded_to": sum(part.ids.numel() for part in parts),
        "to_longest": longest,
        "shapes": sorted({tuple(part.ids.shape) for part in parts}),
    }

    def step() -> tuple[float, dict[str, Any]]:
        loss = torch.zeros((), device=setting.device)
        for part in parts:
            net.set_requires_gradient_sync(part is parts[-1])
            logits = net(input_ids=part.ids, attention_mask=part.mask, use_cache=False).logits[:, :-1]
            losses = cross_entropy(logits.float().flatten(0, 1), part.ids[:, 1:].flatten(), reduction="none")
            share = (losses * part.trained[:, 1:].flatten()).sum() / total
            share.backward()
            loss += share.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss), facts

    return measure(what, setting, step)


CASES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "padded": lambda setting: stock("stock transformers, FSDP2, padded rows", setting, by_length=False),
    "sorted": lambda setting: stock("stock transformers, FSDP2, padded rows by length", setting, by_length=True),
    "packed": lambda setting: packed("engine, packed", setting),
    "plain": lambda setting: packed("engine, packed, FSDP2, not compiled", setting, compile="off", weights="sharded"),
}


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the useful tokens/s of packed rows as a multiple of those of each kind of padded rows."""
    ratios = {}
    for ours in [case for case in ("packed", "plain") if case in results]:
        for theirs in [case for case in ("padded", "sorted") if case in results]:
            rows = results[ours], results[theirs]
            ratio = rows[0]["useful_tokens_per_s"] / rows[1]["useful_tokens_per_s"]
            ratios[f"{ours}_over_{theirs}"] = round(ratio, 2)
            ratios[f"{ours}_over_{theirs}_to_longest"] = round(ratio * rows[1]["to_longest"] / rows[1]["padded_to"], 2)
    return ratios


def run(setting: Setting, cases: list[str], out: str | None) -> None:
    device, rows = setting.device, {}
    lengths = sorted(setting.lengths())
    say(
        what="setting",
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        sequences=len(lengths),
        useful_tokens=sum(lengths),
        lengths={"shortest": lengths[0], "median": lengths[len(lengths) // 2], "longest": lengths[-1]},
        rows_at_once=ROWS_AT_ONCE,
    )
    for case in cases:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rows[case] = CASES[case](setting)
    losses = {case: row["first_loss"] for case, row in rows.items()}
    rates = {case: row["useful_tokens_per_s"] for case, row in rows.items()}
    say(what="ratio", useful_tokens_per_s=rates, first_losses=losses, **ratios_of(rows))
    if out:
        Path(out).write_text("\n".join(json.dumps(row) for row in OUT) + "\n")
    if max(losses.values()) - min(losses.values()) > setting.tolerance:
        raise SystemExit(f"the cases do not train the same: first losses {losses}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SETTINGS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["padded", "sorted", "packed"])
    parser.add_argument("--widths", nargs="*", type=int, help="of padded rows; none: that of their longest")
    parser.add_argument("--out")
    given = parser.parse_args()
    chosen = SETTINGS[given.device]
    if given.widths is not None:
        chosen = replace(chosen, widths=tuple(sorted(given.widths)))
    launch(run, (chosen, given.cases, given.out), device=given.device)
