"""A copy of a model that an engine prepared computes with its own weights: packed, padded, with adapters, as functions.

The judge is a stock model of the copy's weights, one sequence at a time.
"""

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from engines.adapters.lora import add_adapters, is_adapter
from engines.devices.host_layers import use_host_norms
from engines.families.registry import family_of
from engines.families.torch_operations import choose_torch_operations
from engines.fast.layers import use_layer_functions
from engines.lora_config import LoraConfig
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.read_rows import READ, compute_read_rows
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden
from seqpack.batches.packed import pack_sequences

LENGTHS = [7, 1, 12]
ROWS = torch.tensor([2, 7, 15])


def packed_rows(model: Any) -> Tensor:
    """Logits of three tokens of a packed row."""
    packed = pack_sequences(tiny_batch(LENGTHS))
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen)
    context.derived[READ] = ROWS
    hidden = packed_hidden(model, packed.values["input_ids"], packed.position_ids, context)
    logits: Tensor = model.get_output_embeddings()(hidden.index_select(0, ROWS))
    return logits


def stock_rows(model: Any) -> Tensor:
    """The same of a stock model that has the weights of this one, adapters added."""
    stock = tiny_model("dense")
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("lora_A")]:
        base = name.removesuffix("lora_A")
        tensors[f"{base}weight"] = tensors[f"{base}weight"] + 2.0 * tensors.pop(f"{base}lora_B") @ tensors.pop(name)
    stock.load_state_dict(tensors)
    ids = tiny_batch(LENGTHS)["input_ids"].unbind()
    return torch.cat([stock.eval()(one[None], use_cache=False).logits[0] for one in ids])[ROWS]


def with_adapters(model: Any) -> None:
    add_adapters(model, LoraConfig(rank=2, alpha=4.0), ModelWeights.of(family_of(model.config), model), torch.float32)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapt_for_packing(model)


def as_read(model: Any) -> None:
    choose_torch_operations(model)
    adapt_for_packing(model)
    compute_read_rows(model)


def as_functions(model: Any) -> None:
    adapt_for_packing(model)
    use_layer_functions(model, None)


def with_host_norms(model: Any) -> None:
    use_host_norms(model)
    adapt_for_packing(model)
    compute_read_rows(model)


PREPARED: list[Callable[[Any], Any]] = [adapt_for_packing, as_read, as_functions, with_adapters]
COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    lambda model: AveragedModel(model).module,
    lambda model: pickle.loads(pickle.dumps(model)),
]
CASES = [(prepare, copied) for prepare in PREPARED for copied in COPIES]
CASES += [(with_host_norms, copied) for copied in COPIES[:2]]


@pytest.mark.skipif(find_spec("fla") is not None, reason="stock layers cannot run in host memory with fla installed")
@pytest.mark.parametrize(("prepare", "copied"), CASES)
def test_a_copy_computes_with_its_own_weights(prepare: Callable[[Any], Any], copied: Callable[[Any], Any]) -> None:
    model: Any = tiny_model("dense").eval()
    prepare(model)
    before = packed_rows(model).detach()
    frozen = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
        torch.testing.assert_close(packed_rows(frozen), before, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packed_rows(frozen), stock_rows(frozen), atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packed_rows(model), stock_rows(model), atol=5e-5, rtol=1e-5)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        assert torch.equal(packed_rows(frozen), before)
        assert frozen(torch.arange(2, 9)[None], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["dense", "attention"])
def test_positions_that_begin_again_without_boundaries_are_refused(kind: str) -> None:
    """On the engine's way in too, which has a context and no flash arguments."""
    model: Any = tiny_model(kind)
    adapt_for_packing(model)
    packed = pack_sequences(tiny_batch(LENGTHS))
    bare = {"input_ids": packed.values["input_ids"][None], "position_ids": packed.position_ids[None]}
    for call in (model, model.base_model):
        with pytest.raises(ValueError, match="position_ids begin again"):
            call(**bare)
