"""The proof of a worker's weights, on layers that stand for vLLM's: a wrong row of a head or of any expert is named."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rollout.sync.tensor_digest import digest_of
from rollout.vllm.server.weight_digest import corrupted_tensors, stale_draft, stale_experts, stale_heads

EXPERTS, INNER, HIDDEN, VOCAB = 4, 6, 8, 40
PREFIX = "model.layers.1.mlp.experts"


def file() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "lm_head.weight": torch.randn(VOCAB, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": torch.randn(HIDDEN, INNER),
        f"{PREFIX}.gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        f"{PREFIX}.down_proj": torch.randn(EXPERTS, HIDDEN, INNER),
    }


def one_by_one(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As other checkpoints have them: each matrix of an expert by itself."""
    found = {name: value for name, value in named.items() if ".experts." not in name}
    for expert in range(EXPERTS):
        gate, up = named[f"{PREFIX}.gate_up_proj"][expert].chunk(2)
        found |= {f"{PREFIX}.{expert}.gate_proj.weight": gate, f"{PREFIX}.{expert}.up_proj.weight": up}
        found[f"{PREFIX}.{expert}.down_proj.weight"] = named[f"{PREFIX}.down_proj"][expert]
    return found


def head(named: dict[str, torch.Tensor], first: int = 0, last: int = VOCAB) -> SimpleNamespace:
    """A worker's part of the head, whose kernel multiplies by a copy of it."""
    weight = named["lm_head.weight"][first:last].bfloat16()
    packed = weight.clone()
    indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
    method = SimpleNamespace(apply=lambda layer, x: x @ packed.T)
    return SimpleNamespace(weight=weight, packed=packed, shard_indices=indices, quant_method=method)


def experts(
    named: dict[str, torch.Tensor], rank: int = 0, workers: int = 1, by_experts: bool = False
) -> SimpleNamespace:
    """A worker's part of the experts, in their original order."""
    both, down = (named[f"{PREFIX}.{name}"].bfloat16() for name in ("gate_up_proj", "down_proj"))
    layer = SimpleNamespace(expert_map=None, local_num_experts=EXPERTS)
    if by_experts:
        own = torch.arange(EXPERTS).chunk(workers)[rank]
        layer.expert_map = torch.full((EXPERTS,), -1)
        layer.expert_map[own] = torch.arange(len(own))
        layer.w13_weight, layer.w2_weight = both[own].clone(), down[own].clone()
        return layer
    gate, up = (half.chunk(workers, dim=1)[rank] for half in both.chunk(2, dim=1))
    layer.w13_weight, layer.w2_weight = torch.cat([gate, up], dim=1), down.chunk(workers, dim=2)[rank].clone()
    return layer


def test_bytes_that_are_not_those_written_are_named() -> None:
    named = file()
    digests = {name: digest_of(value) for name, value in named.items()}
    assert corrupted_tensors(named, digests) == []
    named["lm_head.weight"].view(torch.uint8)[3, 3] ^= 1
    assert corrupted_tensors(named, digests) == ["lm_head.weight is not what was staged"]


@pytest.mark.parametrize(("first", "last"), [(0, VOCAB), (16, 32)])
def test_a_head_whose_kernel_kept_an_older_copy_is_named(first: int, last: int) -> None:
    named = file()
    part = head(named, first, last)
    assert stale_heads([("lm_head", part)], named) == []
    assert stale_heads([("lm_head", part)], {}) == []
    part.packed[5] += 3.0
    assert stale_heads([("lm_head", part)], named) == ["lm_head does not give the products of lm_head.weight"]
    part.packed[5] = torch.nan
    assert len(stale_heads([("lm_head", part)], named)) == 1


@pytest.mark.parametrize("saved", [dict, one_by_one])
@pytest.mark.parametrize(("workers", "by_experts"), [(1, False), (2, False), (2, True)])
def test_an_expert_that_is_not_the_files_is_named_by_its_number_in_the_model(
    saved: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], workers: int, by_experts: bool
) -> None:
    named = file()
    for rank in range(workers):
        layer = experts(named, rank, workers, by_experts)
        layers = [(PREFIX, layer)]
        assert stale_experts(layers, saved(named), rank) == []
        for matrix in ("w13_weight", "w2_weight"):
            kept = getattr(layer, matrix).clone()
            getattr(layer, matrix)[1, 0, 0] += 1
            number = 1 + rank * EXPERTS // 2 if by_experts else 1
            wrong = f"expert {number} of {PREFIX} does not have the file's rows"
            assert stale_experts(layers, saved(named), rank) == [wrong]
            setattr(layer, matrix, kept)
    if workers == 2 and not by_experts:
        assert len(stale_experts(layers, saved(named), 0)) == EXPERTS  # the other worker's part


def test_a_drafting_head_that_kept_its_weights_is_named() -> None:
    """The model that vLLM makes of `mtp.*` is apart from the one that it reloads by itself."""
    named = {"mtp.fc.weight": torch.randn(HIDDEN, 2 * HIDDEN)}
    layer = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    draft = SimpleNamespace(model=SimpleNamespace(fc=layer))
    assert stale_draft(draft, named) == ["the head that drafts does not give the products of mtp.fc.weight"]
    layer.weight.data.copy_(named["mtp.fc.weight"])
    assert stale_draft(draft, named) == []
    assert stale_draft(SimpleNamespace(model=SimpleNamespace()), named) == []


@pytest.mark.parametrize("saved", [dict, one_by_one])
def test_experts_of_a_drafting_head_are_not_those_of_the_layer_of_their_number(
    saved: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    named = saved(file())
    others = {name.replace("model.", "mtp."): value + 1 for name, value in named.items() if ".experts." in name}
    assert stale_experts([(PREFIX, experts(file()))], named | others, 0) == []
