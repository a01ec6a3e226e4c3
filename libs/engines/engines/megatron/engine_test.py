"""The Megatron engine in one process: positions, refusals, what is put back, and the shared head."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import EngineConfig, LoraConfig, TrainEngine, base_policy, build_engine, save_adapter
from engines.devices import adaptations
from engines.execution.micro_batches import MicroBatch
from engines.families.torch_operations import choose_torch_operations
from engines.fast.compiling import compilations
from engines.inputs.model_inputs import PackedInputs
from engines.megatron.model.even_inputs import EvenInputs
from engines.megatron.runtime import process_groups as groups
from engines.megatron.runtime.cuda_calls import adapted
from engines.parallel.layout import ParallelLayout
from engines.proofs.family_cases import Case
from engines.proofs.megatron_layouts import (
    LENGTHS,
    OPTIONS,
    PADDING,
    LayoutCase,
    engine_of,
    largest_difference,
    model_of,
)
from engines.scoring.log_probs import token_log_probs, token_log_probs_reference
from engines.testing.executors import assert_same, inside, state_of, weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from engines.weights.disk_weights import DiskTensor
from objectives import GRPO, SFT
from seqpack import pack_sequences
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

CASE = LayoutCase("Qwen3.5")


def test_positions_of_several_axes() -> None:
    """What images give: the same scores as FSDP2's, and others than those of plain positions."""
    batch = tiny_batch(list(LENGTHS))
    plain = engine_of(CASE).forward(batch)["log_probs"].values()
    rng = torch.Generator().manual_seed(3)
    batch["position_ids"] = jagged([torch.randint(0, 40, (3, n), generator=rng) for n in LENGTHS], 1)
    scores = [engine_of(CASE, backend).forward(batch)["log_probs"].values() for backend in ("fsdp2", "megatron")]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-5)
    assert (scores[0] - plain).abs().max() > 1e-2


def test_nothing_is_compiled_on_a_cpu() -> None:
    """megatron-core's small functions run as they are: no process calls a C++ compiler before its first step."""
    made = compilations()
    for case in (CASE, LayoutCase("Qwen3.5 MoE")):
        engine_of(case).train_batch(tiny_batch(list(LENGTHS)), SFT())
    assert compilations() == made


def test_a_reference_policy_only_scores() -> None:
    config = EngineConfig(backend="megatron", **OPTIONS)
    built = build_engine(config, tiny_model("dense", scale=2.0, **PADDING), trainable=False)
    batch = tiny_batch(list(LENGTHS))
    assert torch.equal(built.forward(batch)["log_probs"].values(), engine_of(CASE).forward(batch)["log_probs"].values())
    with pytest.raises(ValueError, match="trainable=False"):
        built.train_batch(batch, GRPO())


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    built = engine_of(CASE, on_nonfinite="skip")
    before = weights(built)
    batch = tiny_batch(list(LENGTHS))
    batch["advantages"] = jagged([row * float("nan") for row in batch["advantages"].unbind()])
    assert built.train_batch(batch, GRPO())["skipped"] == 1.0
    assert largest_difference(before, weights(built)) == 0
    assert built.train_batch(tiny_batch(list(LENGTHS)), GRPO())["skipped"] == 0.0


@pytest.mark.parametrize("model", ["Qwen3.5", "Qwen3.5 MoE"])
def test_a_save_is_a_transformers_directory_that_is_read_a_box_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    built = engine_of(LayoutCase(model))
    built.save_hf(tmp_path / "export")
    read, sizes = DiskTensor.__getitem__, []

    def noted(tensor: DiskTensor, index: Any) -> Tensor:
        box = read(tensor, index)
        sizes.append((tensor.name, box.numel()))
        return box

    monkeypatch.setattr(DiskTensor, "__getitem__", noted)
    other = build_engine(EngineConfig(backend="megatron", model=str(tmp_path / "export"), **OPTIONS))
    assert largest_difference(weights(built), weights(other)) == 0
    shapes = inside(built).shapes
    assert sum(size for _, size in sizes) == sum(map(math.prod, shapes.values()))  # each element once
    assert max(size for name, size in sizes if ".experts." in name or "q_proj" in name) < 32 * 32


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    built = engine_of(CASE)
    batch = tiny_batch(list(LENGTHS))
    built.train_batch(batch, SFT())
    before = weights(built)
    built.save(tmp_path / "saved", wait=False)
    built.train_batch(batch, SFT())
    after = weights(built)
    built.wait_for_saves()
    built.load(tmp_path / "saved")
    assert largest_difference(before, weights(built)) == 0
    built.train_batch(batch, SFT())
    assert largest_difference(after, weights(built)) == 0


