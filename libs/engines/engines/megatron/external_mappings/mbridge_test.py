"""Families whose weights mbridge maps: steps, weights and files of FSDP2, and the bytes that mbridge itself moves."""

import copy
from pathlib import Path
from typing import Any

import einops  # noqa: F401  mbridge imports it, and asks for it in an extra alone
import mbridge
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig

from engines import EngineConfig, LoraConfig, build_engine
from engines.launch import ensure_group
from engines.megatron.config import model_sizes as sizes
from engines.megatron.config.model_sizes import MBRIDGE_TYPES, ModelSizes, supported
from engines.megatron.external_mappings.mbridge import bridge_of
from engines.megatron.runtime.cuda_calls import adapted
from engines.megatron.runtime.process_groups import release
from engines.parallel.layout import ParallelLayout
from engines.proofs.family_cases import CASES, Case
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_exact import TP_PP, exact_steps, stock_steps
from engines.proofs.megatron_layouts import (
    LENGTHS,
    MAPPED,
    OPTIONS,
    RANKS,
    LayoutCase,
    Measured,
    largest_difference,
    measure,
    measure_all,
    model_of,
)
from engines.prove.options import prove_options
from engines.testing.executors import inside, weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  tests in this process have a group
from engines.testing.same_runs import assert_same_bits, assert_same_run, assert_same_step
from engines.tiny import tiny_batch
from objectives import GRPO, SFT

OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")
MODELS = ("Qwen2, tied", "Llama", "Llama, tied")
SIZES = {"tensor_parallel": 2, "pipeline_parallel": 2}
REFUSED = {"windows, yarn": "sliding-window", "tied, biases, linear rope": "attention_bias=True"}
"""Switches of cases of these families that have not run, and what is said."""
SWITCHES = [case for case in CASES if case.model_type in MBRIDGE_TYPES and case.switches not in REFUSED]


Weights = dict[str, Tensor]
Moved = tuple[bool, Weights, Weights]
Exact = dict[str, tuple[list[dict[str, float]], Weights]]
Ranks = tuple[list[list[Measured]], Exact, list[dict[str, Moved]]]
Found = tuple[dict[str, Measured], Exact, Ranks]


def mark(stage: nn.Module) -> None:
    """As megatron-core marks what ranks share where it draws first values, which the engine has no use for; 0.19 has
    marked it without."""
    shared = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in stage.modules():
        if isinstance(module, shared) and module.weight is not None and not hasattr(module.weight, "partition_dim"):
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)


def moved_by_mbridge(path: Path, chosen: dict[str, Any]) -> Moved:
    """What mbridge loads into emptied stages and what it exports from them, beside what the engine has there."""
    config = EngineConfig(model=str(path), backend="megatron", **OPTIONS, **chosen)
    engine = inside(build_engine(config))
    model = engine.model.config
    bridge = bridge_of(model, ModelSizes.of(model), engine.groups.layout.tp, None)
    bridge.mpu = type(bridge.mpu).get_parallel_state()
    want = [copy.deepcopy(stage.state_dict()) for stage in engine.stages]
    exported = {name: tensor.clone() for name, tensor in engine.tensors()}
    for stage in engine.stages:
        for parameter in stage.parameters():
            parameter.data.fill_(float("nan"))
        mark(stage)
    with adapted(engine.device):
        bridge.load_weights(engine.stages, str(path))
        theirs = {name: tensor.clone() for name, tensor in bridge.export_weights(engine.stages)}
    loaded = all(
        torch.equal(value, before[name])
        for stage, before in zip(engine.stages, want, strict=True)
        for name, value in stage.state_dict().items()
        if torch.is_tensor(value)
    )
    release()
    return loaded, exported, theirs


def four_ranks(folder: Path) -> Ranks:
    measured = measure_all(MAPPED, OBJECTIVE, folder)
    exact = {model: exact_steps(LayoutCase(model, TP_PP), OBJECTIVE) for model in MODELS}
    moved = {model: moved_by_mbridge(folder / model, SIZES) for model in MODELS}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, moved)
    return measured, exact, everyone


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """FSDP2 and stock transformers in this process, and the four ranks."""
    folder = tmp_path_factory.mktemp("mbridge")
    made = ensure_group("cpu")
    alone = {
        model: measure(LayoutCase(model), OBJECTIVE, folder / f"fsdp2 {model}", backend="fsdp2") for model in MODELS
    }
    exact = {model: stock_steps(model, OBJECTIVE) for model in MODELS}
    for model in MODELS:
        stock: Any = model_of(model)
        stock.save_pretrained(folder / model)
    if made:
        dist.destroy_process_group()
    return alone, exact, launch_forked(four_ranks, (folder,), world_size=RANKS)


