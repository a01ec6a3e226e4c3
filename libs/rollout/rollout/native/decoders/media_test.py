"""Images in the native engine against the stock module's own generate and forward."""

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from transformers import PreTrainedModel

from rollout.config import DecoderChoice
from rollout.engine import Completion, Sampling
from rollout.native.decoders.media import SeenPrompt, SeenPrompts, checked_media, followed, seen_prompt
from rollout.native.engine import NativeEngine
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.testing.model import tiny_model, tiny_vision_model
from rollout.testing.pieces import pieces_of
from rollout.testing.vision_model import Prompt

NUMBERS = 3 * 2 * 2 * 2
IMAGE, VIDEO = 44, 45
NEW = 6


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_vision_model()


def shown(seed: int, *grids: tuple[int, int, int], video: tuple[int, int, int] | None = None) -> Prompt:
    """A prompt with these images (and the frames of a video) between stretches of text, and its media."""
    rng = torch.Generator().manual_seed(seed)
    ids, types = torch.randint(2, 40, (3,), generator=rng).tolist(), [0, 0, 0]
    videos = [] if video is None else [video]
    frames = [(1, h, w) for t, h, w in videos for _ in range(t)]
    for kind, token, (t, h, w) in [*[(1, IMAGE, g) for g in grids], *[(2, VIDEO, g) for g in frames]]:
        count = t * h * w // 4
        ids += [token] * count + torch.randint(2, 40, (2,), generator=rng).tolist()
        types += [kind] * count + [0, 0]
    media: dict[str, Any] = {"mm_token_type_ids": types}
    for pixels, name, chosen in (("pixel_values", "image", grids), ("pixel_values_videos", "video", videos)):
        if chosen:
            size = sum(t * h * w for t, h, w in chosen)
            media[pixels] = torch.randn(size, NUMBERS, generator=rng)
            media[f"{name}_grid_thw"] = torch.tensor(chosen)
    return ids, media


def arguments(ids: Sequence[int], media: dict[str, Any], more: Sequence[int] = ()) -> dict[str, Any]:
    given = {k: v for k, v in media.items() if k != "mm_token_type_ids"}
    types = [*media["mm_token_type_ids"], *[0] * (len(ids) + len(more) - len(media["mm_token_type_ids"]))]
    return given | {"input_ids": torch.tensor([[*ids, *more]]), "mm_token_type_ids": torch.tensor([types])}


def answers(engine: NativeEngine, requests: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
    async def ask() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(ids, sampling, media or None) for ids, media in requests))

    return asyncio.run(ask())


REQUESTS = [
    shown(0, (1, 4, 6)),
    ([5, 6, 7, 8], {}),
    shown(1, (1, 2, 2), (1, 6, 2), video=(2, 4, 4)),
    shown(2, video=(3, 2, 4)),
    shown(3, (1, 2, 8)),
]


@pytest.mark.parametrize("decoder", get_args(DecoderChoice))
def test_greedy_answers_are_those_of_the_modules_generate(model: PreTrainedModel, decoder: DecoderChoice) -> None:
    """In one batch, of several lengths, beside a prompt of text; and their log-probs, teacher-forced."""
    engine = NativeEngine(model, decoder=decoder)
    found = answers(engine, REQUESTS, Sampling(greedy=True, max_new_tokens=NEW))
    for (ids, media), got in zip(REQUESTS, found, strict=True):
        given = arguments(ids, media) if media else {"input_ids": torch.tensor([ids])}
        model.model.rope_deltas = None
        want = model.generate(**given, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, len(ids) :]
        assert list(got.ids) == want.tolist()
        model.model.rope_deltas = None
        whole = arguments(ids, media, got.ids) if media else {"input_ids": torch.tensor([[*ids, *got.ids]])}
        with torch.no_grad():
            table = model(**whole, use_cache=False).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
        expected = table.gather(-1, torch.tensor(got.ids)[:, None])[:, 0]
        assert torch.tensor(got.log_probs).double().sub(expected).abs().max() < 1e-5
    assert len({got.ids for got in found}) == len(REQUESTS)


