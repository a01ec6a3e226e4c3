"""Errors that are planted in the packed path: a proof of a config that has what they touch fails for each of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from engines.families.family import Family
from engines.inputs.model_inputs import PackedInputs
from engines.prove import proof
from engines.prove.generic_family import GenericFamily
from engines.prove.proof import prove
from engines.scoring.token_scorer import TokenScorer
from seqpack.adapters.context import LocalOps, PackedContext
from seqpack.adapters.stock_rows import at_places
from seqpack.ops import by_rows

CONFIGS: dict[str, Any] = {
    "smollm3": {},
    "cohere2": {},
    "mixtral": {},
    "qwen3_5_text": {},
    "gemma3_text": {},
    "llama": {"tie_word_embeddings": True},
    "opt": {},
    "gemma2": {},
    "gpt_oss": {},
    "llama4_text": {},
    "nemotron_h": {},
    "phi": {},
    "bloom": {},
    "falcon": {},
    "mamba": {},
}
Plant = Callable[[pytest.MonkeyPatch], None]


def attention(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Plant a change of what attention is given: (q, k, v, scale, window)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = LocalOps.attention

        def attend(
            self: LocalOps, q: Any, k: Any, v: Any, context: Any, scale: Any, window: Any, **more: Any
        ) -> Tensor:
            q, k, v, scale, window = change(q, k, v, scale, window)
            return real(self, q, k, v, context, scale, window, **more)

        patch.setattr(LocalOps, "attention", attend)

    return plant


def without(option: str) -> Plant:
    """Plant attention that does without an option."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real: Callable[..., Tensor] = LocalOps.attention

        def attend(self: LocalOps, *args: Any, **more: Any) -> Tensor:
            more.pop(option, None)
            return real(self, *args, **more)

        patch.setattr(LocalOps, "attention", attend)

    return plant


def with_option(option: str, change: Callable[[Any], Any]) -> Plant:
    """Plant a change of an option of attention."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real: Callable[..., Tensor] = LocalOps.attention

        def attend(self: LocalOps, *args: Any, **more: Any) -> Tensor:
            return real(self, *args, **{**more, option: change(more[option])})

        patch.setattr(LocalOps, "attention", attend)

    return plant


def other_chunk(patch: pytest.MonkeyPatch) -> None:
    """Plant chunks that are one longer."""
    real: Callable[..., Tensor] = LocalOps.attention

    def attend(self: LocalOps, *args: Any, **more: Any) -> Tensor:
        return real(self, *args, **{**more, **({"chunk": more["chunk"] + 1} if "chunk" in more else {})})

    patch.setattr(LocalOps, "attention", attend)


def replaced(place: str, function: Callable[..., Any]) -> Plant:
    """Plant another function in the place of one."""
    return lambda patch: patch.setattr(place, function)


def delta(change: Callable[..., tuple[Tensor, ...]]) -> Plant:
    """Plant a change of what the recurrence is given: (q, k, v, g, beta)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real: Any = LocalOps.gated_delta_rule
        patch.setattr(LocalOps, "gated_delta_rule", lambda self, *args: real(self, *change(*args[:-1]), args[-1]))

    return plant


