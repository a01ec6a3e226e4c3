"""Teachers beside a run: rollout engines that score its answers, in this process, in vLLM's, or behind a server."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from apps.common.learning_config import TeacherConfig
from apps.common.teacher_source import TeacherSource
from engines import EngineConfig
from engines.families.torch_operations import choose_torch_operations
from engines.loading import compute_dtype, load_model, resolve_device
from engines.storage.together import this_rank, this_world_size, together
from engines.weights.hub import model_directory
from rollout import NativeEngine, OpenAIConfig, RolloutConfig, RolloutEngine, TokenScores, VllmConfig, VllmEngine
from rollout.scoring import score_all
from rollout.vllm.client.process import find_python
from rollout.vllm.limits.cpu import chosen_dtype, refusal
from rollout.vllm.settings.config import text_config
from rollout.vllm.weights.shared_weights import checkpoint_shapes
from schedules.runtime.interrupts import Runner
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.schema import SEVERAL
from seqpack.comm.row_exchange import columns_of, flatten_row, unflatten_row

if TYPE_CHECKING:  # of an extra
    from rollout.openai.engine import OpenAIEngine

_TRIED = (1, 1)
"""Tokens that a server is asked to score before a run: on a CPU, a prompt of one ends vLLM with delta nets."""


@dataclass(frozen=True)
class RolloutTeacher:
    """A teacher by a rollout engine, on the ranks that have one; each of these asks for its part of the rows."""

    name: str
    engine: RolloutEngine | None
    runner: Runner
    seconds: float
    """Without a score, after which it counts as lost."""
    ranks: int
    """The first ranks have an engine."""

    def forward(self, batch: TensorDict, top_k: int) -> dict[str, Tensor]:
        """Return the keys `SEVERAL` of a batch, as `TrainEngine.forward(batch, top_k=K)` does. Collective.

        Raises:
            RuntimeError: the teacher is lost, or refuses a row, on any rank.
        """
        rows = [row.tolist() for row in samples_of(batch["input_ids"])]
        rank = this_rank()
        mine = rows[rank :: self.ranks] if rank < self.ranks else []
        parts = together(None, lambda: self._scored(mine, top_k), f"got no scores of teacher {self.name}")
        scores = []
        for place, row in enumerate(rows):
            data = torch.frombuffer(bytearray(parts[place % self.ranks][place // self.ranks]), dtype=torch.uint8)
            scores.append(unflatten_row(data, columns_of(_columns(TokenScores.empty(len(row), top_k)))))
        device = batch["input_ids"].device
        return {key: jagged([one[key].to(device) for one in scores]) for key in SEVERAL}

    def _scored(self, rows: Sequence[Sequence[int]], top_k: int) -> list[bytes]:
        """Return the bytes of each row's scores."""
        if self.engine is None or not rows:
            return []
        scores = self.runner.run(score_all(self.engine, rows, top_k, name=self.name, seconds=self.seconds))
        return [flatten_row(_columns(one)).numpy().tobytes() for one in scores]


def _columns(scores: TokenScores) -> dict[str, Tensor]:
    return dict(zip(SEVERAL, (scores.top_tokens, scores.top_log_probs, scores.rest), strict=True))


def build_rollout_teacher(
    source: TeacherSource, teachers: TeacherConfig, trained: EngineConfig, longest: int, stack: ExitStack
) -> RolloutTeacher:
    """Build a teacher of a run, which the stack closes: a server's and a native one on each rank, vLLM on the first.

    `trained`: the settings of training, whose device and dtype a native teacher has. `longest`: most tokens of an
    answer with its prompt. ValueError, RuntimeError: see `build_rollout`.
    """
    engine: RolloutEngine | None = None
    served: OpenAIEngine | None = None
    directory = Path() if source.kind == "server" else model_directory(source.place)
    ranks = 1 if source.kind == "vllm" else this_world_size()
    if this_rank() < ranks:
        if source.kind == "server":
            engine = served = _server(source, teachers, longest)
        elif source.kind == "vllm":
            engine = VllmEngine(directory, _vllm_settings(teachers, trained, longest))
        else:
            engine = _native(replace(trained, model=str(directory)), longest)
    if isinstance(engine, AbstractContextManager):
        stack.enter_context(engine)
    runner = stack.enter_context(Runner())
    if served is not None:
        stack.callback(lambda: runner.run(served.aclose()))
    return RolloutTeacher(str(source), engine, runner, teachers.teacher_answer_seconds, ranks)