@torch.no_grad()
def test_lean_in_float64_goes_on_after_images_as_it_reads_them() -> None:
    """A slot's positions follow its images, where it moves too; the rotary is float32."""
    model = tiny_vision_model().double()
    decoder = LeanDecoder(model)
    prompts = [seen_prompt(model, ids, media) if media else tuple(ids) for ids, media in REQUESTS]
    decoder.place(decoder.prefill(prompts)[1], range(5), range(5))
    decoder.release(0)
    decoder.move([4], [0])
    prompts = [prompts[4], *prompts[1:4]]
    for token in (9, 3, IMAGE):
        prompts = [followed(prompt, [token]) for prompt in prompts]
        step, whole = decoder.step(torch.tensor([token] * 4)), decoder.prefill(prompts)[0]
        torch.testing.assert_close(step, whole, rtol=0, atol=1e-6)
    assert max(decoder._slots._ahead) == 0 > min(decoder._slots._ahead[:4])


def test_prompts_of_equal_tokens_with_other_images_are_others(model: PreTrainedModel) -> None:
    """In one batch, and where the first was read before: neither is taken for the other, equal ones are read once."""
    (ids, first), (same, second) = shown(7, (1, 4, 4)), shown(7, (1, 4, 4))
    assert ids == same
    second = second | {"pixel_values": -second["pixel_values"]}
    engine, greedy = NativeEngine(model), Sampling(greedy=True, max_new_tokens=NEW)
    alone = [answers(NativeEngine(model), [(ids, media)], greedy)[0] for media in (first, second)]
    assert alone[0].log_probs != alone[1].log_probs
    together = answers(engine, [(ids, first), (ids, second), (ids, first), (ids, {})], greedy)
    assert engine.num_prefill_tokens == 3 * len(ids)
    for got, want in zip(together, [alone[0], alone[1], alone[0]], strict=False):
        assert got.ids == want.ids
        assert torch.tensor(got.log_probs).sub(torch.tensor(want.log_probs)).abs().max() < 1e-5
    later = answers(engine, [(ids, second)], greedy)[0]
    assert torch.tensor(later.log_probs).sub(torch.tensor(alone[1].log_probs)).abs().max() < 1e-5


def test_a_next_turn_reads_its_images_again_and_text_in_it_may_be_the_image_token(model: PreTrainedModel) -> None:
    ids, media = shown(4, (1, 4, 4))
    engine, greedy = NativeEngine(model), Sampling(greedy=True, max_new_tokens=NEW)
    first = answers(engine, [(ids, media)], greedy)[0]
    turn = [*ids, *first.ids, 9, IMAGE, 3]
    again = answers(engine, [(turn, media)], greedy)[0]
    fresh = answers(NativeEngine(model), [(turn, media)], greedy)[0]
    assert again.ids == fresh.ids
    assert len(again.ids) == NEW


def test_new_weights_under_way_read_the_images_again(model: PreTrainedModel) -> None:
    """With on_commit="recompute" the rest of an answer is that of the new weights, after the same image."""
    other, ids_media = tiny_vision_model(seed=5), [shown(8, (1, 4, 4))]
    engine = NativeEngine(tiny_vision_model(), on_commit="recompute")
    sampling, asked = Sampling(greedy=True, max_new_tokens=60), list[int]()

    async def play() -> Completion:
        ids, media = ids_media[0]
        answer = asyncio.create_task(engine.generate(ids, sampling, media, on_tokens=lambda new, _: asked.extend(new)))
        while len(asked) < 3:
            await asyncio.sleep(0)
        await engine.update_weights(1, pieces_of(other.state_dict().items()))
        return await answer

    done = asyncio.run(play())
    cut = done.policy_versions.index(1)
    ids, media = ids_media[0]
    rest = answers(NativeEngine(other), [([*ids, *done.ids[:cut]], media)], Sampling(greedy=True, max_new_tokens=5))[0]
    assert list(done.ids[cut : cut + 5]) == list(rest.ids)


