"""Softmax attention over packed sequences, each attending to itself alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqpack.ops.op_arguments import AttentionCall
from seqpack.ops.probe import OpRequest, choose
from seqpack.ops.scatter_gather import lengths_of, positions_of, put_rows, take_rows

_BUCKET_FILL = 0.75  # sequences at least this long relative to a bucket's longest are padded into it
_BUCKET_SMALL = 32  # up to this length everything is one bucket


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """Attend within each packed sequence.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D]; Hq is a multiple of Hkv, and query head h reads key head h // (Hq // Hkv).
        v: [T, Hkv, Dv]; Dv is D but in latent attention.
        cu_seqlens: int32 [n + 1].
        scale: factor on the scores; D ** -0.5 where None.
        causal: token i sees tokens up to i.
        window: token i sees the last `window` tokens, itself included; needs causal=True. None for all.
        max_seqlen: longest sequence, for the fused kernel; taken from cu_seqlens (a wait for the device) where None.
        backend: "auto", "naive", "torch" or "varlen" (see `seqpack.ops.backends`).
        soft_cap: bound c of the scaled scores, c tanh(scores / c) (Gemma 2, arXiv 2408.00118). No "varlen".
        sinks: [Hq], a logit more in each head's softmax, which no value belongs to (gpt-oss). No "varlen".
        chunk: token i sees tokens of its own chunk alone, the `chunk` tokens from a multiple of it in its sequence on
            (Llama 4); needs causal=True and no window.
        alibi: [Hq], slopes m of ALiBi (arXiv 2108.12409): the scaled score of token i for token j is less by m (i - j).
            Needs causal=True and no soft cap or sinks. No "varlen".

    Returns:
        [T, Hq, Dv] in the dtype of q, or autocast's where that is on.

    Raises:
        ValueError: shapes that disagree, or a backend that cannot run here, with the reason.
    """
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape[:2] != v.shape[:2] or k.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"q must be [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the {q.shape[1]} query heads are no multiple of the {k.shape[1]} key heads")
    _check_masks(causal, window, chunk, alibi, capped=soft_cap is not None or sinks is not None)
    if soft_cap is not None or sinks is not None or alibi is not None or v.shape[2] != q.shape[2]:
        if backend == "varlen":
            raise ValueError(
                "the varlen kernel takes no soft cap, no sinks, no ALiBi and no values of another width than keys"
            )
        backend = "torch" if backend == "auto" else backend
    q, k, v = _one_dtype(q, k, v)
    run = choose(OpRequest.of("attention", q, k, v, cu_seqlens, head_dim=q.shape[2]), backend)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, cu_seqlens, factor, causal, window, max_seqlen, soft_cap, sinks, chunk, alibi)
    result: Tensor = run(call if backend == "naive" else _in_chunks(call))
    return result


def _check_masks(causal: bool, window: int | None, chunk: int | None, alibi: Tensor | None, *, capped: bool) -> None:
    """Raise ValueError for masks and biases that do not go together; `capped`: with a soft cap or sinks."""
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window must be at least 1 and needs causal=True, got window={window}, causal={causal}")
    if chunk is not None and (chunk < 1 or not causal or window is not None):
        raise ValueError(f"chunk must be at least 1 and needs causal=True and no window, got chunk={chunk}")
    if alibi is not None and (not causal or capped):
        raise ValueError("alibi needs causal=True, and neither soft_cap nor sinks")


def _in_chunks(call: AttentionCall) -> AttentionCall:
    """Return the call with each chunk as a sequence of its own: causal attention within chunks is that of sequences."""
    if call.chunk is None:
        return call
    lengths = lengths_of(call.cu_seqlens, call.q.shape[0])
    sizes = [min(call.chunk, length - start) for length in lengths for start in range(0, length, call.chunk)]
    edges = torch.tensor([0, *accumulate(sizes)], dtype=call.cu_seqlens.dtype, device=call.cu_seqlens.device)
    return replace(call, cu_seqlens=edges, max_seqlen=max(sizes, default=0), chunk=None)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to autocast's dtype as torch's own attention does; without autocast, raise ValueError for unlike dtypes."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first")
    return q, k, v


def attention_naive(call: AttentionCall) -> Tensor:
    """Compute softmax(scale q k^T) v for one query token at a time, as the reference."""
    q, groups, outputs, start = call.q, call.q.shape[1] // call.k.shape[1], [], 0
    for length in lengths_of(call.cu_seqlens, q.shape[0]):
        for t in range(start, start + length):
            first = start if call.window is None else max(start, t - call.window + 1)
            first = first if call.chunk is None else t - (t - start) % call.chunk
            last = t + 1 if call.causal else start + length
            keys, values = (x[first:last].repeat_interleave(groups, 1) for x in (call.k, call.v))
            scores = torch.einsum("hd,jhd->hj", q[t], keys) * call.scale
            if call.soft_cap is not None:
                scores = call.soft_cap * (scores / call.soft_cap).tanh()
            if call.alibi is not None:
                distances = t - torch.arange(first, last, device=q.device)
                scores = scores - call.alibi[:, None] * distances
            if call.sinks is not None:
                scores = torch.cat([scores, call.sinks.to(scores.dtype)[:, None]], 1)
            weights = scores.softmax(-1)[:, : len(keys)]
            outputs.append(torch.einsum("hj,jhd->hd", weights, values))
        start += length
    return torch.stack(outputs) if outputs else q.new_zeros(*q.shape[:2], call.v.shape[2])


def attention_torch(call: AttentionCall) -> Tensor:
    """Compute `attention` by scaled_dot_product_attention over buckets of sequences of similar length."""
    device = call.q.device
    lengths = lengths_of(call.cu_seqlens, call.q.shape[0])
    groups = buckets(lengths)
    if not groups:
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    if len(groups) == 1:
        return _bucket(call, call.q, call.k, call.v, lengths)
    tokens = torch.arange(call.q.shape[0], device=device).split(lengths)
    places = [torch.cat([tokens[i] for i in group]) for group in groups]
    outputs = [
        _bucket(call, _pick(call.q, place), _pick(call.k, place), _pick(call.v, place), [lengths[i] for i in group])
        for group, place in zip(groups, places, strict=True)
    ]
    joined = torch.cat(places)
    back = torch.empty_like(joined)
    back[joined] = torch.arange(joined.numel(), device=device)
    return _pick(torch.cat(outputs), back)


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of non-empty sequences so that padding to the longest of a group wastes little."""
    ranked = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for index in ranked:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= _BUCKET_SMALL or lengths[index] >= _BUCKET_FILL * longest):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Select distinct tokens of [T, H, D] by `take_rows`, whose gradient is a copy."""
    return take_rows(x[None].transpose(1, 2), torch.zeros_like(tokens), tokens)


def _bucket(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend for packed sequences, padded at their ends to the longest of them, where no token attends."""
    sizes, longest = torch.tensor(lengths, device=q.device), max(lengths)
    rows, columns = positions_of(sizes)
    place = torch.arange(longest, device=q.device)
    mask = None
    if call.window is not None and call.window < longest:
        gap = place[:, None] - place
        mask = (gap >= 0) & (gap < call.window)
    elif not call.causal:
        mask = (place < sizes[:, None].clamp(min=1))[:, None, None]
    if call.alibi is not None:
        gap = place[:, None] - place
        seen = gap >= 0 if mask is None else mask
        mask = (-call.alibi[:, None, None] * gap).to(q.dtype).masked_fill(~seen, -torch.inf)
    q, k, v = (put_rows(x, rows, columns, len(lengths), longest) for x in (q, k, v))
    if call.soft_cap is not None or call.sinks is not None:
        mask = place[:, None] >= place if mask is None else mask
        return take_rows(_by_scores(call, q, k, v, mask), rows, columns)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return take_rows(out, rows, columns)


def _by_scores(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend through the matrix of scores [B, Hq, L, L], which soft caps and sinks change: q, k, v [B, H, L, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * (scores / call.soft_cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
