"""Settings drawn at random: what is sampled is what a teacher-forced pass says, in every combination."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rollout.chat.segment import Segment
from rollout.engine import Completion, Sampling
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.decoders.module_rows import Rows
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.forced import stock_log_probs
from rollout.testing.fuzz import LEAN, MODULES, build_model, draw, problems, score_problems, spans, stream_problems

CASES = 60  # of each run of the tests; by hand as many as wanted: libs/rollout/benchmarks/fuzz.py
PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_sampled_is_exact(part: int) -> None:
    for seed in range(part, CASES, PARTS):
        assert problems(draw(seed)) == [], draw(seed)


def test_cases_cover_what_there_is() -> None:
    cases = [draw(seed) for seed in range(CASES)]
    drawn = {(case.decoder, case.family) for case in cases}
    assert drawn == {("lean", name) for name in LEAN} | {("module", name) for name in MODULES}
    for name in (
        "admit",
        "turns",
        "tools",
        "swaps",
        "group",
        "stride",
        "max_batch",
        "keep_tokens",
        "top_k",
        "min_p",
        "penalties",
        "words",
    ):
        counts = [[getattr(case, name) for case in cases].count(value) for value in {getattr(c, name) for c in cases}]
        assert len(counts) > 1, name
        assert min(counts) >= 5, name


def test_a_decoder_that_cannot_place_two_prefills_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood here until 76cd66d4: the first turn of several conversations passed, a later one ended the run."""

    def place(self: ModuleDecoder, cache: Rows, picks: Sequence[int], slots: Sequence[int]) -> None:
        picked = cache.pick(torch.tensor(picks))
        if self._rows is None:
            assert list(slots) == list(range(len(slots))), "slots"
            self._rows = picked
        else:
            self._rows.put(picked, slots)

    monkeypatch.setattr(ModuleDecoder, "place", place)
    cases = [case for case in map(draw, range(CASES)) if case.decoder == "module" and case.turns > 1]
    with pytest.raises(AssertionError, match="slots"):  # which meets it hangs on the order in which turns go on
        list(map(problems, cases))


def test_a_wrong_token_mask_version_or_log_prob_is_told() -> None:
    case = replace(draw(0), decoder="lean", family="qwen3")
    models = {version: build_model(case, tiny_tokenizer(), version) for version in range(2)}
    ids = (3, 4, 5, 6, 7, 8)
    scored = tuple(stock_log_probs(models[0], ids).tolist())
    mask = (False, False, True, True, False, False)
    right = Segment(ids, mask, (0.0, 0.0, *scored[2:4], 0.0, 0.0), (-1, -1, 0, 0, -1, -1))
    calls = [((3, 4), Completion(ids[2:4], scored[2:4], "stop", (0, 0)))]
    assert spans(mask) == [(2, 4)]
    assert stream_problems(right, calls) == score_problems(right, models, Sampling()) == []
    assert score_problems(right, {0: models[1]}, Sampling())  # of other weights
    assert score_problems(right, models, Sampling(temperature=0.9))
    assert score_problems(right, models, Sampling(frequency_penalty=0.1))
    assert score_problems(right, models, Sampling(repetition_penalty=1.1))
    assert stream_problems(replace(right, ids=(3, 9, *ids[2:])), calls)
    assert stream_problems(replace(right, ids=(*ids[:3], 9, *ids[4:])), calls)
    moved = replace(right, loss_mask=(False, True, True, True, False, False), policy_versions=(-1, 0, 0, 0, -1, -1))
    assert stream_problems(moved, calls)
    assert score_problems(moved, models, Sampling())
    assert torch.is_grad_enabled()