def check_rollout_teacher(
    source: TeacherSource, teachers: TeacherConfig, trained: EngineConfig, longest: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    """Raise ValueError for a teacher that can't score the answers of a run, as far as that is seen before it starts.

    A server must be there, with the model's tokenizer, and tell `teacher_top_k` log-probs at each token of a sequence
    of `longest` tokens.
    """
    if source.kind == "vllm":
        settings = _vllm_settings(teachers, trained, longest).vllm
        if resolve_device(trained).type != "cpu" and settings.memory_share is None:
            raise ValueError(
                f"--teacher {source}: say by --teacher-gpu-memory-utilization how much of the device's memory it takes"
            )
        try:
            _check_vllm_model(model_directory(source.place), on_cpu=settings.device == "cpu")
        except ValueError as error:
            raise ValueError(f"--teacher {source}: {error}") from error
        try:
            find_python(settings)
        except ValueError as error:
            raise ValueError(
                f"--teacher {source}: {error}. With Bazel, run //apps/grpo:vllm, which brings one"
            ) from error
    if source.kind != "server":
        return
    engine = _server(source, teachers, longest)
    if engine.max_length < longest + 1:
        raise ValueError(
            f"--teacher {source} takes sequences of up to {engine.max_length} tokens, and scoring --max-episode-tokens "
            f"{longest} needs one more: serve it with --max-model-len {longest + 1}, or more"
        )
    from rollout.openai.vocabulary import check_vocabulary  # of an extra, which is there where `_server` returns

    ids = sorted(tokenizer.get_vocab().values())
    check_vocabulary(_openai_settings(source, teachers), ids, lambda part: _text(tokenizer, part))
    with Runner() as runner:
        runner.run(_try(engine, source, teachers))


def _check_vllm_model(directory: Path, on_cpu: bool) -> None:
    """Raise ValueError for files that weights are not read from, and for what vLLM's kernels for CPUs lack."""
    checkpoint_shapes(directory)
    described = text_config(directory)
    if on_cpu and (why := refusal(described, chosen_dtype(described, VllmConfig.dtype))):
        raise ValueError(f"vLLM can't compute with it: {why}")


async def _try(engine: "OpenAIEngine", source: TeacherSource, teachers: TeacherConfig) -> None:
    """Raise ValueError unless a server tells as many log-probs as the run asks for."""
    try:
        await engine.score(_TRIED, teachers.teacher_top_k)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--teacher {source} does not tell --teacher-top-k {teachers.teacher_top_k} log-probs at each token: "
            f"{error}. Serve it with --max-logprobs -1, or lower --teacher-top-k"
        ) from error
    finally:
        await engine.aclose()


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _openai_settings(source: TeacherSource, teachers: TeacherConfig) -> OpenAIConfig:
    url = source.place if source.place.endswith("/v1") else f"{source.place}/v1"
    return OpenAIConfig(url, allow_remote=True, answer_seconds=teachers.teacher_answer_seconds)


def _server(source: TeacherSource, teachers: TeacherConfig, longest: int) -> "OpenAIEngine":
    try:
        from rollout.openai.engine import OpenAIEngine  # of an extra

        openai = _openai_settings(source, teachers)
        return OpenAIEngine(RolloutConfig(backend="openai", max_length=longest + 1, openai=openai))
    except (ImportError, ValueError) as error:
        raise ValueError(f"--teacher {source}: {error}") from error


def _vllm_settings(teachers: TeacherConfig, trained: EngineConfig, longest: int) -> RolloutConfig:
    return RolloutConfig(
        backend="vllm",
        max_length=longest + 1,
        vllm=VllmConfig(
            device="cpu" if resolve_device(trained).type == "cpu" else "auto",
            memory_share=teachers.teacher_gpu_memory_utilization or None,
            graph_sizes=(),  # it decodes nothing
        ),
    )


def _native(settings: EngineConfig, longest: int) -> NativeEngine:
    device = resolve_device(settings)
    module = load_model(settings, dtype=compute_dtype(settings, device), device=device)
    choose_torch_operations(module)
    return NativeEngine(module.requires_grad_(False), max_length=longest + 1, keep_tokens=0)
