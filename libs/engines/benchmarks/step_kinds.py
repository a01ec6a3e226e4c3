"""Step times and memory of every kind of training: full, adapters, experts, images; beside stock transformers.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/step_kinds.py
        [--device cuda|cpu] [--ranks N] [--cases full lora ...] [--out FILE]

On each GPU 8,192 packed tokens a step, in the lengths and with the text part of `step_gpu.py` (0.67 B parameters);
experts: 1.0 B parameters, 16 experts of 768 a layer, 4 of them a token; images: a tower of 12 layers of 1,024 features
(0.2 B) and 8 rows with an image of 1,024 patches (256 tokens) each. Adapters have rank 16 and lie on all linear layers.
On a CPU tiny sizes, to see that it runs. Stock transformers: under FSDP2 with the same fused kernels, sequence numbers
and boundaries, adapters by peft. A row says the median of the steps, the peak of the device's memory in them over what
was there before, and their loss.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from step_gpu import SHAPE, batch_of, lengths_of
from torch.nn.functional import cross_entropy

from engines import EngineConfig, LoraConfig, build_engine
from engines.launch import launch
from engines.media.vision_settings import VisionSettings
from engines.testing.images import media_sample
from engines.tiny import tiny_batch, tiny_config
from objectives import SFT
from seqpack import make_batch

STEPS = 8
OUT: list[dict[str, Any]] = []
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
TOWER = {"depth": 12, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
MEDIA = {"image_token_id": 65530, "video_token_id": 65531, "vision_start_token_id": 65532, "vision_end_token_id": 65533}
LORA = LoraConfig(rank=16, alpha=32.0)


def say(**facts: Any) -> None:
    OUT.append(facts)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(facts), flush=True)


def world() -> int:
    return torch.distributed.get_world_size()


def config_of(kind: str, device: str) -> Any:
    """Return a transformers config: "dense", "moe" or "vision"."""
    from transformers import Qwen3_5Config, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    if device == "cpu":
        return tiny_config(kind)
    if kind == "moe":
        extra = {**EXPERTS, "shared_expert_intermediate_size": 768, "router_aux_loss_coef": 0.001}
        sizes = {name: size for name, size in SHAPE.items() if name != "intermediate_size"}
        return Qwen3_5MoeTextConfig(**sizes, **extra, output_router_logits=True)
    if kind == "dense":
        return Qwen3_5TextConfig(**SHAPE)
    rope = {**SHAPE["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {**SHAPE, "rope_parameters": rope}
    return Qwen3_5Config(text_config=text, vision_config=TOWER, tie_word_embeddings=True, **MEDIA)


def model_of(kind: str, device: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if kind == "vision" else AutoModelForCausalLM
    with torch.device(device):
        return auto.from_config(config_of(kind, device), dtype=torch.float32, **options)


def rows_of(kind: str, device: str) -> Any:
    """Return the batch of every step, 8,192 tokens for each GPU."""
    if kind == "vision":
        settings = VisionSettings.of(config_of(kind, device))
        grid, texts = ((1, 32, 32), [100, 668]) if device == "cuda" else ((1, 4, 4), [3, 9])
        vocab = 40 if device == "cpu" else 65000
        return make_batch([media_sample(settings, texts, [grid], seed=i, vocab=vocab) for i in range(8 * world())])
    return batch_of(lengths_of(8192, 8192) * world()) if device == "cuda" else tiny_batch([60, 5, 33, 20] * world())


def measure(what: str, step: Any, tokens: int, device: str, before: int, **facts: Any) -> None:
    """Time `step`, which returns its loss, after a first call and two more."""
    cuda = device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    began = time.perf_counter()
    losses = [float(step())]
    wait()
    first = time.perf_counter() - began
    losses += [float(step()), float(step())]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        wait()
        began = time.perf_counter()
        losses.append(float(step()))
        wait()
        times.append(time.perf_counter() - began)
    middle = sorted(times)[STEPS // 2]
    say(
        what=what,
        ms=round(middle * 1e3, 1),
        fastest_ms=round(min(times) * 1e3, 1),
        tokens_per_s=round(tokens / middle),
        peak_gib=round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if cuda else None,
        first_s=round(first, 1),
        losses=[round(losses[0], 4), round(losses[-1], 4)],
        **facts,
    )


def clear(device: str) -> int:
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def ours(what: str, kind: str, device: Literal["cuda", "cpu"], **options: Any) -> None:
    """Measure a step of our engine, which packs the next batch meanwhile."""
    before, batch, objective = clear(device), rows_of(kind, device), SFT()
    tokens = sum(len(ids) for ids in batch["input_ids"].unbind())
    cap = tokens // world() + (256 if world() > 1 else 0)  # rows of several ranks are not cut to fit
    config = EngineConfig(device=device, lr=1e-5, max_tokens_per_rank=cap, **options)
    engine: Any = build_engine(config, model_of(kind, device))
    seen: dict[str, float] = {}

    def step() -> float:
        engine.prefetch(batch, objective)
        seen.update(engine.train_batch(batch, objective))
        return seen["loss"]

    parameters = list(engine.executor.model.parameters())
    measure(
        what,
        step,
        tokens,
        device,
        before,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
    )
    say(what="of it", micro_batches=seen["micro_batches"], fill=round(seen["fill"], 3), grad_norm=seen["grad_norm"])


def attention() -> str:
    """Register torch's attention over sequences of several lengths, and return its name."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any,  # noqa: ARG001
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,  # noqa: ARG001
        scaling: float | None = None,
        cu_seq_lens_q: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        longest = kwargs["max_length_q"]
        q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
        out: Any = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        return out[None], None

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", lambda *args, **kwargs: None)  # noqa: ARG005
    return "varlen"