def test_an_optimizer_on_the_host_takes_the_same_steps(tmp_path: Path) -> None:
    batch = tiny_batch(list(LENGTHS))
    plain, host = (engine_of(CASE, optimizer_on_host=on) for on in (False, True))
    for engine in (plain, host):
        engine.train_batch(batch, SFT())
    for part, master in inside(host).updates.updated():
        assert master.data_ptr() != part.values.data_ptr()
    assert largest_difference(weights(plain), weights(host)) == 0
    plain.save(tmp_path / "saved")
    other = engine_of(CASE, optimizer_on_host=True, seed=1)
    other.load(tmp_path / "saved")
    for engine in (plain, host, other):
        engine.train_batch(batch, SFT())
    assert largest_difference(weights(plain), weights(host)) == 0
    assert largest_difference(weights(plain), weights(other)) == 0


def test_bfloat16_layers_with_float32_masters(tmp_path: Path) -> None:
    """Two steps beside FSDP2's in bfloat16, and files that hold what is trained, to its last bit."""
    engines = [engine_of(CASE, backend, dtype="bfloat16") for backend in ("fsdp2", "megatron")]
    built = engines[1]
    assert {p.dtype for p in inside(built).stages[0].parameters()} == {torch.bfloat16}
    assert {p.main_grad.dtype for p in inside(built).stages[0].parameters()} == {torch.float32}
    assert largest_difference(*(weights(engine) for engine in engines)) == 0
    for step in range(2):
        batch = tiny_batch(list(LENGTHS), seed=step)
        left, right = (engine.train_batch(batch, SFT()) for engine in engines)
        assert right["loss"] == pytest.approx(left["loss"], rel=5e-3)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=3e-2)
    for parameter in inside(built).parameters:  # what computes is the master, rounded
        master = next(m for part, m in inside(built).updates.updated() if part.one is parameter)
        assert torch.equal(parameter.parameter.flatten(), master.to(torch.bfloat16))
    built.save(tmp_path / "saved")
    other = engine_of(CASE, seed=1, dtype="bfloat16")
    other.load(tmp_path / "saved")
    for engine in (built, other):
        engine.train_batch(tiny_batch(list(LENGTHS)), SFT())
    assert largest_difference(weights(built), weights(other)) == 0


def test_the_engines_router_coefficient_is_said_in_place_of_the_configs() -> None:
    batch = tiny_batch(list(LENGTHS))
    own = engine_of(LayoutCase("Qwen3.5 MoE, router's loss")).train_batch(batch, SFT())
    assert own["auxiliary_loss"] > 0
    assert engine_of(LayoutCase("Qwen3.5 MoE"), router_aux_loss_coef=0.5).train_batch(batch, SFT()) == own
    none = engine_of(LayoutCase("Qwen3.5 MoE, router's loss"), router_aux_loss_coef=0.0).train_batch(batch, SFT())
    assert "auxiliary_loss" not in none


