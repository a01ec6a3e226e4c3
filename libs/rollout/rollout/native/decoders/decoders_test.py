"""Every decoder against the module itself: one unpadded sequence at a time, whatever joins, moves and leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollout.native.decoders.decoder import Decoder, Past
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.lean.families import refusal
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.testing.model import tiny_dense_model, tiny_model
from rollout.token_scores import scores_of, scores_of_rows

VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **WINDOWS},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"query_pre_attn_scalar": 24, **WINDOWS},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
}

WHOLE = {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, biases, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, no groups": ("qwen3", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", WHOLE),
    "llama": ("llama", {}),
    "llama, biases, its rotary": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim >= 2 else 1.0).add_(0.1 * torch.rand_like(parameter))
    return model.to(dtype).eval()


def reference(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits after the last of `ids`, by one plain forward pass."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def close(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (got.double() - expected.double()).abs().max() < bound * max(1.0, expected.abs().max().item())


def play(model: PreTrainedModel, decoder: Decoder[Any], bound: float = 1e-5) -> None:
    """Five prompts in, one of them twice; two leave, the last moves down, two join late."""
    prompts = [[3, 5, 7], [9] * 20, list(range(2, 13)), [4], [8, 2]]
    logits, cache = decoder.prefill(prompts)
    for prompt, row in zip(prompts, logits, strict=True):
        close(row, reference(model, prompt), bound)
    decoder.place(cache, [0, 1, 3, 4, 1], [0, 1, 3, 4, 5])  # an admission of two prefills: their slots alternate
    decoder.place(decoder.prefill(prompts[2:3])[1], [0], [2])
    rows: list[list[int] | None] = [list(prompts[i]) for i in (0, 1, 2, 3, 4, 1)]
    generator = torch.Generator().manual_seed(0)

    def steps(count: int, rows: Sequence[list[int] | None]) -> None:
        for _ in range(count):
            tokens = torch.randint(VOCAB, (len(rows),), generator=generator)
            got = decoder.step(tokens)
            for row, token, logits in zip(rows, tokens.tolist(), got, strict=True):
                if row is not None:
                    row.append(token)
                    close(logits, reference(model, row), bound)

    steps(3, rows)
    rows[1] = None
    decoder.release(1)
    steps(2, rows)
    decoder.move([5], [1])
    rows = [rows[0], rows[5], rows[2], rows[3], rows[4]]
    steps(2, rows)
    late = [[6] * 24, [7, 7]]
    _, joining = decoder.prefill(late)
    rows[3] = None
    decoder.release(3)
    decoder.place(joining, [1, 0], [3, 5])
    rows[3] = list(late[1])
    rows.append(list(late[0]))
    steps(3, rows)
    rows = go_on(model, decoder, rows, bound)
    steps(2, rows)
    assert rows[2] is not None
    _, again = decoder.prefill([rows[2]])
    decoder.place(again, [0], [2])  # a row's caches computed anew, in its own slot
    steps(2, rows)
    decoder.release(0)
    steps(2, [None, *rows[1:3]])
    decoder.place(cache, [3], [0])
    steps(2, [list(prompts[3]), *rows[1:3]])


def go_on(model: PreTrainedModel, decoder: Decoder[Any], rows: list[Any], bound: float) -> list[Any]:
    """Three rows are kept, two of them leave and come again with more tokens, two more begin from the third's end."""
    decoder.place(decoder.prefill([[5, 3]])[1], [0], [len(rows)])
    two, one = decoder.keep([4, 1]), decoder.keep([2])
    kept = [Past(two, 0), Past(two, 1), Past(one, 0), Past(one, 0)]
    ends = [rows[i] for i in (4, 1, 2, 2)]
    decoder.release(1)
    decoder.release(4)
    new = [[7], [6] * 11, [2, 3, 4], [5] * 11]
    logits, cache = decoder.prefill(new, kept)
    whole = [[*end, *more] for end, more in zip(ends, new, strict=True)]
    for row, got in zip(whole, logits, strict=True):
        close(got, reference(model, row), bound)
    again = decoder.prefill([[9, 9]], [Past(cache, 1)])[0][0]  # a continued row is continued itself
    close(again, reference(model, [*whole[1], 9, 9]), bound)
    decoder.place(cache, [2, 0, 3, 1], [1, 4, len(rows), len(rows) + 1])
    return [rows[0], whole[2], rows[2], rows[3], whole[0], *rows[5:], whole[3], whole[1]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_the_modules_own_forward_row_by_row(family: str) -> None:
    model = model_of(family)
    play(model, ModuleDecoder(model))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_bias": True, "tie_word_embeddings": True},
        {"linear_num_value_heads": 2, "num_key_value_heads": 4},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["full_attention"] * 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
    ids=["plain", "biases, tied", "no groups", "delta nets alone", "attention alone", "whole rotary"],
)
@pytest.mark.parametrize("fuse", [True, False], ids=["joined", "apart"])
@torch.no_grad()
def test_lean_is_the_module(more: dict[str, Any], fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fuse:
        monkeypatch.setattr("rollout.native.lean.model_weights.JOIN_ELEMENTS", 0)
    model = model_of("qwen3_5_text", **more)
    play(model, LeanDecoder(model))


@pytest.mark.parametrize("case", sorted(DENSE))
@pytest.mark.parametrize("fuse", [True, False], ids=["joined", "apart"])
@torch.no_grad()
def test_lean_is_the_dense_module(case: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fuse:
        monkeypatch.setattr("rollout.native.lean.model_weights.JOIN_ELEMENTS", 0)
    family, more = DENSE[case]
    model = model_of(family, **more)
    play(model, LeanDecoder(model))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama"])
@torch.no_grad()
def test_lean_in_float64_is_the_float32_module_and_nearer_to_itself(family: str) -> None:
    """The module keeps float32 islands (norms, decays, states) in a float64 model; the lean pass has none."""
    model = model_of(family, torch.float64)
    play(model, LeanDecoder(model), 1e-5)


@pytest.mark.parametrize("case", sorted(DENSE))
@torch.no_grad()
def test_lean_in_float64_decodes_as_it_reads(case: str) -> None:
    """A step and a packed pass share no operation of attention; without float32 islands they differ by 1e-12."""
    family, more = DENSE[case]
    decoder = LeanDecoder(model_of(family, torch.float64, **more))
    prompts = [[3, 5, 7], list(range(2, 30)), [4]]
    decoder.place(decoder.prefill(prompts)[1], [0, 1, 2], [0, 1, 2])
    for token in (9, 3, 6):
        prompts = [[*p, token] for p in prompts]
        close(decoder.step(torch.tensor([token] * 3)), decoder.prefill(prompts)[0], 1e-12)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3"])
@torch.no_grad()
def test_lean_in_bfloat16_rounds_where_the_module_does(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    decoder = LeanDecoder(model)
    prompts = [[3, 5, 7], list(range(2, 30))]
    logits, cache = decoder.prefill(prompts)
    for prompt, row in zip(prompts, logits, strict=True):
        exact = reference(model_of(family, torch.float64), prompt)
        mine, theirs = ((x.double() - exact).abs().mean() for x in (row, reference(model, prompt)))
        assert mine < 1.5 * theirs + 1e-3
    decoder.place(cache, [0, 1], [0, 1])
    assert decoder.step(torch.tensor([1, 2])).dtype == torch.bfloat16


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=5))
@torch.no_grad()
def test_a_packed_prefill_is_each_prompt_alone(prompts: list[list[int]]) -> None:
    for model in (tiny_model(VOCAB), tiny_dense_model(VOCAB)):
        logits, _ = LeanDecoder(model).prefill(prompts)
        for prompt, row in zip(prompts, logits, strict=True):
            close(row, reference(model, prompt), 1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        ),
        min_size=1,
        max_size=5,
    )
)
@torch.no_grad()
def test_a_packed_continuation_is_each_prompt_alone(turns: list[tuple[list[int], list[int]]]) -> None:
    for model in (tiny_model(VOCAB), tiny_dense_model(VOCAB)):
        decoder = LeanDecoder(model)
        _, cache = decoder.prefill([first for first, _ in turns])
        logits, _ = decoder.prefill([more for _, more in turns], [Past(cache, i) for i in range(len(turns))])
        for (first, more), row in zip(turns, logits, strict=True):
            close(row, reference(model, [*first, *more]), 1e-5)


