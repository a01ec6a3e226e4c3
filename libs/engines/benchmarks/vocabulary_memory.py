"""Peak memory of what an objective reads at a vocabulary of 248,320: in chunks, and from the whole logits.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/vocabulary_memory.py

Forward and backward on the CPU in float32, 1024 tokens of width 128 in chunks of 64, each case in a process of its own:
the peak of its resident memory, less what it held before. The gradients of both ways are compared.
"""

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.scoring.log_probs import several_log_probs

VOCABULARY, WIDTH, TOKENS, CHUNK, K = 248_320, 128, 1024, 64, 32
READS = {"log-probs": (0, False), "log-probs and entropy": (0, True), "32 likeliest and the rest": (K, False)}


def outputs(case: str, whole: bool, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return a number that depends on all that an objective reads."""
    top_k, entropy = READS[case]
    if not whole:
        own, spread, several = several_log_probs(hidden, weight, targets, top_k, chunk=CHUNK, entropy=entropy)
        parts = [own, spread, several.log_probs if top_k else None, several.rest if top_k else None]
        return torch.stack([part.sum() for part in parts if part is not None]).sum()
    table = torch.log_softmax(hidden @ weight.T, -1)
    total = table.gather(1, targets[:, None]).sum()
    if entropy:
        total = total - (table.exp() * table).sum()
    if top_k:
        taken = table.detach().topk(top_k, 1).indices
        rest = table.scatter(1, taken, -torch.inf).logsumexp(1)
        total = total + table.gather(1, taken).sum() + rest.sum()
    return total


def measured(case: str, whole: bool, reply: Any) -> None:
    """Send the peak of the memory in GiB, and the norm of the gradient; runs in a process of its own."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    weight = (0.1 * torch.randn(VOCABULARY, WIDTH, generator=draw)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    held = resident()
    outputs(case, whole, hidden, weight, targets).backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert hidden.grad is not None
    reply.put((peak - held, float(hidden.grad.double().norm())))


def resident() -> float:
    """Return the resident memory of this process in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def main() -> None:
    """Print the values of all cases as JSON."""
    context, values = multiprocessing.get_context("spawn"), {}
    for case in READS:
        sizes, norms = [], []
        for whole in (False, True):
            reply = context.Queue()
            process = context.Process(target=measured, args=(case, whole, reply))
            process.start()
            size, norm = reply.get()
            process.join()
            sizes.append(size)
            norms.append(norm)
        difference = abs(norms[0] - norms[1]) / norms[1]
        assert difference < 1e-4, f"{case}: the gradients differ by {difference}"
        values[case] = {
            "in chunks GiB": round(sizes[0], 2),
            "whole logits GiB": round(sizes[1], 2),
            "ratio": round(sizes[1] / sizes[0], 1),
        }
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