def chosen_by(stock: Any, batch: TensorDict) -> list[Tensor]:
    """What the routers of a transformers model choose, one sequence at a time: i16[tokens, layers, k] a row."""
    chosen, rows = [], []
    choose_torch_operations(stock)
    routers = [module for module in stock.modules() if type(module).__name__.endswith("TopKRouter")]
    for router in routers:
        router.register_forward_hook(lambda _router, _input, output: chosen.append(output[2]))
    for ids in batch["input_ids"].unbind():
        chosen.clear()
        with torch.no_grad():
            stock(input_ids=ids[None], use_cache=False)
        rows.append(torch.stack(chosen, dim=1).to(torch.int16))
    return rows


@pytest.mark.parametrize("model", ["Qwen3 MoE, raw top k, tied", "Qwen3.5 MoE, router's loss"])
def test_replaying_its_own_choice_changes_no_bit(model: str) -> None:
    batch = tiny_batch(list(LENGTHS))
    routed, other = batch.clone(), batch.clone()
    rows = chosen_by(model_of(model).eval(), batch)
    routed[ROUTED_EXPERTS] = jagged(rows, 0)
    other[ROUTED_EXPERTS] = jagged([(row + 1) % 4 for row in rows], 0)
    plain = engine_of(LayoutCase(model))
    scores = plain.forward(batch)["log_probs"].values()
    step = plain.train_batch(batch, SFT())
    for recomputed in (False, True):
        replayed = engine_of(LayoutCase(model), routing_replay=True, gradient_checkpointing=recomputed)
        assert torch.equal(replayed.forward(routed)["log_probs"].values(), scores)
        assert not torch.equal(replayed.forward(other)["log_probs"].values(), scores)
        assert replayed.train_batch(routed, SFT()) == step
        assert largest_difference(weights(replayed), weights(plain)) == 0
    with pytest.raises(ValueError, match="the batch lacks routed_experts"):
        replayed.train_batch(batch, SFT())


def base_of(folder: Path, kind: str = "dense", dtype: torch.dtype = torch.float32) -> str:
    model: Any = tiny_model(kind, scale=2.0, num_hidden_layers=2).to(dtype)
    model.save_pretrained(folder)
    return str(folder)


def with_lora(path: str, backend: Any = "megatron", **options: Any) -> TrainEngine:
    torch.manual_seed(3)
    settings = {**OPTIONS, "lora": LoraConfig(rank=3, alpha=7.0), **options}
    return build_engine(EngineConfig(backend=backend, model=path, **settings))


def test_adapters_are_files_that_peft_reads_and_merge_as_peft_does(tmp_path: Path) -> None:
    """One step under each backend; the files of both, and peft on stock transformers with those of Megatron."""
    path, batch = base_of(tmp_path / "base"), tiny_batch(list(LENGTHS))
    built = {backend: with_lora(path, backend) for backend in ("fsdp2", "megatron")}
    for backend, engine in built.items():
        for seed in range(2):
            engine.train_batch(tiny_batch(list(LENGTHS), seed=seed), SFT())
        save_adapter(engine, tmp_path / backend)
    files = [load_file(tmp_path / backend / "adapter_model.safetensors") for backend in built]
    assert largest_difference(*files) < 1e-5
    configs = [(tmp_path / backend / "adapter_config.json").read_text() for backend in built]
    assert configs[0] == configs[1]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    choose_torch_operations(stock)
    merged = peft.PeftModel.from_pretrained(stock, tmp_path / "megatron").merge_and_unload().state_dict()
    for piece in built["megatron"].export_weights(max_bytes=2**40):
        assert torch.equal(piece.flat, merged[piece.name].flatten()), piece.name
    reference = build_engine(EngineConfig(backend="megatron", model=path, **OPTIONS), trainable=False)
    with base_policy(built["megatron"]) as base:
        scores = base.forward(batch)["log_probs"].values()
    assert torch.equal(scores, reference.forward(batch)["log_probs"].values())
    assert not torch.equal(scores, built["megatron"].forward(batch)["log_probs"].values())
    with pytest.raises(ValueError, match="no adapters"), base_policy(reference):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_layers_keep_the_base_of_adapters_as_it_is_on_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    path = base_of(tmp_path / "base", dtype=dtype)
    built = {backend: with_lora(path, backend, dtype="bfloat16") for backend in ("fsdp2", "megatron")}
    assert {p.dtype for p in inside(built["megatron"]).stages[0].parameters()} == {torch.bfloat16}
    assert largest_difference(*(weights(engine) for engine in built.values())) == 0
    assert torch.equal(*(inside(engine)._base() for engine in built.values()))
    steps = [engine.train_batch(tiny_batch(list(LENGTHS)), SFT()) for engine in built.values()]
    assert steps[1]["loss"] == pytest.approx(steps[0]["loss"], rel=5e-3)
    assert steps[1]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=3e-2)


