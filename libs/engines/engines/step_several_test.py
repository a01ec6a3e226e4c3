"""Several tokens at each place, through a step: of a model of one table by hand, of transformers models by theirs."""

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engines import EngineConfig
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.step import Engine
from engines.testing.bigram_executor import Bigram, BigramExecutor
from engines.testing.executors import engine, inside
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import Distillation
from seqpack import Totals, make_batch
from seqpack.batches.schema import SEVERAL

VOCAB = 7
LR = 0.5
KEYS = Distillation().required_keys


def build(cap: int = 20) -> Any:
    executor: Any = BigramExecutor(ParallelGroups.make(ParallelLayout()), Bigram(VOCAB))
    nothing: Any = None
    config = EngineConfig(device="cpu", lr=LR, max_tokens_per_rank=cap)
    return Engine(config, executor, DataParallelPlanner(cap, 1), weights=nothing)  # nothing here is exported


def with_teacher(batch: TensorDict, teacher: Any, k: int) -> TensorDict:
    found = teacher.forward(batch, top_k=k)
    return TensorDict({**batch, **dict(zip(KEYS, (found[x] for x in SEVERAL), strict=True))}, batch_size=[len(batch)])


def several_by_hand(model: Bigram, row: torch.Tensor, tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs f64[K, j], rest f64[j]) of some tokens at each place of a row after the first."""
    table = torch.log_softmax(model.table, -1)[row[:-1]]
    others = [torch.logsumexp(x[[t for t in range(VOCAB) if t not in taken.tolist()]], 0) for x, taken in
              zip(table, tokens.T[1:], strict=True)]  # fmt: skip
    return table.gather(1, tokens.T[1:]).T, torch.stack(others)


@pytest.mark.parametrize("cap", [12, 40])
def test_several_tokens_are_scored_and_distilled_in_any_micro_batches(cap: int) -> None:
    """The likeliest of a teacher, and the policy's log-probs of these; the update is that of a loop over places."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB, (n,), generator=draw) for n in (3, 6, 1, 9)]
    batch = make_batch([{"input_ids": x, "loss_mask": torch.arange(len(x)) > 1} for x in rows])
    built, teacher = build(cap), build(cap)
    teacher.executor.model.table.data.mul_(-1)
    found = teacher.forward(batch, top_k=2)
    batch = with_teacher(batch, teacher, 2)
    again = built.forward(batch, tokens="teacher_tokens", entropy=True)
    total = torch.zeros((), dtype=torch.float64)
    table = torch.log_softmax(teacher.executor.model.table, -1)
    for place, ids in enumerate(batch["input_ids"].unbind()):
        row = {key: found[key].unbind()[place] for key in SEVERAL}
        if len(ids) == 1:
            continue
        assert row[SEVERAL[0]][:, 1:].T.equal(table[ids[:-1]].topk(2).indices)
        want = several_by_hand(teacher.executor.model, ids, row[SEVERAL[0]])
        torch.testing.assert_close([row[SEVERAL[1]][:, 1:], row[SEVERAL[2]][1:]], [*want], check_dtype=False)
        mine = several_by_hand(built.executor.model, ids, row[SEVERAL[0]])
        torch.testing.assert_close(again[SEVERAL[1]].unbind()[place][:, 1:], mine[0], check_dtype=False)
        torch.testing.assert_close(again[SEVERAL[2]].unbind()[place][1:], mine[1], check_dtype=False)
        p, q = (torch.cat([several, rest[None]]) for several, rest in (want, mine))
        total = total + ((p.exp() * (p - q)).sum(0) * batch["loss_mask"].unbind()[place][1:]).sum()
    loss = total / Totals.of(batch).tokens
    (gradient,) = torch.autograd.grad(loss, built.executor.model.table)
    before = built.executor.model.table.detach().clone()
    result = built.train_batch(batch, Distillation())
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["distill/divergence"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(built.executor.model.table.detach(), before - LR * gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([[7], [0]], {}, "tokens holds the token 7, the model's are 0 to 6 (-1: none): was it made with another"),
        ([[2], [2]], {}, "tokens holds one token twice in a place"),
        ([[1.0]], {}, "tokens must be int64 (K, tokens), got torch.float32 (1, 1)"),
        ([[1]], {"top_k": 2}, "scores of the tokens tokens and of the likeliest 2: ask for one"),
        ([[1]], {"tokens": None, "top_k": 8}, "8 likeliest tokens are asked for, the model has 7"),
        ([[1]], {"tokens": "others"}, "the batch has no key 'others'"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(tokens: list[Any], options: dict[str, Any], message: str) -> None:
    batch = make_batch([{"input_ids": [1], "loss_mask": [False], "tokens": torch.tensor(tokens)}])
    with pytest.raises(ValueError, match=re.escape(message)):
        build().forward(batch, **{"tokens": "tokens", **options})


@pytest.mark.parametrize("options", [{}, {"batching": "padded"}, {"max_tokens_per_rank": 20, "logit_chunk": 3}])
@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_a_transformers_model_learns_a_teacher_as_in_a_plain_loop(options: dict[str, Any], kind: Any) -> None:
    """All tokens but one are asked for: the loss is the divergence of whole vocabularies, from stock logits."""
    batch, student, teacher = tiny_batch([7, 3, 12, 5]), engine(**options), engine(seed=1)
    vocabulary = inside(student).model.config.vocab_size
    total = torch.zeros(())
    for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True):
        logits = [inside(x).model(input_ids=ids[None], use_cache=False).logits[0, :-1] for x in (teacher, student)]
        p, q = (torch.log_softmax(x.float(), -1) for x in logits)
        p = p.detach()
        middle = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0))
        whole = p.exp() * (p - q) if kind == "forward" else (p.exp() * (p - middle) + q.exp() * (q - middle)) / 2
        total = total + (whole.sum(-1) * mask[1:]).sum() / Totals.of(batch).tokens
    norm = torch.stack([x.norm() for x in torch.autograd.grad(total, [*inside(student).model.parameters()])]).norm()
    result = student.train_batch(with_teacher(batch, teacher, vocabulary - 1), Distillation(kind))
    assert result["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    few = [student.train_batch(with_teacher(batch, teacher, 4), Distillation(kind))["loss"] for _ in range(4)]
    assert few[-1] < 0.8 * few[0]
