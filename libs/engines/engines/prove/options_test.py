"""Combinations that no test runs, proven on ranks; errors of a layout, planted on them, that the proof sees."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, Qwen3MoeConfig

from engines import EngineConfig, LoraConfig, build_engine
from engines.capability import refuse_unsupported
from engines.families.registry import digest
from engines.prove.certificate import Certificate
from engines.prove.forked_ranks import launch_forked
from engines.prove.options import prove_options, small_layout
from engines.prove.options_admission import admit_options, options_certificate, options_path
from engines.tiny import tiny_config

EXPERTS = Qwen3MoeConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    intermediate_size=96, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
LORA = LoraConfig(rank=4)
SHARED: dict[str, Any] = {"device": "cpu", "expert_parallel": 2}


@pytest.fixture(scope="module", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_CERTIFICATES", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.mark.parametrize(
    ("options", "ranks", "small"),
    [
        ({**SHARED, "lora": LORA}, 16, {"ranks": 4, "expert_parallel": 2}),
        ({**SHARED, "expert_parallel": 8, "shard_ranks": 8}, 32, {"ranks": 4, "shard_ranks": 2}),
        ({**SHARED, "master_dtype": "bfloat16"}, 2, {"ranks": 2}),
        ({"device": "cpu", "optimizer_on_host": True, "parameters_on_host": True, "lora": LORA}, 1, {"ranks": 1}),
    ],
)
def test_what_no_test_has_run_together_is_proven(options: dict[str, Any], ranks: int, small: Mapping[str, Any]) -> None:
    config = EngineConfig(**options)
    admit_options(config, EXPERTS, ranks)
    certificate = options_certificate(config, EXPERTS, ranks)  # from the cache: it would take seconds
    assert certificate is not None
    assert certificate.holds
    assert {name: certificate.options[name] for name in small} == small
    assert certificate.sensitivity["the first two sequences as one"] > 1.0
    with pytest.raises(ValueError, match=r"has not been run with .*: leave one of both out"):
        build_engine(EngineConfig(**options, prove="off"), EXPERTS)


def test_uneven_and_virtual_stages_are_proven() -> None:
    config = EngineConfig(
        backend="megatron", device="cpu", pipeline_parallel=4, virtual_pipeline_parallel=2, first_stage_layers=2
    )
    certificate = options_certificate(config, tiny_config("attention", num_hidden_layers=26), 4)
    assert certificate is not None
    assert certificate.holds, certificate
    assert certificate.options["first_stage_layers"] == 2


def test_options_of_megatron_that_no_test_has_run_are_proven() -> None:
    """One that changes the model fails with the number; one that recomputes nothing but memory holds."""
    shared: dict[str, Any] = {"backend": "megatron", "device": "cpu"}
    model = tiny_config("attention", num_hidden_layers=2)
    right = EngineConfig(**shared, transformer_options=("clone_scatter_output_in_embedding=false",))
    wrong = EngineConfig(**shared, transformer_options=("softmax_scale=0.5",))
    certificate = options_certificate(right, model, 1)
    assert certificate is not None
    assert certificate.holds, certificate
    assert certificate.options["transformer_options"] == right.transformer_options
    with pytest.raises(ValueError, match=r"softmax_scale has not been run: leave it out.*differ from stock"):
        admit_options(wrong, model, 1)
    with pytest.raises(ValueError, match=r"transformer_options softmax_scale has not been run"):
        refuse_unsupported(replace(wrong, prove="off"))


def test_options_of_experts_are_proven_for_the_run() -> None:
    """Scores of another function for the router fail with the number; names of groups in metrics change nothing."""
    shared: dict[str, Any] = {"backend": "megatron", "device": "cpu"}
    right = EngineConfig(**shared, transformer_options=("moe_per_layer_logging=true",))
    certificate = options_certificate(right, EXPERTS, 1)
    assert certificate is not None
    assert certificate.holds, certificate
    wrong = EngineConfig(**shared, transformer_options=("moe_router_score_function=sigmoid",))
    with pytest.raises(
        ValueError, match=r"moe_router_score_function has not been run: leave it out.*differ from stock"
    ):
        admit_options(wrong, EXPERTS, 1)


def of_rank(engine: Any, name: str) -> torch.Tensor:
    parameter = dict(engine.executor.model.named_parameters())[name]
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


@torch.no_grad()
def scale_a_shard(engine: Any) -> None:
    if dist.get_rank() == 1:
        of_rank(engine, "model.layers.1.self_attn.v_proj.weight").mul_(1.01)


@torch.no_grad()
def swap_experts(engine: Any) -> None:
    own = of_rank(engine, "model.layers.1.mlp.experts.down_proj")
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    own.copy_(parts[dist.get_rank() ^ 1])


def halve_a_gradient(engine: Any) -> None:
    update, parameters = engine.executor.optimizer_step, dict(engine.executor.model.named_parameters())

    def halved(*args: Any) -> Any:
        parameters["model.layers.0.self_attn.k_proj.weight"].grad.mul_(0.5)
        return update(*args)

    engine.executor.optimizer_step = halved


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (
            scale_a_shard,
            "an export differs from .*: model.layers.1.self_attn.v_proj.weight",
        ),
        (swap_experts, "an export differs from .*: model.layers.1.mlp.experts.0.down_proj"),
        (halve_a_gradient, r"gradients 5\.0e-01 \(model.layers.0.self_attn.k_proj.weight\)"),
    ],
)
def test_an_error_of_a_layout_is_seen(plant: Any, text: str) -> None:
    certificate = prove_options(EngineConfig(**SHARED), EXPERTS, 2, plant=plant)
    assert any(re.search(text, problem) for problem in certificate.problems), certificate
    assert (certificate.log_probs > 1e-3) == (plant is not halve_a_gradient)


def halve_a_text_gradient(engine: Any) -> None:
    update, parameters = engine.executor.optimizer_step, dict(engine.executor.model.named_parameters())

    def halved(*args: Any) -> Any:
        next(one for name, one in parameters.items() if name.endswith("1.self_attn.k_proj.weight")).grad.mul_(0.5)
        return update(*args)

    engine.executor.optimizer_step = halved


def test_the_text_part_of_a_multi_modal_type_is_proven_inside_of_the_whole() -> None:
    config, whole = EngineConfig(device="cpu"), AutoConfig.for_model("llava")
    certificate = prove_options(config, whole, 1)
    assert certificate.holds, certificate
    assert (certificate.model_type, certificate.config) == ("llava", digest(whole))
    certificate = prove_options(config, whole, 1, plant=halve_a_text_gradient)
    assert "gradients 5.0e-01 (model.language_model.layers.1.self_attn.k_proj.weight)" in str(certificate)


def test_ranks_are_of_the_runs_devices_where_it_asks_for_a_full_proof() -> None:
    config = EngineConfig(device="npu", prove="full", allow_untested=("npu",))
    with pytest.raises(ValueError, match=r"this machine has .*set prove to 'cached' for one on the CPU"):
        small_layout(config, 2)
    assert small_layout(replace(config, prove="cached"), 2).config.device == "cpu"


def build_on_ranks(folder: Path, options: dict[str, Any], kept: Certificate) -> list[str]:
    """Return what each rank is told where this certificate is kept."""
    os.environ["TESSERA_CERTIFICATES"] = str(folder)
    config = EngineConfig(**options)
    if dist.get_rank() == 0:
        kept.save(options_path(config, EXPERTS, dist.get_world_size()))
    try:
        build_engine(config, EXPERTS)
        answer = "built"
    except ValueError as error:
        answer = str(error)
    answers = [""] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def test_ranks_build_by_a_certificate_and_are_all_told_of_one_that_fails(tmp_path: Path) -> None:
    options = {**SHARED, "master_dtype": "bfloat16"}
    certificate = options_certificate(EngineConfig(**options), EXPERTS, 2)
    assert certificate is not None
    assert launch_forked(build_on_ranks, (tmp_path, options, certificate), 2) == ["built", "built"]
    failed = replace(certificate, problems=("log-probs differ by 7.5",))
    answers = launch_forked(build_on_ranks, (tmp_path, options, failed), 2)
    assert len(set(answers)) == 1
    assert re.search("leave one of both out.*log-probs differ by 7.5", answers[0])


def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora has not been run with .* A proof is of text alone: set vision='off'"):
        admit_options(EngineConfig(**SHARED, lora=LORA, vision="frozen"), tiny_config("vision_moe"), 2)
    with pytest.raises(ValueError, match=r"1 of 1 ranks have not answered within 0 s.*python -m engines prove"):
        prove_options(EngineConfig(device="cpu"), EXPERTS, 1, seconds=0.01)
    assert small_layout(EngineConfig(tensor_parallel=8, pipeline_parallel=4, backend="megatron"), 64).ranks == 4
    assert options_certificate(EngineConfig(device="cpu"), EXPERTS, 4) is None
