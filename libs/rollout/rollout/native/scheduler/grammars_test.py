"""Structured outputs: masks and log-probs against an enumeration of the vocabulary, answers against json and re."""

import asyncio
import copy
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.errors import GrammarError
from rollout.native.engine import NativeEngine
from rollout.native.scheduler.grammars import Grammars, apply_grammars
from rollout.native.scheduler.request import SequenceRequest
from rollout.native.scheduler.sampling import SamplingRows, sampled_log_probs
from rollout.partial_rollout import ResumableEngine
from rollout.structured_outputs import StructuredOutputs, check_ends
from rollout.sync.manifest import manifest_of
from rollout.sync.pieces import buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.grammars import (
    END,
    KINDS,
    TEXTS,
    VOCAB,
    forced_differences,
    letters,
    matching,
    reference,
    sampling_of,
    text_of,
)  # fmt: skip
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

PROMPT = [1, 2, 3, 4]

TOKENIZER = letters()


def model_of(seed: int = 0) -> PreTrainedModel:
    model = tiny_model(VOCAB, layers=2, seed=seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoder", ["lean", "module"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.5, "min_p": 0.02}])
def test_log_probs_are_of_what_the_grammar_leaves(kind: str, decoder: Any, changes: dict[str, float]) -> None:
    model, (wanted, may) = model_of(), KINDS[kind]
    engine = NativeEngine(model, decoder=decoder, tokenizer=TOKENIZER)
    settings = [sampling_of(wanted, seed=seed, **changes) for seed in range(24)]
    done = engine.generate_batch([PROMPT] * 24, settings)
    for answer, s in zip(done, settings, strict=True):
        assert max(forced_differences(model, PROMPT, answer, may, s)) < 1e-4
    stopped = [answer for answer in done if answer.stop_reason == "stop"]
    assert len(stopped) > 1
    greedy = sampling_of(wanted, greedy=True)
    assert max(forced_differences(model, PROMPT, engine.generate_batch([PROMPT], greedy)[0], may, greedy)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_every_mask_on_the_way_is_the_enumerations(kind: str) -> None:
    """Not of the sampled token alone: all bits, along random walks that the enumeration itself chooses."""
    wanted, may = KINDS[kind]
    rng = torch.Generator().manual_seed(1)
    grammars = Grammars(TOKENIZER, VOCAB)
    for _ in range(8):
        ids: list[int] = []
        while len(ids) < 40:
            s = sampling_of(replace(wanted, num_read=len(ids)))
            row = SequenceRequest((*PROMPT, *ids), s, 0, lambda done: None)
            row.matcher = grammars.matcher(row.prompt, s)
            logits = torch.randn(1, VOCAB, generator=rng)
            found = sampled_log_probs(apply_grammars(logits, [row]), SamplingRows.build([s], logits.device))[0]
            expected = torch.tensor(reference(logits[0], text_of(ids), may, s))
            assert torch.equal(found.isneginf(), expected.isneginf())
            assert torch.allclose(found, expected.float(), atol=1e-5)
            token = int(torch.multinomial(expected.exp(), 1, generator=rng))
            if token == END:
                break
            ids.append(token)


def test_answers_with_white_space_are_instances() -> None:
    engine = NativeEngine(model_of(), tokenizer=TOKENIZER)
    integers = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    schema = {"type": "object", "properties": {"a": integers}, "required": ["a"], "additionalProperties": False}
    for wanted in (StructuredOutputs(json=json.dumps(schema)), StructuredOutputs(json_object=True)):
        settings = [replace(sampling_of(wanted, seed=seed), max_new_tokens=150) for seed in range(32)]
        texts = [
            text_of(done.ids[:-1])
            for done in engine.generate_batch([PROMPT] * 32, settings)
            if done.stop_reason == "stop"
        ]
        assert len(texts) > 2
        for text in texts:
            value = json.loads(text)
            assert isinstance(value, dict)
            if wanted.json is not None:
                jsonschema.validate(value, schema)
        assert any(" " in text for text in texts)


def test_rows_beside_are_the_same_bits() -> None:
    logits = torch.randn(3, VOCAB)
    logits[2] = 0
    guided = sampling_of(KINDS["json"][0])
    row = SequenceRequest((1,), guided, 0, lambda done: None, matcher=Grammars(TOKENIZER, VOCAB).matcher((1,), guided))
    plain = SequenceRequest((1,), Sampling(), 0, lambda done: None)
    before = logits.clone()
    assert apply_grammars(logits, [plain, None]) is logits
    found = apply_grammars(logits, [plain, row, None])
    assert torch.equal(logits, before)  # the prefill cache keeps them for others
    assert torch.equal(found[[0, 2]], before[[0, 2]])
    assert not torch.equal(found[1], before[1])
    engine, model = NativeEngine(model_of(), tokenizer=TOKENIZER), model_of()
    beside = [Sampling(max_new_tokens=20, seed=seed) for seed in range(4)]
    mixed = engine.generate_batch([PROMPT] * 8, [s for one in beside for s in (one, replace(guided, seed=one.seed))])
    assert mixed[::2] == NativeEngine(model).generate_batch([PROMPT] * 8, [s for s in beside for _ in range(2)])[::2]


@pytest.mark.parametrize("on_commit", ["keep", "recompute"])
def test_partial_rollouts_go_on_within_the_grammar(on_commit: Any) -> None:
    weights = [model_of(seed) for seed in range(2)]
    native = NativeEngine(copy.deepcopy(weights[0]), tokenizer=TOKENIZER, on_commit=on_commit)
    engine = ResumableEngine(native)
    wanted, pattern = StructuredOutputs(regex="(ab|12|xyz){30,40}"), "(ab|12|xyz){30,40}"

    async def play() -> list[Completion]:
        settings = [replace(sampling_of(wanted, seed=seed), max_new_tokens=200) for seed in range(6)]
        jobs = [asyncio.create_task(engine.generate(PROMPT, s)) for s in settings]
        while native.decode_steps < 15:
            assert not any(job.done() for job in jobs)
            await asyncio.sleep(0.001)
        pieces = list(weights[1].named_parameters())
        await transfer_weights(
            [engine], manifest_of(1, pieces_of(pieces)), buckets(pieces_of(pieces), 20_000), pause="abort"
        )
        return await asyncio.gather(*jobs)

    done = asyncio.run(play())
    assert engine.interrupted == 6
    for answer in done:
        assert set(answer.policy_versions) == {0, 1}
        assert answer.stop_reason == "stop"
        assert re.fullmatch(pattern, text_of(answer.ids[:-1]))
        new = answer.policy_versions.index(1)
        assert max(forced_differences(weights[1], PROMPT, answer, matching(pattern), Sampling(), new)) < 1e-4


def test_what_cannot_be_had_is_refused_with_its_fix() -> None:
    engine, plain = NativeEngine(model_of(), tokenizer=TOKENIZER), NativeEngine(model_of())
    assert engine.supports("structured_outputs")
    assert "tokenizer" in plain.supports("structured_outputs").reason  # type: ignore[union-attr]
    fine = sampling_of(StructuredOutputs(regex="a+"))
    refused = [
        (plain, fine, r"NativeEngine\(tokenizer=...\)"),
        (engine, replace(fine, stop_token_ids=()), f"add {END} to stop_token_ids"),
        (engine, replace(fine, stop_token_ids=(END, 3)), "stop_token_ids 3 are texts"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(regex="(a")), "unclosed group"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(regex="a(?=b)")), "look-around"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(json='{"type": "objct"}')), "Invalid type"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(json='{"not": {}}')), "Unimplemented"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(grammar="x ::= 'a'")), "GBNF"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(grammar="start: no")), "unknown name"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(regex="x+", num_read=2)), "last 2 tokens"),
        (engine, replace(fine, structured_outputs=StructuredOutputs(regex="x+", num_read=9)), "last 9 tokens"),
    ]
    for one, sampling, words in refused:
        with pytest.raises(ValueError, match=words):
            one.generate_batch([PROMPT], sampling)
    with pytest.raises(ValueError, match="eos_token"):
        check_ends((1,), None, ())


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(model_of(), tokenizer=TOKENIZER)
    monkeypatch.setattr("rollout.native.scheduler.grammars.find_spec", lambda name: None)
    assert r"rollout[guided]" in engine.supports("structured_outputs").reason  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"rollout\[guided\]"):
        engine.generate_batch([PROMPT], sampling_of(StructuredOutputs(regex="a+")))