@pytest.mark.parametrize("number", range(len(MAPPED)), ids=[str(case) for case in MAPPED])
def test_layouts_give_the_steps_and_files_of_fsdp2(measured: Found, number: int) -> None:
    want, everyone = measured[0][MAPPED[number].model], measured[2][0]
    assert len(everyone) == RANKS
    for ranks in everyone:
        got = ranks[number]
        assert_same_run(want, got)
        assert_same_bits(want.exported, got.exported)
        assert f"fsdp2 {MAPPED[number].model}" in got.resumed
        for resumed in got.resumed.values():
            assert_same_step(want.resumed["itself"], resumed)


@pytest.mark.parametrize("model", MODELS)
def test_float64_steps_equal_those_of_stock_transformers_to_nine_digits(measured: Found, model: str) -> None:
    want, got = measured[1][model], measured[2][1][model]
    for left, right in zip(want[0], got[0], strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-9)
    for name, value in want[1].items():
        assert got[1][name].dtype == torch.float64
        torch.testing.assert_close(got[1][name], value, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_mbridge_itself_loads_and_exports_the_same_bytes(measured: Found, model: str) -> None:
    stock = {name: p.detach() for name, p in model_of(model).named_parameters()}
    for moved in measured[2][2]:
        loaded, exported, theirs = moved[model]
        assert loaded
        for export in (exported, theirs):
            assert_same_bits(stock, export)


@pytest.mark.parametrize("case", SWITCHES, ids=str)
def test_every_switch_of_the_families_steps_as_under_fsdp2(case: Case) -> None:
    """Rotary embeddings among them: they are transformers' own."""
    batch = tiny_batch(list(LENGTHS))
    engines = [
        build_engine(EngineConfig(backend=backend, **OPTIONS), case.model()) for backend in ("fsdp2", "megatron")
    ]
    want, got = (engine.train_batch(batch, SFT()) for engine in engines)
    assert_same_step(want, got)
    assert largest_difference(*(weights(engine) for engine in engines)) < 1e-5


def test_a_tied_model_leaves_the_tables_of_later_ones_alone() -> None:
    """In mbridge 0.15.1 it does not: its own bridge of a tied model changes the table of the family's class."""
    tied, untied = (model_of("Qwen2, tied").config, Case("qwen2", "untied", {"tie_word_embeddings": False}).config())
    bridge_of(tied, ModelSizes.of(tied))
    assert bridge_of(untied, ModelSizes.of(untied))._weight_name_mapping_mcore_to_hf("output_layer.weight") == [
        "lm_head.weight"
    ]


@pytest.mark.parametrize(
    "case", [Case("llama", "untied"), Case("qwen2", "tied", {"tie_word_embeddings": True})], ids=str
)
def test_adapters_over_ranks_give_what_stock_transformers_gives(case: Case) -> None:
    config = EngineConfig(backend="megatron", device="cpu", tensor_parallel=2, lora=LoraConfig(rank=4))
    certificate = prove_options(config, case.config(), 2)
    assert certificate.holds, certificate


def test_what_has_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout()
    known = set(mbridge.AutoBridge.list_supported_models()) & set(CONFIG_MAPPING)
    assert set(MBRIDGE_TYPES) < known
    for kind in sorted(known - {*MBRIDGE_TYPES, *sizes.DENSE, *sizes.ROUTED} - {"mimo", "deepseek_v3"}):
        answer = supported(AutoConfig.for_model(kind), layout)
        assert not answer, kind
    refused = [case for case in CASES if case.model_type in MBRIDGE_TYPES and case.switches in REFUSED]
    assert len(refused) == len(REFUSED)
    for case in refused:
        with pytest.raises(ValueError, match=REFUSED[case.switches]):
            build_engine(EngineConfig(backend="megatron", **OPTIONS), case.model())
    for version, words in (
        (None, r"mbridge 0\.15\.1: pip install 'tessera-engines\[mbridge\]'"),
        ("0.16", r"mbridge 0\.16 has not been run"),
    ):
        monkeypatch.setattr(sizes, "_installed", lambda package, found=version: found)
        with pytest.raises(ValueError, match=words):
            build_engine(EngineConfig(backend="megatron", **OPTIONS), model_of("Llama"))