def stock(what: str, kind: str, device: str, adapters: bool = False) -> None:
    """Measure stock transformers under FSDP2: packed on a GPU, a single row on a CPU, where it can't be packed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before, cuda = clear(device), device == "cuda"
    net = model_of(kind, device, attn_implementation=attention() if cuda else "sdpa").train()
    vocab = net.config.vocab_size
    if adapters:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        net = get_peft_model(net, PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"))
    mesh = torch.distributed.device_mesh.init_device_mesh(device, (world(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    decoder = (net.base_model.model if adapters else net).model
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    lengths = lengths_of(8192, 8192) if cuda else [64]
    ids = torch.cat(list(batch_of(lengths)["input_ids"].unbind())).to(device)[None] % vocab
    inputs = inputs_of(lengths, device) if cuda else {}
    mask = torch.cat([torch.arange(n) >= max(1, int(n * 0.3)) for n in lengths]).to(device)[1:]

    def step() -> float:
        out = net(input_ids=ids, use_cache=False, **inputs)
        losses = cross_entropy(out.logits[0, :-1].float(), ids[0, 1:], reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        (loss + getattr(net.config, "router_aux_loss_coef", 0.0) * (getattr(out, "aux_loss", None) or 0.0)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    counts = {"parameters": sum(p.numel() for p in net.parameters()), "trained": sum(p.numel() for p in trained)}
    measure(what, step, sum(lengths) * world(), device, before, **counts)


def inputs_of(lengths: list[int], device: str) -> dict[str, Any]:
    """Return the inputs that keep packed sequences apart in transformers: positions, sequence numbers, boundaries."""
    edges = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    number = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).to(device)[None],
        "seq_idx": number.to(device)[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


CASES: dict[str, Any] = {
    "full": lambda device: ours("full", "dense", device),
    "full_plain": lambda device: ours("full, not compiled", "dense", device, compile="off", weights="sharded"),
    "stock_full": lambda device: stock("stock, full", "dense", device),
    "lora": lambda device: ours("adapters of rank 16", "dense", device, lora=LORA),
    "stock_lora": lambda device: stock("stock, adapters by peft", "dense", device, adapters=True),
    "experts": lambda device: ours("experts", "moe", device),
    "shared": lambda device: ours("experts, shared out", "moe", device, expert_parallel=world()),
    "stock_experts": lambda device: stock("stock, experts", "moe", device),
    "frozen": lambda device: ours("images, tower frozen", "vision", device, vision="frozen"),
    "trained": lambda device: ours("images, tower trained", "vision", device, vision="trained"),
}


def main(device: str, cases: list[str], out: str | None) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    say(what="machine", device=name, ranks=world(), torch=torch.__version__, steps=STEPS)
    for case in cases:
        CASES[case](device)
        if out and torch.distributed.get_rank() == 0:
            Path(out).write_text("\n".join(json.dumps(row) for row in OUT) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out")
    given = parser.parse_args()
    launch(main, (given.device, given.cases, given.out), world_size=given.ranks, device=given.device)
