"""For tests: episodes of settings drawn at random, held to a teacher-forced pass of the stock model.

A case is sampler x family x admission x turns x tools x partial rollout x group; `problems` plays it and returns what
does not hold: tokens, masks, versions, log-probs.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rollout.chat.chat import Chat
from rollout.chat.messages import Message, Reply
from rollout.chat.segment import Segment
from rollout.config import Admission, DecoderChoice
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.runner import run_group
from rollout.native.engine import NativeEngine
from rollout.partial_rollout import ResumableEngine
from rollout.structured_outputs import StructuredOutputs
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.pieces import pieces_of
from rollout.tools.tool import Tool

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8}  # fmt: skip
LEAN: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {}, "llama": {}, "mistral": {"sliding_window": None},
    "qwen3_5_text": {**_DELTA_NET, "full_attention_interval": 2},
}  # fmt: skip
MODULES: Mapping[str, Mapping[str, Any]] = {
    **LEAN, "qwen3_moe": _EXPERTS, "gemma3_text": {"sliding_window": 8}, "olmo2": {},
    "qwen3_next": {
        **_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mistral": {"sliding_window": 8},
}  # fmt: skip
STOPS = tuple(range(20, 60))
WORD = "[a-q]{3,20}"
"""Expression that turns with structured outputs match."""
BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """The settings of a group of episodes, and the seed of all that is drawn in them."""

    seed: int
    decoder: DecoderChoice
    family: str
    admit: Admission
    turns: int
    tools: bool
    swaps: int
    """Times that sampling is interrupted for new weights (partial rollout)."""
    group: int
    stride: int
    """Characters by which the prompt of a pair of siblings is longer than that of the pair before."""
    max_batch: int
    keep_tokens: int
    temperature: float
    top_k: int
    min_p: float
    penalties: tuple[float, float, float]
    """Presence, frequency and repetition penalty."""
    words: bool = False
    """Whether each turn is a word (`WORD`)."""

    @property
    def sampling(self) -> Sampling:
        """The settings of all turns."""
        presence, frequency, repetition = self.penalties
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            max_new_tokens=24,
            stop_token_ids=() if self.words else STOPS,
            seed=self.seed,
            structured_outputs=StructuredOutputs(regex=WORD if self.words else None),
        )


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    decoder: DecoderChoice = rng.choice(("lean", "module", "module"))
    case = Case(
        seed=seed,
        decoder=decoder,
        family=rng.choice(sorted(LEAN if decoder == "lean" else MODULES)),
        admit=rng.choice(("any_step", "rounds")),
        turns=rng.choice((1, 3, 6)),
        tools=rng.random() < 0.5,
        swaps=rng.choice((0, 0, 1, 3)),
        group=rng.choice((1, 4, 8, 8)),
        stride=rng.choice((0, 1, 14, 60)),
        max_batch=rng.choice((3, 64, 64)),
        keep_tokens=rng.choice((0, 200, 65536, 65536)),
        temperature=rng.choice((0.7, 1.0, 1.0, 1.3)),
        top_k=rng.choice((0, 0, 40)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        penalties=rng.choice(((0.0, 0.0, 1.0), (0.0, 0.0, 1.3), (0.8, 0.4, 1.0), (-0.5, 1.0, 0.8))),
        words=rng.random() < 0.25,
    )
    if case.swaps:  # an interrupted completion goes on as a prompt, for which the first two do not count
        case = replace(case, penalties=(0.0, 0.0, case.penalties[2]))
    return case


def build_model(
    case: Case, tokenizer: PreTrainedTokenizerBase, version: int = 0, sizes: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedModel:
    """Return the case's model, with weights of this version, large enough to tell tokens apart, in other `sizes`."""
    changes = {**(LEAN if case.decoder == "lean" else MODULES)[case.family], **sizes}
    torch.manual_seed(1000 * case.seed + version)
    config = AutoConfig.for_model(case.family, vocab_size=len(tokenizer), **{**SIZES, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("proj.weight", "embed_tokens.weight")):
                parameter.normal_(0, 0.15)
    return model.eval()


class Turns:
    """Environment of texts of random lengths, as a user's or as a tool's results."""

    instant = True

    def __init__(self, case: Case) -> None:
        self._case, self._turn = case, 0

    async def open(self, context: EpisodeContext) -> Observation:
        """Begin with a prompt that some siblings share."""
        self._rng = random.Random(f"{self._case.seed} {context.index}")
        schema = {"type": "object", "properties": {"code": {"type": "string"}}}
        tools = (Tool("run", "Runs code.", schema, str),) if self._case.tools else ()
        first: Message = {"role": "user", "content": "x" * (3 + self._case.stride * (context.index // 2))}
        return Observation((first,), tools)

    async def step(self, reply: Reply) -> StepResult:
        """Answer, or end."""
        self._turn += 1
        role = "tool" if self._case.tools and reply.tool_calls else "user"
        said: Message = {"role": role, "content": "y" * self._rng.choice((1, 8, 60))}
        return StepResult((said,), done=self._turn >= self._case.turns)

    async def finish(self, end: End) -> Score:
        """Return 1."""
        del end
        return Score(1.0)

    async def close(self) -> None:
        """Do nothing."""


class Recorder:
    """An engine that keeps each prompt with its completion; all else is the wrapped engine's."""

    def __init__(self, engine: Any, counts: bool = False) -> None:
        self.counts = counts
        self._engine = engine
        self.streamed = 0
        """Tokens so far, where it counts them."""
        self.calls: list[tuple[tuple[int, ...], Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *args: Any, **options: Any) -> Completion:
        """Sample one completion."""
        if self.counts:
            options["on_tokens"] = self._count
        done: Completion = await self._engine.generate(prompt_ids, sampling, *args, **options)
        self.calls.append((tuple(prompt_ids), done))
        return done

    def _count(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        del log_probs
        self.streamed += len(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def problems(case: Case) -> list[str]:
    """Play a case; return what does not hold of it."""
    tokenizer = tiny_tokenizer()
    versions = [build_model(case, tokenizer, version) for version in range(case.swaps + 1)]
    native = NativeEngine(
        build_model(case, tokenizer),
        decoder=case.decoder,
        admit=case.admit,
        seed=case.seed,
        max_batch=case.max_batch,
        keep_tokens=case.keep_tokens,
        tokenizer=tokenizer,
    )
    recorder = Recorder(ResumableEngine(native) if case.swaps else native)
    return asyncio.run(
        _played(case, recorder, lambda: native.decode_steps, tokenizer, dict(enumerate(versions)), BOUND)
    )


def engine_problems(case: Case, engine: RolloutEngine, sizes: Mapping[str, Any], bound: float) -> list[str]:
    """Play a case on an engine of that family and `sizes`, which gets its weights; return what does not hold.

    The case's decoder, admission and limits are the engine's own.
    """
    tokenizer = tiny_tokenizer()
    first = engine.version + 1
    versions = {first + at: build_model(case, tokenizer, at, sizes) for at in range(case.swaps + 1)}
    recorder = Recorder(ResumableEngine(engine) if case.swaps else engine, counts=True)

    async def play() -> list[str]:
        await engine.pause("finish")
        await engine.update_weights(first, pieces_of(versions[first].named_parameters()))
        await engine.resume()
        return await _played(case, recorder, lambda: recorder.streamed // case.group, tokenizer, versions, bound)

    return asyncio.run(play())


async def _played(
    case: Case,
    recorder: Recorder,
    progress: Callable[[], int],
    tokenizer: PreTrainedTokenizerBase,
    versions: Mapping[int, PreTrainedModel],
    bound: float,
) -> list[str]:
    """Play a case; new weights come after a few of the steps that `progress` counts."""
    sampling = case.sampling
    engine: RolloutEngine = recorder
    chat = Chat(tokenizer)
    playing = asyncio.ensure_future(
        run_group(lambda: Turns(case), engine, chat, sampling, size=case.group, max_turns=8, attempts=1)
    )
    rng = random.Random(case.seed)
    for version in sorted(versions)[1:]:
        steps = progress() + rng.randrange(1, 12)
        while progress() < steps and not playing.done():
            await asyncio.sleep(0)
        await recorder.pause("abort")
        await recorder.update_weights(version, pieces_of(versions[version].named_parameters()))
        await recorder.resume()
    episodes = await playing
    found = [f"episode {e.id}: {e.error}" for e in episodes if e.error is not None]
    segments = [segment for episode in episodes for segment in episode.segments]
    turns = sum(len(spans(segment.loss_mask)) for segment in segments)
    if turns != len(recorder.calls):
        found.append(f"{turns} turns of {len(recorder.calls)} completions")
    for segment in segments:
        found += stream_problems(segment, recorder.calls) + score_problems(segment, versions, sampling, bound)
    return found


def spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Return begin and end of each run of true values."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def stream_problems(segment: Segment, calls: Sequence[tuple[tuple[int, ...], Completion]]) -> list[str]:
    """Return the turns of a stream that no completion has with the very tokens before it, log-probs and versions."""
    found = []
    for begin, end in spans(segment.loss_mask):
        wanted = (segment.ids[begin:end], segment.log_probs[begin:end], segment.policy_versions[begin:end])
        made = [done for prompt, done in calls if prompt == segment.ids[:begin]]
        if wanted not in [(done.ids, done.log_probs, done.policy_versions) for done in made]:
            found.append(f"tokens {begin} to {end} are of no completion of the tokens before them")
    return found


@cache
def word_tokens(length: int) -> frozenset[int]:
    """Return the tokens that may come after so many letters of a word, by the definition of `WORD`."""
    tokenizer = tiny_tokenizer()
    letters = tokenizer("abcdefghijklmnopq", add_special_tokens=False)["input_ids"]
    return frozenset([*(letters if length < 20 else []), *([tokenizer.eos_token_id] if length >= 3 else [])])


def forced_log_probs(logits: Tensor, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> Tensor:
    """Return log-probs (V,) of the token after a prompt and the `ids` of a completion, by each setting's definition."""
    logits = logits.clone()
    if sampling.structured_outputs:
        logits[[token for token in range(len(logits)) if token not in word_tokens(len(ids))]] = -torch.inf
    for token in {*prompt, *ids}:
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token, count in Counter(ids).items():
        logits[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    logits = logits / sampling.temperature
    left = logits.softmax(-1) >= sampling.min_p * logits.softmax(-1).max()
    if sampling.top_k:
        left &= logits >= logits.topk(sampling.top_k).values[-1]
    return logits.masked_fill(~left, -torch.inf).log_softmax(-1)


@torch.no_grad()
def score_problems(
    segment: Segment, versions: Mapping[int, PreTrainedModel], sampling: Sampling, bound: float = BOUND
) -> list[str]:
    """Return the tokens of a stream whose log-probs are not those of a plain pass of their version's weights."""
    rows = {
        version: versions[version](input_ids=torch.tensor([segment.ids]), use_cache=False).logits[0].double()
        for version in {v for v in segment.policy_versions if v >= 0}
    }
    found = []
    begins = {at: begin for begin, end in spans(segment.loss_mask) for at in range(begin, end)}
    for at, (token, mask, version) in enumerate(
        zip(segment.ids, segment.loss_mask, segment.policy_versions, strict=True)
    ):
        if not mask:
            if segment.log_probs[at] != 0 or version != -1:
                found.append(f"token {at} was not sampled and has a log-prob or a version")
            continue
        begin = begins[at]
        expected = forced_log_probs(rows[version][at - 1], segment.ids[:begin], segment.ids[begin:at], sampling)[
            token
        ].item()
        if not abs(expected - segment.log_probs[at]) < bound:
            found.append(f"token {at}, version {version}: log-prob {segment.log_probs[at]:.6f}, forced {expected:.6f}")
    return found
