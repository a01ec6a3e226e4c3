"""Episodes: token in, token out, over turns with tools, bad calls and limits."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.chat.segment import NOT_SAMPLED, Segment
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.environments.task import Task
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_episode, run_group
from rollout.native.engine import NativeEngine
from rollout.rewards.boxed import exact_answer
from rollout.seeds import derive_seed
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.arithmetic import calculator

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
QUESTION = ({"role": "user", "content": "37+58="},)
CALL = "<tool_call>\n<function=calculator>\n<parameter=expression>\n37+58\n</parameter>\n</function>\n</tool_call>"
SAMPLING = Sampling(max_new_tokens=200)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def script(*turns: str) -> ScriptedEngine:
    """An engine that says these turns, each closed unless it ends in "...": then the limit cut it."""
    texts = [t.removesuffix("...") if t.endswith("...") else t + "<|im_end|>" for t in turns]
    return ScriptedEngine(lambda prompt, turn: encode(texts[turn]), version=7)


def play(engine: RolloutEngine, task: EnvironmentFactory | None = None, **options: Any) -> Episode:
    task = task or Task(QUESTION, exact_answer("95"), tools=(calculator(),))
    return asyncio.run(run_episode(task, engine, Chat(TOKENIZER), SAMPLING, **options))


def stream(episode: Episode) -> Segment:
    """The one segment of an episode whose template keeps earlier turns."""
    (segment,) = episode.segments
    return segment


def sampled_text(episode: Episode) -> str:
    segment = stream(episode)
    return str(TOKENIZER.decode([i for i, on in zip(segment.ids, segment.loss_mask, strict=True) if on]))


def test_a_single_turn() -> None:
    episode = play(script("\\boxed{95}"), Task(QUESTION, exact_answer("95")), group=4)
    assert TOKENIZER.decode(stream(episode).ids) == (
        "<|im_start|>user\n37+58=<|im_end|>\n<|im_start|>assistant\n\\boxed{95}<|im_end|>"
    )
    assert sampled_text(episode) == "\\boxed{95}<|im_end|>"
    assert (episode.reward, episode.group) == (1.0, 4)
    assert episode.end == "done"


def test_two_turns_with_a_tool() -> None:
    engine = script(CALL, "\\boxed{95}")
    episode = play(engine)
    said = CALL + "<|im_end|>"
    heard = "\n<|im_start|>user\n<tool_response>\n95\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(stream(episode).ids).endswith("assistant\n" + said + heard + "\\boxed{95}<|im_end|>")
    assert sampled_text(episode) == said + "\\boxed{95}<|im_end|>"
    assert engine.prompts[1] == engine.prompts[0] + encode(said) + encode(heard)
    assert episode.reward == 1.0
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["tool_calls"][0]["function"] == {
        "name": "calculator",
        "arguments": {"expression": "37+58"},
    }
    of_tool = {"tool/calculator/calls": 1, "tool/calculator/errors": 0, "tool/calculator/timeouts": 0}
    assert (episode.end, episode.metrics) == ("done", {"turns": 2, "tool_calls": 1, "tool_errors": 0} | of_tool)
    for on, log_prob, version in zip(
        stream(episode).loss_mask, stream(episode).log_probs, stream(episode).policy_versions, strict=True
    ):
        assert (log_prob, version) == ((-0.5, 7) if on else (0.0, NOT_SAMPLED))


def test_what_is_appended_is_what_the_template_would_write() -> None:
    episode = play(script(CALL, "\\boxed{95}"))
    rendered = TOKENIZER.apply_chat_template(
        list(episode.messages), tools=[calculator().schema], tokenize=False, add_generation_prompt=False
    )
    assert TOKENIZER.decode(stream(episode).ids) + "\n" == rendered


def test_sampled_tokens_are_never_tokenised_again() -> None:
    odd = [
        encode("<tool_call>")[0],
        *encode("\n<function="),
        *encode("calc"),
        *encode("ulator>\n</function>\n</tool_call>"),
    ]
    engine = ScriptedEngine(lambda prompt, turn: [*odd, END] if turn == 0 else [*encode("x"), 300 - 300, END])
    episode = play(engine)
    first = engine.prompts[0]
    assert list(stream(episode).ids[len(first) : len(first) + len(odd) + 1]) == [*odd, END]


@pytest.mark.parametrize(
    ("turn", "heard"),
    [
        (CALL.replace("37+58", "1/0"), "Error: ValueError: division by zero"),
        (CALL.replace("calculator", "browser"), "Error: there is no tool 'browser'"),
        (CALL.replace("expression", "text"), "Error: missing argument 'expression'"),
        ("<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1", "could not be read"),
    ],
)
def test_a_bad_call_is_told_and_may_be_tried_again(turn: str, heard: str) -> None:
    engine = script(turn, CALL, "\\boxed{95}")
    episode = play(engine)
    assert heard in episode.messages[2]["content"]
    assert episode.reward == 1.0
    assert episode.metrics["turns"] == 3


def test_a_call_cut_off_by_the_limit_is_not_run() -> None:
    episode = play(script(CALL[:-14] + "..."))
    assert (episode.end, episode.metrics) == ("length", {"turns": 1, "tool_calls": 0, "tool_errors": 0})
    assert episode.reward == 0.0
    assert sampled_text(episode) == CALL[:-14]


def test_two_calls_in_one_turn_are_answered_in_one_message_each() -> None:
    episode = play(script(CALL + "\n" + CALL.replace("58", "60"), "\\boxed{95}"))
    assert [m.get("content") for m in episode.messages[2:4]] == ["95", "97"]
    assert "</tool_response>\n<tool_response>" in TOKENIZER.decode(stream(episode).ids)


def test_turns_are_bounded() -> None:
    episode = play(script(CALL, CALL, CALL), max_turns=2)
    assert episode.end == "max_turns"
    assert episode.metrics["turns"] == 2
    assert stream(episode).loss_mask[-1]  # nothing follows the last sampled turn


def test_tokens_are_bounded() -> None:
    engine = script(CALL, "\\boxed{95}")
    length = len(stream(play(script(CALL, "\\boxed{95}"))).ids)
    assert play(script(CALL, "\\boxed{95}"), max_tokens=length).end == "done"
    short = play(script(CALL, "\\boxed{95}"), max_tokens=length - 1)
    assert short.end == "max_tokens"
    assert len(stream(short).ids) == length - 1
    none_left = play(engine, max_tokens=length - 20)
    assert none_left.end == "max_tokens"
    assert len(stream(none_left).ids) <= length - 20
    failed = play(engine, max_tokens=5)
    assert (failed.end, failed.score) == ("failed", None)
    assert "leaves none of max_tokens=5" in (failed.error or "")


def test_another_stop_token_is_closed_for_the_template() -> None:
    other = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    engine = ScriptedEngine(lambda prompt, turn: [*encode(CALL), other] if turn == 0 else [*encode("\\boxed{95}"), END])
    task = Task(QUESTION, exact_answer("95"), tools=(calculator(),))
    sampling = Sampling(max_new_tokens=200, stop_token_ids=(other,))
    episode = asyncio.run(run_episode(task, engine, Chat(TOKENIZER, "<|im_end|>"), sampling))
    assert episode.reward == 1.0
    assert CALL + "<|endoftext|><|im_end|>\n<|im_start|>user" in TOKENIZER.decode(stream(episode).ids)
    assert sampled_text(episode) == CALL + "<|endoftext|>" + "\\boxed{95}<|im_end|>"


def test_an_abort_ends_the_episode() -> None:
    class Aborting(ScriptedEngine):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
        ) -> Completion:
            return Completion(tuple(encode("par")), (-1.0,) * 3, "abort", (0,) * 3)

    episode = play(Aborting(lambda prompt, turn: []))
    assert episode.end == "abort"
    assert sampled_text(episode) == "par"


def test_thinking_opened_by_the_prompt_is_reasoning() -> None:
    seen = []

    def reward(reply: Reply, results: object) -> float:
        seen.append(reply)
        return 0.0

    engine = script("because\n</think>\n\n\\boxed{95}")
    asyncio.run(run_episode(Task(QUESTION, reward), engine, Chat(TOKENIZER, think=True), SAMPLING))
    assert seen[0].reasoning == "because"
    assert seen[0].content == "\\boxed{95}"


def test_an_environment_of_ones_own() -> None:
    class Guess:
        def __init__(self) -> None:
            self.reward = 0.0

        async def open(self, context: EpisodeContext) -> Observation:
            assert (context.task_id, context.attempt, context.index) == ("task", 0, 0)
            return Observation(({"role": "user", "content": "guess"},))

        async def step(self, reply: Reply) -> StepResult:
            right = reply.content == "3"
            self.reward += 1.0 if right else -0.25
            return StepResult(({"role": "user", "content": "no"},), done=right)

        async def finish(self, end: End) -> Score:
            assert end == "done"
            return Score(self.reward, {"tries": self.reward})

        async def close(self) -> None:
            self.reward = 0.0

    episode = play(script("1", "2", "3"), Guess)
    assert episode.score == Score(0.5, {"tries": 0.5})
    assert episode.metrics["turns"] == 3


def test_a_group_on_a_real_model() -> None:
    tokenizer = TOKENIZER
    engine = NativeEngine(tiny_model(len(tokenizer)), pad_token_id=0, max_length=256)
    assert isinstance(engine, RolloutEngine)
    task = Task(QUESTION, lambda reply, results: float(len(reply.text) > 3), tools=(calculator(),))
    sampling = Sampling(max_new_tokens=6, seed=3)

    def group() -> list[Episode]:
        return asyncio.run(run_group(task, engine, Chat(tokenizer), sampling, size=4, group=2, max_turns=2))

    episodes = group()
    assert len({stream(e).ids for e in episodes}) > 1  # each episode has a seed of its own
    assert [stream(e).ids for e in group()] == [stream(e).ids for e in episodes]
    assert {e.group for e in episodes} == {2}
    prompt = Chat(tokenizer).open(task.messages, task.tools)
    assert engine.num_prefill_tokens in (
        len(prompt),
        2 * len(prompt),
    )  # once a call of group(), or kept
    for e in episodes:
        assert list(stream(e).ids[: len(prompt)]) == prompt
        assert 1 <= e.sampled <= 6
        assert json.dumps(list(e.messages))
        assert set(e.timings) == {"generate_s", "environment_s", "total_s"}


def test_a_groups_tool_calls_cost_one_batch_a_turn() -> None:
    batches = []

    class Batching(ScriptedEngine):
        """Answers like a model, first the call, then the answer, to all who ask within a few turns of the loop."""

        def __init__(self) -> None:
            super().__init__(lambda prompt, turn: [])
            self.waiting: list[tuple[Sequence[int], asyncio.Future[Completion]]] = []

        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
        ) -> Completion:
            answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self.waiting.append((prompt_ids, answer))
            if len(self.waiting) == 1:
                self.settling = asyncio.create_task(self.settle())
            return await answer

        async def settle(self) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            batch, self.waiting = self.waiting, []
            batches.append(len(batch))
            for prompt, answer in batch:
                called = encode("<tool_response>")[0] in prompt
                ids = tuple(encode("\\boxed{95}<|im_end|>" if called else CALL + "<|im_end|>"))
                answer.set_result(Completion(ids, (-1.0,) * len(ids), "stop", (0,) * len(ids)))

    task = Task(QUESTION, exact_answer("95"), tools=(calculator(),))
    group = asyncio.run(run_group(task, Batching(), Chat(TOKENIZER), SAMPLING, size=64))
    assert [e.reward for e in group] == [1.0] * 64
    assert batches == [64, 64]


def test_seeds_differ_and_are_stable() -> None:
    assert derive_seed(0, "episode", 1) != derive_seed(0, "turn", 1)
    assert derive_seed(3, "turn", 0) == derive_seed(3, "turn", 0) < 2**63
    assert derive_seed(1) == 2122349437186147863


def test_user_errors() -> None:
    with pytest.raises(ValueError, match="single token"):
        Chat(TOKENIZER, end_of_turn="the end")
    with pytest.raises(ValueError, match="max_turns"):
        play(script("x"), max_turns=0)
    with pytest.raises(ValueError, match="at least 1 episode"):
        asyncio.run(run_group(Task(QUESTION, exact_answer("1")), script("x"), Chat(TOKENIZER), SAMPLING, size=0))
