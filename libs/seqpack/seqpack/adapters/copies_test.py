"""Adapted models are copied, pickled and compiled as stock ones, and never take rows whose boundaries were lost."""

import copy
import io
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import AutoConfig, AutoModelForCausalLM

from seqpack.adapters import PackedCollator, adapt_for_packing
from seqpack.adapters.boundaries import restarts

pytestmark = pytest.mark.skipif(
    find_spec("fla") is not None,
    reason="transformers runs flash-linear-attention where it is installed, also in host memory: nothing to compare to",
)
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "sliding_window": 4,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16},
}
PARTS = [[3, 4, 5, 9], [6, 7, 8, 9, 10, 2], [11]]


def tiny(model_type: str = "qwen3_5_text") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **MORE.get(model_type, {}))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model.eval()


def row(parts: list[list[int]] = PARTS) -> dict[str, Any]:
    return PackedCollator()([{"input_ids": part} for part in parts])


def alone(model: Any, parts: list[list[int]] = PARTS) -> Tensor:
    """Logits of a stock model of the same weights, one sequence at a time."""
    stock = type(model)(AutoConfig.for_model(model.config.model_type, **SIZES, **MORE.get(model.config.model_type, {})))
    stock.load_state_dict(model.state_dict())
    return torch.cat([stock.eval()(torch.tensor([part]), use_cache=False).logits[0] for part in parts])


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: Any) -> Any:
    return AveragedModel(model).module


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, averaged, pickled, saved]