def test_adapters_resume_on_their_own_base_alone(tmp_path: Path) -> None:
    path = base_of(tmp_path / "base")
    built = with_lora(path)
    built.train_batch(tiny_batch(list(LENGTHS)), SFT())
    built.save(tmp_path / "saved")
    assert all(".lora_" in name or name == "lora_base" for name in inside(built).state()["model"])
    other = with_lora(path)
    other.load(tmp_path / "saved")
    for engine in (built, other):
        engine.train_batch(tiny_batch(list(LENGTHS), seed=1), SFT())
    assert largest_difference(weights(built), weights(other)) == 0
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():  # one bit of one weight
        model.model.layers[0].mlp.up_proj.weight[3, 5] *= 1 + 2**-22
    model.save_pretrained(tmp_path / "other")
    refused = [
        ("other", LoraConfig(rank=3, alpha=7.0), r"another base than .*other"),
        ("base", LoraConfig(rank=3, alpha=700.0), "set lora alpha to 7.0"),
    ]
    for folder, lora, text in refused:
        foreign = with_lora(str(tmp_path / folder), lora=lora)
        foreign.train_batch(tiny_batch(list(LENGTHS), seed=5), SFT())
        before = state_of(foreign)
        with pytest.raises(ValueError, match=text):
            foreign.load(tmp_path / "saved")
        assert_same(state_of(foreign), before)


def test_adapters_of_a_model_with_experts(tmp_path: Path) -> None:
    """Of attention and delta nets; the gate of a shared expert has none."""
    path = base_of(tmp_path / "moe", "moe")
    with pytest.raises(ValueError, match=r"shared_expert_gate can have no adapter .*lora.targets=\('q_proj', "):
        with_lora(path)
    lora = LoraConfig(rank=3, targets=("q_proj", "o_proj", "in_proj_qkv", "out_proj"))
    built = {backend: with_lora(path, backend, lora=lora) for backend in ("fsdp2", "megatron")}
    for engine in built.values():
        for seed in range(2):
            engine.train_batch(tiny_batch(list(LENGTHS), seed=seed), SFT())
    assert largest_difference(*(weights(engine) for engine in built.values())) < 1e-5


def test_a_rank_with_one_expert_takes_the_steps_of_fsdp2() -> None:
    """megatron-core counts no tokens by expert there: what is copied to the host is not all of it always."""
    batch = tiny_batch(list(LENGTHS))
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "norm_topk_prob": False}
    case = Case("qwen3_moe", "one expert", sizes)
    built = [
        build_engine(EngineConfig(backend=backend, **OPTIONS), case.model(scale=2.0))
        for backend in ("fsdp2", "megatron")
    ]
    want, got = (engine.train_batch(batch, SFT()) for engine in built)
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-5)
    exports = ({piece.name: piece.flat for piece in engine.export_weights(2**40)} for engine in built)
    assert largest_difference(*exports) < 1e-5


def test_what_is_swapped_on_a_cpu_is_put_back() -> None:
    before = (torch.cuda.current_device, schedules.torch, MoEAlltoAllTokenDispatcher.cuda_dtoh_stream)
    with adapted(torch.device("cpu")):
        assert schedules.torch is not torch
        assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
    with pytest.raises(KeyError), adapted(torch.device("cpu")):
        raise KeyError
    assert (torch.cuda.current_device, schedules.torch, MoEAlltoAllTokenDispatcher.cuda_dtoh_stream) == before
    assert schedules.torch is torch


