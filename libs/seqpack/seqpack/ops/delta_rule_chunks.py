"""The chunkwise (WY) form of the gated delta rule for many sequences at once, in plain torch (arXiv 2412.06464, 3.3).

Inside a chunk that starts from state S, with b the running sum of g, the writes u solve a triangular system:

    u_i + beta_i sum_{j<i} exp(b_i - b_j) (k_i . k_j) u_j = beta_i (v_i - exp(b_i) S^T k_i)

so u = P - R S with P and R independent of S, and

    o_i = exp(b_i) S^T q_i + sum_{j<=i} exp(b_i - b_j) (q_i . k_j) u_j
    S'  = exp(b_end) S + sum_j exp(b_end - b_j) k_j u_j^T

Strategy
1. Cut every sequence into chunks of its own, of the size with the least work (`choose_chunk_size`). Sort the sequences
   by their number of chunks, longest first, and store chunks step by step: all first chunks, then all second ones
   (`plan_chunks`). Empty places at the end of a chunk hold zeros: they write nothing and fade nothing.
2. For all chunks of all sequences in one batched product each: b, the decays exp(b_i - b_j) of j <= i, and the products
   k_i . k_j and q_i . k_j.
3. Solve the unit lower triangular systems for P, and for R where any state is carried, all in one call.
4. Carry the states (`_chain`), the only loop, as long as the longest sequence has chunks. At a step the sequences that
   still run come first, so that it works on contiguous slices: u = P - R S, then S'. Those that end leave their state.
5. Read o from u and from the state before each chunk, for all chunks at once; put tokens and final states in order.

Invariants (tests): output, final states and every gradient equal the recurrence to 1e-9 in float64, whatever the chunk
size; every token has one place, in order, in a chunk of its sequence alone; no sequence changes another, not even by
NaN; where no state is carried, steps 3 to 5 without R and S give the same. No exponent is above 0, as g <= 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpack.ops.scatter_gather import positions_of, put_rows, take_rows

_CANDIDATES = (8, 12, 16, 20, 24, 32, 48, 64)
# Costs in multiply-adds, fitted to forward and backward on one CPU core; a GPU waits longer for each step.
_PAIR_COST = 40  # a pair of places in a chunk: decays, masks and the triangular solve
_STATE_COST = 30  # an element of a carried state, per chunk: written, read, and both again in the backward pass
_STEP_COST = {"cpu": 2e6}  # a step of the loop, by device type
_STEP_COST_ELSEWHERE = 1e9


@dataclass(frozen=True)
class ChunkPlan:
    """Where each token goes: chunk `rows[t]`, place `columns[t]`.

    `steps[s]`: how many sequences have more than s chunks. `order[i]`: the sequence that stands at place i when sorted
    by number of chunks, longest first.
    """

    size: int
    rows: Tensor
    columns: Tensor
    steps: tuple[int, ...]
    order: Tensor


def choose_chunk_size(
    lengths: Sequence[int], heads: int, key_dim: int, value_dim: int, device_type: str = "cpu"
) -> int:
    """Return the chunk size with the least work: padding and quadratic terms, against the number of state updates."""
    longest = max(lengths, default=1)
    step_cost = _STEP_COST.get(device_type, _STEP_COST_ELSEWHERE)
    options = {c for c in _CANDIDATES if c <= max(longest, _CANDIDATES[0])}
    if longest <= _CANDIDATES[-1]:
        options.add(max(longest, 1))

    def cost(size: int) -> float:
        counts = [-(-length // size) for length in lengths]
        chunks, steps = sum(counts), max(counts, default=0)
        inside = size * size * (2 * key_dim + 2 * value_dim + _PAIR_COST)
        chain = 0 if steps <= 1 else 3 * size * key_dim * value_dim + _STATE_COST * key_dim * value_dim
        return chunks * heads * (inside + chain) + steps * step_cost

    return min(sorted(options), key=cost)


def plan_chunks(lengths: Sequence[int], size: int, device: torch.device) -> ChunkPlan:
    """Plan the chunk of every token of the packed sequences, and its place in the chunk.

    Args:
        lengths: tokens of each sequence; 0 is allowed and takes no chunk.
        size: places per chunk.
        device: where the index tensors live.
    """
    counts = [-(-length // size) for length in lengths]
    ranked = sorted(range(len(counts)), key=lambda i: -counts[i])
    active = len(ranked)
    steps: list[int] = []
    for step in range(max(counts, default=0)):
        while active and counts[ranked[active - 1]] <= step:
            active -= 1
        steps.append(active)
    order = torch.tensor(ranked, dtype=torch.int64, device=device)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(ranked), device=device)
    offsets = torch.tensor([0, *steps], dtype=torch.int64, device=device).cumsum(0)
    sequence, position = positions_of(torch.tensor(lengths, dtype=torch.int64, device=device))
    rows = offsets[torch.div(position, size, rounding_mode="floor")] + place[sequence]
    return ChunkPlan(size, rows, position % size, tuple(steps), order)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    initial_state: Tensor | None,
    output_final_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule on q (scaled), k [T, H, Dk], v [T, H, Dv], g, beta [T, H], all of one dtype.

    Returns:
        (o [T, H, Dv], states after the sequences [n, H, Dk, Dv] or None).
    """
    heads, key_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    size = chunk_size or choose_chunk_size(lengths, heads, key_dim, value_dim, v.device.type)
    plan = plan_chunks(lengths, size, v.device)
    total = sum(plan.steps)
    q, k, v = (put_rows(x, plan.rows, plan.columns, total, size) for x in (q, k, v))
    g, beta = (put_rows(x[..., None], plan.rows, plan.columns, total, size)[..., 0] for x in (g, beta))

    b = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(later, float("-inf")).exp()
    keys_t = k.transpose(-1, -2)
    scaled_k = k * beta[..., None]
    system = (scaled_k @ keys_t) * decay  # the diagonal is taken as 1 by the solver
    reach = b.exp()[..., None]
    need_state = len(plan.steps) > 1 or initial_state is not None
    right = torch.cat([v * beta[..., None], scaled_k * reach], dim=-1) if need_state else v * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    within = (q @ keys_t) * decay

    if not need_state and not output_final_state:
        return take_rows(within @ solved, plan.rows, plan.columns), None
    rest = (b[..., -1:] - b).exp()[..., None]
    writes, starts, final = _chain(
        plan, solved, (k * rest).transpose(-1, -2), b[..., -1].exp(), initial_state, value_dim
    )
    o = within @ writes
    if starts is not None:
        o = o + (q * reach) @ starts
    o = take_rows(o, plan.rows, plan.columns)
    if not output_final_state:
        return o, None
    back = torch.empty_like(plan.order)
    back[plan.order] = torch.arange(plan.order.numel(), device=back.device)
    return o, final[back]