def test_a_grammar_that_becomes_too_complex_is_an_error_and_no_answer() -> None:
    """The mask is then the end alone, whatever the text; the other rows go on."""
    engine = NativeEngine(model_of(), tokenizer=TOKENIZER)
    fine = sampling_of(StructuredOutputs(choice=("ab",)), seed=1)
    row = SequenceRequest(tuple(PROMPT), fine, 0, lambda done: None)
    row.matcher = engine._grammars.matcher(PROMPT, fine)
    assert row.matcher is not None
    row.matcher.consume_token(TEXTS.index("x"))  # what no mask allows, as a limit of llguidance's would
    heard: list[Any] = []
    row.answer = heard.append
    engine._batch.add(row)
    done = engine.generate_batch([PROMPT], fine)[0]
    assert text_of(done.ids[:-1]) == "ab"
    assert isinstance(heard[0], GrammarError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "a", "json_object": True}, "one kind"),
        ({"json": "{", "disable_any_whitespace": True}, "json must be the text"),
        ({"json": "3"}, "an object"),
        ({"json": {"type": "object"}}, "json.dumps"),
        ({"regex": ""}, "regex must be a text"),
        ({"choice": "yes"}, "choice is a tuple"),
        ({"choice": ("a", "")}, "choice is a tuple"),
        ({"regex": "a", "disable_any_whitespace": True}, "no effect"),
        ({"num_read": -1}, "num_read"),
    ],
)
def test_settings_are_checked_where_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**fields)


def test_stop_texts_and_structured_outputs_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="stop would end"):
        Sampling(stop=("a",), structured_outputs=StructuredOutputs(regex="a+"))
    assert not Sampling(structured_outputs=StructuredOutputs(regex="a")).is_whole
    assert Sampling(structured_outputs=StructuredOutputs()).is_whole