@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next", "gemma3_text"])
def test_a_copy_computes_with_its_own_weights_and_boundaries(model_type: str, copied: Callable[[Any], Any]) -> None:
    model = tiny(model_type)
    adapt_for_packing(model)
    frozen = copied(model)
    with torch.no_grad():
        want, ids = alone(frozen), torch.tensor([PARTS[1]])
        for parameter in model.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(frozen(**row()).logits[0], want, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(model(**row()).logits[0], alone(model), atol=2e-5, rtol=1e-5)
        assert torch.equal(frozen(ids, use_cache=False).logits[0], alone(frozen, PARTS[1:2]))
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        assert frozen(**row()).logits.isfinite().all()
        assert frozen(ids).logits.isfinite().all()


@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
def test_a_copy_is_adapted_and_is_undone_alone(copied: Callable[[Any], Any]) -> None:
    model = tiny()
    adaptation = adapt_for_packing(model)
    frozen = copied(model)
    own = adapt_for_packing(frozen)
    assert own.model is frozen
    assert all(module in set(frozen.modules()) for module in own.mixers.values())
    own.undo()
    assert [type(module) for module in frozen.modules()] == [type(module) for module in tiny().modules()]
    with torch.no_grad():
        torch.testing.assert_close(model(**row()).logits[0], alone(model), atol=2e-5, rtol=1e-5)
    adaptation.undo()
    again = copied(model)
    adapt_for_packing(again)
    with torch.no_grad():
        torch.testing.assert_close(again(**row()).logits[0], alone(model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
def test_a_copy_trains_its_own_weights(copied: Callable[[Any], Any]) -> None:
    model = tiny()
    adapt_for_packing(model)
    other = copied(model)
    other(**row()).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_another_implementation_is_followed_and_nothing_of_the_registry_changes() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, before = tiny("llama"), dict(ALL_ATTENTION_FUNCTIONS)
    adapt_for_packing(model)
    after = dict(ALL_ATTENTION_FUNCTIONS)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) <= {"seqpack_packed"}
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    ids = torch.tensor([PARTS[1]])
    weights = model(ids, output_attentions=True).attentions
    plain = tiny("llama")
    plain.set_attn_implementation("eager")
    assert all(map(torch.equal, weights, plain(ids, output_attentions=True).attentions))


def assert_compiled(model_type: str) -> None:
    """Graphs break where boundaries are read; logits and gradients are those of the model as it is."""
    torch.compiler.reset()
    model, plain = tiny(model_type), tiny(model_type)
    for one in (model, plain):
        adapt_for_packing(one)
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        logits = compiled(**row(PARTS[:2])).logits[0]
        torch.testing.assert_close(logits, alone(model, PARTS[:2]), atol=2e-5, rtol=1e-5)
    compiled(**row(PARTS[:2])).loss.backward()
    plain(**row(PARTS[:2])).loss.backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=2e-5, rtol=1e-4)


def test_compiled_packed_rows() -> None:
    """With delta nets: copies_compiled_test."""
    assert_compiled("llama")


def test_compiled_padded_rows_are_one_graph_as_those_of_the_stock_model() -> None:
    torch.compiler.reset()
    model, plain = tiny("llama"), tiny("llama")
    adapt_for_packing(model)
    padded = {
        "input_ids": torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
        "position_ids": torch.tensor([[1, 0, 1, 2], [0, 1, 2, 3]]),
        "use_cache": False,
    }
    with torch.no_grad():
        whole: list[Any] = [torch.compile(one, backend="eager", fullgraph=True) for one in (model, plain)]
        got, want = (one(**padded).logits for one in whole)
    assert torch.equal(got, want)


def lost(**changes: Any) -> dict[str, Any]:
    """A row without boundaries."""
    kept = {key: row()[key] for key in ("input_ids", "position_ids")}
    return {**kept, **changes}


WAYS: dict[str, Callable[[Any], Any]] = {
    "positions alone": lambda m: m(**lost()),
    "a mask of ones": lambda m: m(**lost(attention_mask=torch.ones(1, 11, dtype=torch.int64))),
    "a mask of numbers": lambda m: m(**lost(attention_mask=torch.tensor([[1] * 4 + [2] * 6 + [3]]))),
    "a mask of four dimensions": lambda m: m(**lost(attention_mask=torch.ones(1, 1, 11, 11, dtype=torch.bool))),
    "no cache": lambda m: m(**lost(use_cache=False)),
    "sequence index alone": lambda m: m(**lost(seq_idx=row()["seq_idx"])),
    "keys' boundaries alone": lambda m: m(**lost(cu_seq_lens_k=row()["cu_seq_lens_k"])),
    "embeddings": lambda m: m(**lost(input_ids=None, inputs_embeds=m.get_input_embeddings()(row()["input_ids"]))),
    "the base model": lambda m: m.base_model(**lost()),
    "the base model's forward": lambda m: m.base_model.forward(**lost()),
    "by position": lambda m: m.base_model(row()["input_ids"], None, row()["position_ids"]),
    "several axes": lambda m: m(**lost(position_ids=row()["position_ids"].expand(3, 1, -1))),
    "two rows": lambda m: m(**{key: value.repeat(2, 1) for key, value in lost().items()}),
    "a copy": lambda m: copy.deepcopy(m)(**lost()),
    "one boundary of three": lambda m: m(**{**row(), "cu_seq_lens_q": torch.tensor([0, 4, 11], dtype=torch.int32)}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_positions_that_begin_again_without_boundaries_are_refused(way: Callable[[Any], Any]) -> None:
    model = tiny()
    adapt_for_packing(model)
    with pytest.raises(ValueError, match="position_ids begin again"):
        way(model)


def test_they_are_refused_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    model = tiny("llama")
    adapt_for_packing(model)
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="position_ids begin again"):
        compiled(**lost(use_cache=False))


def test_what_is_no_packed_row_is_taken() -> None:
    model, plain = tiny(), tiny()
    adapt_for_packing(model)
    ids = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]])
    left, right = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    for mask, first in ((left, [1, 1, 0, 1]), (right, [0, 1, 0, 0])):
        given = {"attention_mask": mask, "position_ids": torch.tensor([first, [0, 1, 2, 3]])}
        assert torch.equal(model(ids, **given).logits, plain(ids, **given).logits)
    options = {"attention_mask": left, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    llama, stock = tiny("llama"), tiny("llama")
    adapt_for_packing(llama)
    options["cache_implementation"] = "static"  # its masks are prepared before the model sees them
    options["disable_compile"] = True
    assert torch.equal(llama.generate(ids, **options), stock.generate(ids, **options))


def test_restarts_of_several_axes() -> None:
    """An image of 2 x 2 after a token, then text; then a second sequence of the same."""
    one = torch.tensor([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])
    two = torch.cat([one, one], dim=1)[:, None]
    assert restarts(two).nonzero().tolist() == [[0, 6]]
    assert restarts(torch.tensor([[0, 0, 1, 5, 6]])).tolist() == [[True, False, False, False]]