def _chain(
    plan: ChunkPlan, solved: Tensor, keys_t: Tensor, fade: Tensor, initial_state: Tensor | None, value_dim: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Carry the states from chunk to chunk.

    Args:
        plan: the layout.
        solved: [N, H, C, Dv] or [N, H, C, Dv + Dk]: P, and R where states are carried.
        keys_t: [N, H, Dk, C], keys faded to the end of their chunk.
        fade: [N, H], decay of a whole chunk.
        initial_state: [n, H, Dk, Dv] or None.
        value_dim: Dv.

    Returns:
        (u [N, H, C, Dv], the state before each chunk [N, H, Dk, Dv] or None where all are zero, final states in sorted
        order).
    """
    n, heads, key_dim = plan.order.numel(), solved.shape[1], keys_t.shape[2]
    carried = solved.shape[3] > value_dim
    fresh = initial_state is None and plan.steps[:1] == (n,)  # each state begins with its first write
    if initial_state is not None:
        state = initial_state[plan.order]
    else:
        state = solved.new_zeros(()).expand(n, heads, key_dim, value_dim)
    sizes = list(plan.steps)
    reads = solved[..., value_dim:].split(sizes) if carried else None
    own, keys, fades = solved[..., :value_dim].split(sizes), keys_t.split(sizes), fade[..., None, None].split(sizes)
    writes, starts, finished = [], [], []
    for step, active in enumerate(sizes):
        if active < state.shape[0]:
            state, done = state.split([active, state.shape[0] - active])
            finished.append(done)
        u = own[step]
        if reads is not None:
            starts.append(state)
            u = u if fresh and not step else u - reads[step] @ state
        writes.append(u)
        written = keys[step] @ u
        state = written if fresh and not step else state * fades[step] + written
    final = torch.cat([state, *reversed(finished)]) if finished else state
    u = torch.cat(writes) if reads is not None and writes else solved[..., :value_dim]
    return u, torch.cat(starts) if starts else None, final