def test_a_prompt_is_its_tokens_and_what_they_show(model: PreTrainedModel) -> None:
    ids, media = shown(1, (1, 4, 4))
    prompt, same = seen_prompt(model, ids, media), seen_prompt(model, list(ids), dict(media))
    other = seen_prompt(model, ids, media | {"pixel_values": media["pixel_values"] + 1})
    assert prompt == same
    assert hash(prompt) == hash(same)
    assert prompt != other
    assert prompt != tuple(ids)
    assert tuple(ids) != prompt
    assert {tuple(ids): 1, prompt: 2, other: 3}[same] == 2
    longer = followed(prompt, [4, 5])
    assert isinstance(longer, SeenPrompt)
    assert (tuple(longer), longer.media) == ((*ids, 4, 5), prompt.media)
    assert followed((1, 2), [3]) == (1, 2, 3)


def test_equal_media_are_checked_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal by value: of other objects too, and not where the very tensor was changed in place."""
    checks: list[int] = []

    def counted(length: int, *settings: Any) -> Any:
        checks.append(length)
        return checked_media(length, *settings)

    monkeypatch.setattr("rollout.native.decoders.media.checked_media", counted)
    seen = SeenPrompts(model)
    ids, media = shown(1, (1, 4, 4), video=(2, 2, 2))
    copied: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else [*value] for name, value in media.items()
    }
    first = seen.prompt(ids, media)
    for given in (media, copied, media):
        assert seen.prompt(ids, given) == first == seen_prompt(model, ids, given)
        checks.pop()  # that of `seen_prompt` itself
    assert seen.prompt([*ids, 5], media) == seen_prompt(model, [*ids, 5], media)
    checks.pop()
    assert len(checks) == 1
    media["pixel_values"] += 1
    assert seen.prompt(ids, media) != first
    assert len(checks) == 2
    with pytest.raises(ValueError, match="for a prompt of"):
        seen.prompt(ids[:2], copied)
    with pytest.raises(ValueError, match="floating-point"):
        seen.prompt(ids, copied | {"pixel_values": copied["pixel_values"].int()})
    with pytest.raises(ValueError, match="media are"):
        seen.prompt(ids, copied | {"sounds": torch.ones(1)})


@pytest.mark.parametrize("limit", ["MAX_SEEN", "MAX_VALUES"])
def test_few_media_are_kept(model: PreTrainedModel, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [shown(seed, (1, 4, 4)) for seed in range(5)]
    one = pictures[0][1]["pixel_values"].numel()
    monkeypatch.setattr(f"rollout.native.decoders.media.{limit}", 2 if limit == "MAX_SEEN" else 2 * one)
    seen = SeenPrompts(model)
    for ids, media in pictures * 2:
        assert seen.prompt(ids, media) == seen_prompt(model, ids, media)
        assert len(seen._known) <= 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pixel_values": torch.zeros(16, NUMBERS + 1)}, "cut into patches for another model"),
        ({"pixel_values": torch.zeros(12, NUMBERS)}, "has 12 patches, which is not what the grids"),
        ({"pixel_values": torch.full((16, NUMBERS), torch.nan)}, "not finite"),
        ({"mm_token_type_ids": [0]}, "1 image grids are left over"),
        ({"mm_token_type_ids": [0] * 99}, "for a prompt of"),
        ({"sound": 1}, "media are image_grid_thw"),
        ({"pixel_values_videos": torch.zeros(4, NUMBERS)}, "come together"),
    ],
)
def test_media_that_do_not_fit_are_refused(model: PreTrainedModel, change: dict[str, Any], problem: str) -> None:
    ids, media = shown(1, (1, 4, 4))
    with pytest.raises(ValueError, match=problem):
        answers(NativeEngine(model), [(ids, media | change)], Sampling(max_new_tokens=2))


def test_a_text_model_refuses_media() -> None:
    ids, media = shown(1, (1, 4, 4))
    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM has no vision tower"):
        answers(NativeEngine(tiny_model()), [(ids, media)], Sampling(max_new_tokens=2))
