"""Adapters in layer functions: the sums of the module's own forward, the gradients of what is trained and no others."""

from typing import Any

import pytest
import torch

from engines.adapters.lora import add_adapters, is_adapter, without_adapters
from engines.families.registry import family_of
from engines.fast.compiling import compilations
from engines.fast.layers import use_layer_functions
from engines.lora_config import LoraConfig
from engines.proofs.float64 import KeepFloat64
from engines.scoring.packed_model import adapt_for_packing
from engines.tiny import tiny_model
from engines.weights.model_weights import ModelWeights
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden

LENGTHS = (5, 1, 17, 9)
ALL: tuple[str, ...] = ()
SOME = ("q_proj", "in_proj_qkv", "down_proj", "o_proj")
ATTENTION = ("q_proj", "v_proj")


def adapted(
    targets: tuple[str, ...], functions: bool, backend: str | None = None, dtype: torch.dtype = torch.float64
) -> Any:
    model: Any = tiny_model().to(dtype).eval()
    add_adapters(
        model, LoraConfig(rank=3, alpha=7.0, targets=targets), ModelWeights.of(family_of(model.config), model), dtype
    )
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.requires_grad_()
    adapt_for_packing(model)
    if functions:
        use_layer_functions(model, backend)
    return model


def run(model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 48, (sum(lengths),), generator=generator)
    edges = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    context = PackedContext(torch.tensor(edges, dtype=torch.int32), max(lengths), edges=edges)
    logits = model.get_output_embeddings()(packed_hidden(model, ids, positions, context))
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)
    (logits.log_softmax(-1) * weights).sum().backward()
    results = {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return results


def assert_near(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    assert {name for name, value in found.items() if value is None} == {n for n, v in expected.items() if v is None}
    for name, value in expected.items():
        if value is not None:
            assert (found[name] - value).norm() <= bound * value.norm(), name


@pytest.mark.parametrize("targets", [ALL, SOME, ATTENTION])
def test_equals_the_modules_own_forward(targets: tuple[str, ...]) -> None:
    models = [adapted(targets, functions) for functions in (False, True)]
    with KeepFloat64():
        expected, got = (run(model) for model in models)
    assert_near(got, expected, 1e-9)
    trained = {name for name, value in got.items() if value is not None} - {"logits"}
    assert trained
    assert all(is_adapter(name) for name in trained)


def test_the_base_alone_where_adapters_are_off() -> None:
    model, plain = adapted(ALL, True), adapted(ALL, False)
    with without_adapters(model), without_adapters(plain), torch.no_grad():
        ids, positions = torch.arange(2, 12), torch.arange(10)
        context = PackedContext(torch.tensor([0, 10], dtype=torch.int32), 10, edges=(0, 10))
        got, expected = (packed_hidden(one, ids, positions, context) for one in (model, plain))
    assert (got - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_traced_whole_and_once(backend: str) -> None:
    torch._dynamo.reset()
    model, plain = (adapted(ALL, True, kind, torch.float32) for kind in (backend, None))
    before, counts = compilations(), []
    for seed, lengths in enumerate([LENGTHS, (7, 3), (2,), (40, 1, 1, 6, 9), (32,)]):
        assert_near(run(model, lengths, seed), run(plain, lengths, seed), 1e-4)
        counts.append(compilations() - before)
    assert counts == counts[:1] * len(counts)