@pytest.mark.parametrize("make", [LeanDecoder, ModuleDecoder])
@torch.no_grad()
def test_the_size_of_a_cache_is_its_memory_in_tokens(make: type[LeanDecoder | ModuleDecoder]) -> None:
    """Per row: a fixed state, held as the tokens whose keys and values take as much."""
    decoder: Decoder[Any] = make(model_of("qwen3_5_text"))
    decoder.place(decoder.prefill([[3] * 8, [4] * 8])[1], [0, 1], [0, 1])
    decoder.keep([0, 1])
    fixed = decoder.size([8]) - 8
    assert decoder.size([8, 8]) == 2 * (8 + fixed)
    assert decoder.size([8, 6]) == (14 if make is LeanDecoder else 16) + 2 * fixed
    token = 2 * (2 * 2 * 16) * 4  # two attention layers: keys and values of 2 heads of 16, float32
    columns = 3 if make is LeanDecoder else 4  # transformers keeps one input more than the convolution needs
    state = 2 * (4 * 8 * 8 + columns * (2 * 2 * 8 + 4 * 8)) * 4
    assert fixed in (state // token, state // token + 1)


def why_not(model: PreTrainedModel) -> str:
    found = refusal(model)
    assert found is not None
    return found


def test_lean_refuses_what_it_would_leave_out() -> None:
    assert refusal(tiny_model(VOCAB)) is None
    assert "Qwen3MoeForCausalLM" in why_not(model_of("qwen3_moe"))
    assert "Gemma3ForCausalLM" in why_not(model_of("gemma3_text"))
    assert all(refusal(model_of(family, **more)) is None for family, more in DENSE.values())
    assert "sliding window (5)" in why_not(model_of("mistral"))
    assert "sliding window (5)" in why_not(model_of("qwen2"))
    assert "gelu" in why_not(model_of("qwen3", hidden_act="gelu"))
    hooked = tiny_model(VOCAB)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in why_not(hooked)

    class Adapter(torch.nn.Linear):
        """A linear layer that adds something."""

    adapted = tiny_model(VOCAB)
    adapted.model.layers[1].self_attn.q_proj = Adapter(32, 64, bias=False)
    assert "Adapter" in why_not(adapted)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert "yarn" in why_not(model_of("qwen3_5_text", rope_parameters=yarn))
    with pytest.raises(ValueError, match="hooks"):
        LeanDecoder(hooked)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("chunk", [3, 64])
@torch.no_grad()
def test_scores_are_those_of_the_whole_softmax(family: str, chunk: int) -> None:
    """Through windows of 5 tokens and delta nets, in chunks that end inside them, or the whole."""
    model = model_of(family)
    ids = torch.randint(2, VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    table = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    best = table.topk(4)
    decoders: list[Decoder[Any]] = [ModuleDecoder(model), *([] if refusal(model) else [LeanDecoder(model)])]
    assert len(decoders) == (2 if family in ("llama", "qwen3", "qwen3_5_text") else 1)
    for decoder in decoders:
        found = scores_of(ids.tolist(), 4, decoder.score(ids[:-1].tolist(), chunk))
        torch.testing.assert_close(
            found.log_probs[1:].double(), table.gather(1, ids[1:, None])[:, 0], rtol=0, atol=1e-5
        )
        assert torch.equal(found.top_tokens[:, 1:].t(), best.indices)
        torch.testing.assert_close(found.top_log_probs[:, 1:].t().double(), best.values, rtol=0, atol=1e-5)
        rest = table.scatter(1, best.indices, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(found.rest[1:].double(), rest, rtol=0, atol=1e-5)
        assert [float(found.log_probs[0]), float(found.rest[0]), *found.top_tokens[:, 0]] == [0, 0, -1, -1, -1, -1]
        rows = [None, *(dict(enumerate(row)) for row in table.tolist())]
        told = scores_of_rows(ids.tolist(), 4, rows)  # as a server returns them
        assert torch.equal(told.top_tokens, found.top_tokens)
        for name in ("log_probs", "top_log_probs", "rest"):
            torch.testing.assert_close(getattr(told, name), getattr(found, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_model, tiny_dense_model])
def test_a_refresh_reads_the_weights_anew(make: Callable[[int], PreTrainedModel]) -> None:
    model = make(VOCAB)
    decoder = LeanDecoder(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        assert decoder.refresh()
        assert not decoder.refresh()
        close(decoder.prefill([[3, 4, 5]])[0][0], reference(model, [3, 4, 5]), 1e-5)