def test_another_version_of_megatron_core_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptations, "_version_of", lambda package: "0.18.1")
    with pytest.raises(ValueError, match=r"written for megatron-core >=0\.16,<0\.20,.*, and 0\.18\.1 is installed"):
        engine_of(CASE)


def test_refusals_come_before_weights_are_touched() -> None:
    config, model = EngineConfig(backend="megatron", **OPTIONS), tiny_model("next")
    want = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="'qwen3_next' has no Megatron layer specification"):
        build_engine(config, model)
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="tp=2 and pp=1 need a multiple of 2 ranks, this run has 1"):
        build_engine(EngineConfig(backend="megatron", tensor_parallel=2, **OPTIONS), tiny_model("dense"))
    for option, words in (
        ("hidden_size=8", "follows from the model"),
        ("moe_router_dtyp=fp32", "did you mean moe_router_dtype or moe_router_"),
        ("moe_router_dtype=fp32", "moe_router_dtype follows from the model or from other settings"),
        ("fp8=hybrid", "fp8 changes what the model computes, by sizes, chance, fewer bits or a loss"),
        ("moe_expert_capacity_factor=2.0", "moe_expert_capacity_factor changes what the model computes"),
        ("batch_p2p_sync=1", "batch_p2p_sync must be bool, got 1"),
        ("max_seqlen_per_dp_cp_rank=8", "is set by max_tokens_per_rank, the one cap on a rank's tokens"),
        ("hybrid_context_parallel=true", "is set by context_parallel='dynamic'"),
        ("moe_flex_dispatcher_backend=hybridep", "is of another dispatcher"),
        ("seq_length=8", "has no field seq_length"),
    ):
        with pytest.raises(ValueError, match=words):
            engine_of(CASE, transformer_options=(option,))
    engine_of(CASE)
    with pytest.raises(ValueError, match="megatron-core one layout a process"):
        groups.ensure_groups(ParallelLayout(tp=2))


@pytest.mark.parametrize("entropy", [True, False])
def test_the_shared_head_of_one_rank_equals_the_reference(entropy: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=rng, dtype=torch.float64, requires_grad=True) for n in (11, 8))
    targets = torch.randint(0, 8, (11,), generator=rng)
    grads = torch.randn(2, 11, generator=rng, dtype=torch.float64)
    results: list[list[Any]] = []
    world = dist.group.WORLD
    assert world is not None
    functions: tuple[Callable[[], tuple[Tensor, Tensor | None]], ...] = (
        lambda: token_log_probs(hidden, weight, targets, 0.7, 4, entropy, group=world),
        lambda: token_log_probs_reference(hidden, weight, targets, 0.7),
    )
    for function in functions:
        log_probs, entropies = function()
        loss = (log_probs * grads[0]).sum()
        if entropy:
            assert entropies is not None
            loss = loss + (entropies * grads[1]).sum()
        results.append([log_probs, *torch.autograd.grad(loss, [hidden, weight])])
        if entropy:
            results[-1].append(entropies)
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_padding_is_a_sequence_of_its_own(multiple: int) -> None:
    packed = pack_sequences(tiny_batch([3, 4]))
    micro_batch = MicroBatch(packed, (0, 1), packed.values["loss_mask"], (0,))
    plain, even = PackedInputs().inputs(micro_batch), EvenInputs(PackedInputs(), multiple).inputs(micro_batch)
    assert even.input_ids.numel() % multiple == 0
    assert even.input_ids.numel() - 7 == -7 % multiple
    assert even.input_ids[:7].tolist() == plain.input_ids.tolist()
    assert even.context is not None
    assert even.context.cu_seqlens.tolist()[:3] == [0, 3, 7]
    assert even.context.cu_seqlens[-1] == even.input_ids.numel()
    assert not even.counted[7:].any()
    assert torch.equal(even.rows, plain.rows)
