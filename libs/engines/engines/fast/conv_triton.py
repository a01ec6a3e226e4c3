"""The Triton kernels of `engines.fast.convolution`; imported on a GPU alone."""

# mypy: disable-error-code="no-untyped-def, import-not-found"
import triton
import triton.language as tl


@triton.jit
def _convolved(x, weight, position, token, channel, inside, channels, TAPS: tl.constexpr):
    """Convolve a block of tokens in the channels of one head, float32, before the activation."""
    place = tl.load(position + token, mask=inside, other=0)
    total = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for back in tl.static_range(TAPS):
        reaches = inside & (place >= back)
        row = x + (token - back).to(tl.int64)[:, None] * channels + channel[None, :]
        tap = tl.load(weight + channel * TAPS + (TAPS - 1 - back)).to(tl.float32)
        total += tl.load(row, mask=reaches[:, None], other=0.0).to(tl.float32) * tap[None, :]
    return total


@triton.jit
def forward_kernel(
    x,
    weight,
    position,
    q,
    k,
    v,
    tokens,
    channels,
    eps,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program a block of tokens and a head: convolution, silu, and unit length for heads of q and k."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.arange(0, HEAD)
    inside = token < tokens
    y = _convolved(x, weight, position, token, head * HEAD + feature, inside, channels, TAPS)
    y = y * tl.sigmoid(y)
    wide = token.to(tl.int64)[:, None]
    if head < 2 * KEYS:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        if head < KEYS:
            into = q + wide * (KEYS * HEAD) + head * HEAD + feature[None, :]
        else:
            into = k + wide * (KEYS * HEAD) + (head - KEYS) * HEAD + feature[None, :]
    else:
        into = v + wide * (VALUES * HEAD) + (head - 2 * KEYS) * HEAD + feature[None, :]
    tl.store(into, y.to(q.dtype.element_ty), mask=inside[:, None])


@triton.jit
def activation_grad_kernel(
    x,
    weight,
    position,
    d_q,
    d_k,
    d_v,
    d_y,
    tokens,
    channels,
    eps,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of the convolution's result from those of q, k and v, through unit length and silu."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.arange(0, HEAD)
    inside = token < tokens
    y = _convolved(x, weight, position, token, head * HEAD + feature, inside, channels, TAPS)
    s = tl.sigmoid(y)
    wide = token.to(tl.int64)[:, None]
    if head < 2 * KEYS:
        if head < KEYS:
            source = d_q + wide * (KEYS * HEAD) + head * HEAD + feature[None, :]
        else:
            source = d_k + wide * (KEYS * HEAD) + (head - KEYS) * HEAD + feature[None, :]
        g = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(y * s * y * s, 1) + eps)[:, None]
        n = y * s * scale
        g = scale * (g - n * tl.sum(g * n, 1)[:, None])
    else:
        source = d_v + wide * (VALUES * HEAD) + (head - 2 * KEYS) * HEAD + feature[None, :]
        g = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    result = g * (s * (1.0 + y * (1.0 - s)))
    tl.store(
        d_y + wide * channels + head * HEAD + feature[None, :], result.to(d_y.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def conv_grad_kernel(
    x,
    weight,
    position,
    d_y,
    d_x,
    partial,
    tokens,
    channels,
    steps,
    HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program `steps` token blocks and a head's channels: d x, and its part of d weight [channels, TAPS]."""
    channel = tl.program_id(1) * HEAD + tl.arange(0, HEAD)
    tap_number = tl.arange(0, ROWS)
    d_weight = tl.zeros((ROWS, HEAD), tl.float32)
    for step in range(steps):
        token = (tl.program_id(0) * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = token < tokens
        wide = token.to(tl.int64)[:, None]
        place = tl.load(position + token, mask=inside, other=0)
        own = tl.load(d_y + wide * channels + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK, HEAD), tl.float32)
        for back in tl.static_range(TAPS):
            seen = (inside & (place >= back))[:, None]
            past = tl.load(x + (wide - back) * channels + channel[None, :], mask=seen, other=0.0).to(tl.float32)
            share = tl.sum(own * past, 0)
            d_weight += tl.where(tap_number[:, None] == TAPS - 1 - back, share[None, :], 0.0)
            later = token + back
            ahead = (later < tokens) & (tl.load(position + later, mask=later < tokens, other=-1) >= back)
            tap = tl.load(weight + channel * TAPS + (TAPS - 1 - back)).to(tl.float32)
            row = d_y + (wide + back) * channels + channel[None, :]
            total += tl.load(row, mask=ahead[:, None], other=0.0).to(tl.float32) * tap[None, :]
        tl.store(d_x + wide * channels + channel[None, :], total.to(d_x.dtype.element_ty), mask=inside[:, None])
    into = partial + tl.program_id(0).to(tl.int64) * channels * TAPS + channel[None, :] * TAPS + tap_number[:, None]
    tl.store(into, d_weight, mask=(tap_number < TAPS)[:, None])
