"""The weight check that a worker has the weights of a file: the bytes it read, its head, each of its experts.

vLLM keeps weights in the order of its kernels. A head that is tied to the embedding has a copy of its own, which may
silently stay stale, so its products are compared; experts are compared before they are packed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.sync.tensor_digest import digests_of

HEAD = "lm_head.weight"
DRAFT = "mtp.fc.weight"
ROWS = 512
"""Number of compared rows of the head, evenly spread."""
BFLOAT16_TOLERANCE = 0.05
"""Error of a product in bfloat16, relative to its size."""
_LAYER = re.compile(r"^(?!mtp\.).*\blayers\.(\d+)\.")


def corrupted_tensors(named: Mapping[str, Tensor], digests: Mapping[str, int]) -> list[str]:
    """Return the tensors of a file whose bytes are not those that were written."""
    found = zip(named, digests_of([*named.values()]), strict=True)
    return [f"{name} is not what was staged" for name, digest in found if digest != digests[name]]


def stale_heads(heads: Iterable[tuple[str, Any]], named: Mapping[str, Tensor]) -> list[str]:
    """Return the heads (vLLM's `ParallelLMHead`s by name) whose products differ from the file's weights, in the part of
    the vocabulary that is this worker's."""
    problems = []
    for name, head in heads if HEAD in named else ():
        first, last = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
        rows = torch.linspace(0, last - first - 1, min(ROWS, last - first)).long()
        wanted = named[HEAD][first + rows].float().cpu()
        inputs = torch.randn(4, wanted.shape[1], generator=torch.Generator().manual_seed(0))
        inputs = inputs.to(head.weight.dtype)
        outputs = head.quant_method.apply(head, inputs.to(head.weight.device))[:, rows.to(head.weight.device)]
        expected = inputs.float() @ wanted.T
        if not (outputs.float().cpu() - expected).norm() <= BFLOAT16_TOLERANCE * expected.norm():
            problems.append(f"{name} does not give the products of {HEAD}")
    return problems


def stale_draft(draft: Any, named: Mapping[str, Tensor]) -> list[str]:
    """Return whether the first product of a head for multi-token prediction, a model of its own in vLLM, differs from
    the file's weights. All workers of a model call it, as its parts are gathered."""
    layer = getattr(draft.model, "fc", None)
    if layer is None or DRAFT not in named:
        return []
    wanted, own = named[DRAFT].float().cpu(), next(layer.parameters())
    inputs = torch.randn(4, wanted.shape[1], generator=torch.Generator().manual_seed(0)).to(own.dtype)
    outputs, expected = layer(inputs.to(own.device)), inputs.float() @ wanted.T
    close = (outputs.float().cpu() - expected).norm() <= BFLOAT16_TOLERANCE * expected.norm()
    return [] if close else [f"the head that drafts does not give the products of {DRAFT}"]


def stale_experts(layers: Iterable[tuple[str, Any]], named: Mapping[str, Tensor], rank: int) -> list[str]:
    """Return the experts (of vLLM's `RoutedExperts` by name) of worker `rank` whose rows differ from the file's. Call
    it before they are packed."""
    return [problem for name, layer in layers for problem in _stale_in(name, layer, named, rank)]


def _stale_in(name: str, layer: Any, named: Mapping[str, Tensor], rank: int) -> Iterator[str]:
    place = _LAYER.search(name)
    assert place is not None, name
    within = {
        key.partition(".experts.")[2]: value
        for key, value in named.items()
        if ".experts." in key
        and not key.startswith("mtp.")
        and (match := _LAYER.search(key)) is not None
        and match[1] == place[1]
    }
    count = layer.local_num_experts if layer.expert_map is None else len(layer.expert_map)
    for expert in range(count):
        own = expert if layer.expert_map is None else int(layer.expert_map[expert])
        if own < 0:
            continue
        gate, up, down = _matrices(within, expert)
        width = layer.w2_weight.shape[2]
        first = 0 if width == gate.shape[0] else rank * width
        pairs = (
            (layer.w13_weight[own, 0], gate[first]),
            (layer.w13_weight[own, width], up[first]),
            (layer.w2_weight[own, 0], down[0, first : first + width]),
        )
        if not all(torch.equal(has.cpu(), wanted.to(has.dtype)) for has, wanted in pairs):
            yield f"expert {expert} of {name} does not have the file's rows"


def _matrices(within: Mapping[str, Tensor], expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and down of an expert, saved with the others in one tensor or by itself."""
    if "gate_up_proj" in within:
        both = within["gate_up_proj"][expert]
        half = both.shape[0] // 2
        return both[:half], both[half:], within["down_proj"][expert]
    return tuple(within[f"{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))  # type: ignore[return-value]