def conv(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Plant a change of what the convolution is given: (x, weight, bias, context, activation)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = LocalOps.causal_conv1d
        patch.setattr(LocalOps, "causal_conv1d", lambda self, *args: real(self, *change(*args)))

    return plant


def joined(context: PackedContext, last: bool) -> PackedContext:
    """The boundary behind the first sequence, or before the last one, is dropped."""
    edges = context.cu_seqlens
    edges = torch.cat([edges[:-2], edges[-1:]] if last else [edges[:1], edges[2:]])
    return PackedContext(edges, int(edges.diff().max()))


def boundary(name: str, last: bool) -> Plant:
    """Plant a dropped boundary for one kind of layer."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(LocalOps, name)

        def mixed(self: LocalOps, *args: Any, **more: Any) -> Tensor:
            args = tuple(joined(one, last) if isinstance(one, PackedContext) else one for one in args)
            result: Tensor = real(self, *args, **more)
            return result

        patch.setattr(LocalOps, name, mixed)

    return plant


def inputs(**change: Callable[[Any], Any]) -> Plant:
    """Plant a change of what the packed row is given."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = PackedInputs.inputs

        def built(self: PackedInputs, micro_batch: Any) -> Any:
            made = real(self, micro_batch)
            for name, function in change.items():
                object.__setattr__(made, name, function(getattr(made, name)))
            return made

        patch.setattr(PackedInputs, "inputs", built)

    return plant


def in_model(change: Callable[[Any], Callable[[], None]]) -> Plant:
    """Plant a change of the model while its layers are adapted; `change` returns what undoes it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = TokenScorer.forward

        def forward(self: TokenScorer, *args: Any, **options: Any) -> Any:
            undo = change(self.model)
            try:
                return real(self, *args, **options)
            finally:
                undo()

        patch.setattr(TokenScorer, "forward", forward)

    return plant


def scorer(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Plant:
    """Plant a change of what the scorer is called with: (inputs, temperature, entropy)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = TokenScorer.forward
        patch.setattr(TokenScorer, "forward", lambda self, *args: real(self, *change(args)))

    return plant


def method(kind: type[Family], name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(kind, name, lambda self, config: value)


def swapped_layers(model: Any) -> Callable[[], None]:
    layers = model.base_model.layers
    before = list(layers)
    layers[0], layers[1] = before[1], before[0]

    def undo() -> None:
        layers[0], layers[1] = before[0], before[1]

    return undo


def skipped_layer(model: Any) -> Callable[[], None]:
    layers = model.base_model.layers
    last = layers[-1].mlp
    hook = last.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    return hook.remove  # type: ignore[no-any-return]


def stale_head(model: Any) -> Callable[[], None]:
    head = model.lm_head
    live = head.weight
    head.weight = nn.Parameter(live.detach() * 1.01)
    return lambda: setattr(head, "weight", live)


def halved_gradient(model: Any) -> Callable[[], None]:
    layer = model.base_model.layers[0].mlp.down_proj.weight
    if not getattr(layer, "planted", False):
        layer.planted = True
        layer.register_hook(lambda grad: grad / 2)
    return lambda: None


def other_eps(model: Any) -> Callable[[], None]:
    norm = model.base_model.norm
    before = norm.variance_epsilon
    norm.variance_epsilon = before + 1e-2
    return lambda: setattr(norm, "variance_epsilon", before)


def other_experts(model: Any) -> Callable[[], None]:
    experts = model.base_model.layers[0].mlp.experts
    hook = experts.register_forward_pre_hook(lambda module, args: (args[0], args[1].flip(-1), *args[2:]))
    return hook.remove  # type: ignore[no-any-return]


def rows_of(x: Tensor) -> Tensor:
    return torch.arange(len(x))


ERRORS: dict[str, tuple[str, Plant]] = {
    "scale a tenth larger": ("smollm3", attention(lambda q, k, v, s, w: (q, k, v, 1.1 * s, w))),
    "scale of another width": ("smollm3", attention(lambda q, k, v, s, w: (q, k, v, (2 * q.shape[-1]) ** -0.5, w))),
    "window one longer": ("cohere2", attention(lambda q, k, v, s, w: (q, k, v, s, w and w + 1))),
    "window one shorter": ("cohere2", attention(lambda q, k, v, s, w: (q, k, v, s, w and w - 1))),
    "no window": ("cohere2", attention(lambda q, k, v, s, w: (q, k, v, s, None))),
    "window in every layer": ("gemma3_text", attention(lambda q, k, v, s, w: (q, k, v, s, w or 8))),
    "queries for keys": (
        "llama",
        attention(lambda q, k, v, s, w: (k.repeat_interleave(q.shape[1] // k.shape[1], 1), k, v, s, w)),
    ),
    "key heads in another order": ("smollm3", attention(lambda q, k, v, s, w: (q, k.flip(1), v, s, w))),
    "value heads in another order": ("smollm3", attention(lambda q, k, v, s, w: (q, k, v.flip(1), s, w))),
    "values in bfloat16": ("llama", attention(lambda q, k, v, s, w: (q, k, v.bfloat16().to(v.dtype), s, w))),
    "values without gradient": ("llama", attention(lambda q, k, v, s, w: (q, k, v.detach(), s, w))),
    "first boundary dropped for attention": ("smollm3", boundary("attention", last=False)),
    "last boundary dropped for attention": ("smollm3", boundary("attention", last=True)),
    "boundary dropped for the convolution": ("qwen3_5_text", boundary("causal_conv1d", last=False)),
    "boundary dropped for the recurrence": ("qwen3_5_text", boundary("gated_delta_rule", last=True)),
    "boundary dropped for full attention alone": ("qwen3_5_text", boundary("attention", last=False)),
    "no activation": ("qwen3_5_text", conv(lambda x, w, b, c, a: (x, w, b, c, None))),
    "convolution reversed": ("qwen3_5_text", conv(lambda x, w, b, c, a: (x, w.flip(-1), b, c, a))),
    "decay halved": ("qwen3_5_text", delta(lambda q, k, v, g, b: (q, k, v, g / 2, b))),
    "beta of one": ("qwen3_5_text", delta(lambda q, k, v, g, b: (q, k, v, g, torch.ones_like(b)))),
    "recurrence of other keys": ("qwen3_5_text", delta(lambda q, k, v, g, b: (q, q, v, g, b))),
    "positions that go on": ("opt", inputs(position_ids=rows_of)),
    "positions halved": ("llama", inputs(position_ids=lambda p: p // 2)),
    "scores of the token before": ("llama", inputs(rows=lambda rows: (rows - 1).clamp(min=0))),
    "targets of the token after": ("llama", inputs(targets=lambda ids: ids.roll(-1))),
    "another temperature": ("llama", scorer(lambda args: (args[0], 1.01, *args[2:]))),
    "sinks forgotten": ("gpt_oss", without("sinks")),
    "soft cap of scores forgotten": ("gemma2", without("soft_cap")),
    "chunks one longer": ("llama4_text", other_chunk),
    "chunks forgotten": ("llama4_text", without("chunk")),
    "queries scaled by their place in the row": (
        "llama4_text",
        replaced("seqpack.adapters.attention.scales_queries", lambda module: False),
    ),
    "boundary dropped for Mamba layers": ("nemotron_h", boundary("by_rows", last=True)),
    "a Mamba layer's rows without gradient": (
        "nemotron_h",
        replaced("seqpack.adapters.context.by_rows", lambda f, x, *more: by_rows(f, x.detach(), *more)),
    ),
    "slopes of ALiBi forgotten": ("bloom", without("alibi")),
    "slopes of ALiBi in another order": ("bloom", with_option("alibi", lambda slopes: slopes.flip(0))),
    "slopes of ALiBi a tenth larger": ("bloom", with_option("alibi", lambda slopes: 1.1 * slopes)),
    "boundary dropped for attention of a layer's own code": ("falcon", boundary("by_rows", last=True)),
    "positions of the token before": (
        "falcon",
        replaced(
            "seqpack.adapters.stock_rows.at_places",
            lambda value, place, *more: at_places(value, place.roll(1, 1), *more),
        ),
    ),
    "boundary dropped for Mamba-1": ("mamba", boundary("by_rows", last=False)),
    "bias of the head forgotten": (
        "phi",
        replaced("engines.scoring.token_scorer._with_bias", lambda hidden, head: (hidden, head.weight)),
    ),
    "factor of the logits": ("cohere2", method(GenericFamily, "head_scale", 1.0)),
    "bound of the logits": ("llama", method(Family, "soft_cap", 30.0)),
    "layers in another order": ("smollm3", in_model(swapped_layers)),
    "a layer skipped": ("smollm3", in_model(skipped_layer)),
    "a tied head that is stale": ("llama", in_model(stale_head)),
    "gradient of one projection halved": ("smollm3", in_model(halved_gradient)),
    "another epsilon": ("smollm3", in_model(other_eps)),
    "experts in another order": ("mixtral", in_model(other_experts)),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_fails_the_proof(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = ERRORS[error]
    plant(monkeypatch)
    monkeypatch.setattr(proof, "flips", lambda *args: ())  # not asked of a proof that fails
    certificate = prove(AutoConfig.for_model(name, **copy.deepcopy(CONFIGS[name])))
    assert not certificate.holds, certificate
    assert certificate.log_probs > 10 * proof.LOG_PROBS or certificate.gradients > 10 * proof.GRADIENTS


@pytest.mark.parametrize("name", CONFIGS)
def test_without_one_it_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "flips", lambda *args: ())
    certificate = prove(AutoConfig.for_model(name, **CONFIGS[name]))
    assert certificate.holds, certificate
    assert all(moved > proof.MARGIN * proof.LOG_PROBS for moved in certificate.sensitivity.values())
