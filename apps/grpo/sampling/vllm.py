"""The sampler of a run, as `--cluster.rollout` asks for it, and the proof that it has the trainer's weights."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apps.common.run.ranks import gather_lists
from apps.common.vllm_arguments import vllm_arguments
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.memory_turns import sampling_turn
from apps.grpo.sampling.session import Session
from engines import TrainEngine
from engines.devices.detect import devices_of
from rollout import Completion, Episode, RolloutConfig, VllmConfig, VllmEngine
from rollout.engine import Load, PauseMode
from rollout.episodes.batch import TYPES
from rollout.episodes.media_codec import plain_media, read_media
from rollout.episodes.playing import together
from rollout.chat.segment import Segment
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from rollout.errors import EpisodeFailed
from rollout.sync import Manifest
from rollout.sync.pieces import Bucket
from seqpack.batches.batch import make_batch

Media = Mapping[str, Any] | None
"""What a prompt shows, as `RolloutEngine.generate` takes it."""
EXPERTS_OF_COPIES = (
    "experts over several copies of a model ran on a CPU alone: set --cluster.rollout.device cpu, or have each copy "
    "hold all experts, over its own tp workers"
)
PROBES = 8
"""Prompts of the step that are asked again after a hand-over."""
PROBE_TOKENS = 4
"""Tokens of an answer to a probe, at most."""
BOUNDS = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3}
"""Mean distance between the log-probs of a sampler that computes in this dtype and of the trainer. The largest is told,
not bounded: where two answers are nearly equal, bfloat16 moves single tokens by 1 and more, in any implementation."""


def rollout_config(config: GrpoConfig) -> RolloutConfig:
    """Return the settings of the sampler that the configuration names, where it is vLLM.

    Raises:
        ValueError: experts are to be spread over copies of the model, and it samples on no CPU.
    """
    layout = config.cluster.rollout
    if layout.experts_over_copies and not samples_on_a_cpu(config):
        raise ValueError(f"{EXPERTS_OF_COPIES}: set --cluster.rollout.ep to tp = {layout.tp}")
    return RolloutConfig(
        backend="vllm",
        max_length=layout.max_model_tokens or config.max_episode_tokens,
        max_batch=layout.max_requests or RolloutConfig.max_batch,
        prefill_tokens=layout.max_batched_tokens or RolloutConfig.prefill_tokens,
        seed=config.seed,
        routed_experts=config.engine.routing_replay,
        vllm=VllmConfig(
            device=layout.device,
            dtype=layout.dtype,
            tensor_parallel=layout.tp,
            data_parallel=layout.dp,
            copies_per_device=layout.copies_per_device,
            weights_on_device=layout.weights_on_device,
            sleep=layout.sleep,
            expert_parallel=layout.ep > 1,
            experts_over_copies=layout.experts_over_copies,
            prefix_cache=layout.prefix_cache,
            split_prompts=layout.chunked_prefill,
            drop_seeds=layout.chunked_prefill or layout.prefix_cache or not samples_on_a_cpu(config),
            memory_share=layout.memory_share or None,
            graph_sizes=layout.cuda_graph_sizes,
            arguments=vllm_arguments(layout.vllm),
        ),
    )


def samples_on_a_cpu(config: GrpoConfig) -> bool:
    """Return whether the sampler's device is the CPU: by its own setting, else as training's is."""
    device = config.engine.device
    if config.cluster.rollout.device == "cpu":
        return True
    return device == "cpu" or (device == "auto" and devices_of("auto").kind == "cpu")


def vllm_engine(config: GrpoConfig, model: Path, version: int) -> VllmEngine:
    """vLLM, started from the weights in `model`; to be closed."""
    return VllmEngine(model, rollout_config(config), version)


class SamplerElsewhere:
    """What a rank has whose device belongs to the sampler of a rank before it: the version of its weights.

    It takes none, and is asked nothing (`Session` deals tasks to those that have a sampler).
    """

    def __init__(self, version: int) -> None:
        self.version = self._before = version

    def load(self) -> Load:
        """Return nothing runs here."""
        return Load(0, 0)

    async def prepare(self, manifest: Manifest) -> None:
        """Nothing is staged."""
        del manifest
        self._before = self.version

    async def receive(self, bucket: Bucket) -> int:
        """Return nothing lacks."""
        del bucket
        return 0

    async def commit(self, version: int) -> None:
        """The sampler has these."""
        self.version = version

    async def abort(self) -> None:
        """It has those from before."""
        self.version = self._before

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Nothing runs."""
        del mode

    async def resume(self) -> None:
        """Nothing waited."""
        self._before = self.version


class WeightsNotTakenError(RuntimeError):
    """What the sampler says is not what the trainer's weights say."""


def prove_weights(session: Session, engine: TrainEngine, episodes: Sequence[Episode]) -> dict[str, float]:
    """Ask some of the step's prompts again and hold the log-probs of the answers to the trainer's.

    Every sampler of every rank is asked, and its answers are scored by all of them; collective. The native one in a
    rank's own process needs no proof. The metrics say how far apart they are, and what the hand-over cost.

    Raises:
        WeightsNotTakenError: they are further apart than the sampler's arithmetic explains.
    """
    prompts, media = probes_of(episodes), probes_media(episodes)
    if not prompts:
        return {}
    session.proof.owed = False
    with sampling_turn(session, engine) if session.config.cluster.rollout.sleep else nullcontext():
        if isinstance(session.sampler, VllmEngine):
            told = [session.runner.run(probe(session, prompts, session.sampler.facts["dtype"], session.sampler, media))]
        else:
            told = session.probed(prompts, media)
    return hold_samplers(engine, prompts, gather_lists(told), session.sampler.version, media)


def prove_owed(session: Session, engine: TrainEngine, episodes: Sequence[Episode]) -> None:
    """Prove weights that were handed over outside a step: at a resume, or to samplers in place of dead ones. Before the
    engine's weights change, by what was sampled first; collective. WeightsNotTakenError: see `prove_weights`."""
    while session.proof.owed and probes_of(episodes):  # again, of samplers that died of it
        prove_weights(session, engine, episodes)


def probes_of(episodes: Sequence[Episode]) -> list[list[int]]:
    """Return the first prompts of some of the groups."""
    return [list(segment.ids[: segment.loss_mask.index(True)]) for segment in _probed(episodes)]


def probes_media(episodes: Sequence[Episode]) -> list[Media]:
    """Return what those prompts show; None of a prompt of text."""
    return [segment.media or None for segment in _probed(episodes)]


def plain_shown(media: Sequence[Media]) -> list[dict[str, Any] | None]:
    """Return what probes show, as JSON holds it on the way to another process; nothing where all are text."""
    return [None if one is None else plain_media(one) for one in media] if any(media) else []


def read_shown(plain: Sequence[Mapping[str, Any] | None]) -> list[Media]:
    """Return what `plain_shown` gave."""
    return [None if one is None else read_media(one) for one in plain]


def _probed(episodes: Sequence[Episode]) -> list[Segment]:
    firsts = {episode.group: episode.segments[0] for episode in episodes if episode.segments}
    return [segment for segment in firsts.values() if segment.sampled and _seen_at_once(segment)][:PROBES]


def _seen_at_once(segment: Segment) -> bool:
    """Return whether all its images stand before the first token that was sampled."""
    return segment.media is None or len(segment.media[TYPES]) <= segment.loss_mask.index(True)


async def probe(
    session: Session, prompts: Sequence[Sequence[int]], dtype: str, vllm: VllmEngine | None, media: Sequence[Media] = ()
) -> dict[str, Any]:
    """Return what a session's sampler, which computes in `dtype`, says of itself, as JSON: answers to the prompts (of
    each copy of the model that vLLM has), its dtype and, of vLLM, what the last hand-over cost."""
    answers = await answered(session, prompts, media, vllm)
    metrics = {} if vllm is None else transfer_metrics(vllm)
    return {"answers": [plain_answer(answer) for answer in answers], "dtype": dtype, "metrics": metrics}


async def answered(
    session: Session,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media] = (),
    vllm: VllmEngine | None = None,
) -> list[Completion]:
    """Return a short answer to each probe, as training's answers are sampled; `media`: what each shows, nothing of
    text. Of several copies of the model all answers of the first, then those of the second, and so on."""
    sampling = session.config.sampling
    how = replace(
        sampling,
        max_new_tokens=min(PROBE_TOKENS, sampling.max_new_tokens),
        stop_token_ids=(*sampling.stop_token_ids, *session.chat.stop_ids),
        seed=0,
    )
    probes = list(zip(prompts, media or [None] * len(prompts), strict=True))
    if vllm is None or vllm.config.data_parallel == 1:
        return await together([session.sampler.generate(prompt, how, shown) for prompt, shown in probes])

    async def of_copy(copy: int) -> list[Completion]:
        ask = partial(vllm.generate, copy=copy)
        try:
            return await together([ask(prompt, how, shown) for prompt, shown in probes])
        except EpisodeFailed:
            if copy in vllm.copies:
                raise
            return []  # it died meanwhile, and answers nobody any more

    return [answer for answers in await together(map(of_copy, vllm.copies)) for answer in answers]


def hold_samplers(
    engine: TrainEngine,
    prompts: Sequence[Sequence[int]],
    told: Sequence[dict[str, Any]],
    version: int,
    media: Sequence[Media] = (),
) -> dict[str, float]:
    """Hold what each sampler, and each copy of its model, told (`probe`) to the trainer's present weights; collective.
    All have these as `version`.

    The metrics are those of the sampler that is furthest off. Weights that are stale by one small step are within
    bfloat16 of the new ones; those that stay so are soon found.

    Raises:
        WeightsNotTakenError: one is further off than arithmetic in its dtype explains, or answers by another version.
    """
    if not told:
        return {}
    told = [
        one | {"answers": one["answers"][first : first + len(prompts)]}
        for one in told
        for first in range(0, len(one["answers"]), len(prompts))
    ]
    answers = [[read_answer(answer) for answer in one["answers"]] for one in told]
    shown = media_columns(media or [None] * len(prompts))
    samples = [_sample(*probe) for one in answers for probe in zip(prompts, one, shown, strict=True)]
    scores = engine.forward(make_batch(samples))["log_probs"].unbind()
    found: list[dict[str, float]] = []
    for number, (one, mine) in enumerate(zip(told, answers, strict=True)):
        span = slice(number * len(prompts), (number + 1) * len(prompts))
        who = "the sampler" if len(told) == 1 else f"sampler {number} of {len(told)}"
        distance = _distances(samples[span], scores[span])
        found.append(_proof(distance, mine, BOUNDS[one["dtype"]], one["dtype"], version, who) | one["metrics"])
    return {name: max(metrics[name] for metrics in found) for name in found[0]}


def _distances(samples: Sequence[dict[str, Any]], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return of each sampled token's log-prob from the trainer's."""
    return torch.cat(
        [
            (log_probs[sample["loss_mask"]] - sample["rollout_log_probs"][sample["loss_mask"]]).abs()
            for log_probs, sample in zip(scores, samples, strict=True)
        ]
    )


def _proof(
    distance: torch.Tensor, answers: Sequence[Completion], allowed: float, dtype: str, version: int, who: str
) -> dict[str, float]:
    mean = distance.mean().item()
    versions = {v for answer in answers for v in answer.policy_versions}
    if not (mean <= allowed and versions == {version}):
        raise WeightsNotTakenError(
            f"after version {version} was handed over, the log-probs of {who}, of version "
            f"{', '.join(map(str, sorted(versions)))}, are {mean:.3g} from the trainer's on average ({allowed} is what "
            f"{dtype} explains): it does not sample from the trainer's weights"
        )
    return {"weights/probe/abs": mean, "weights/probe/abs/max": distance.max().item()}


def plain_answer(answer: Completion) -> list[Any]:
    """Return an answer as JSON holds it, with the experts that its tokens went to."""
    experts = answer.extras.get(ROUTED_EXPERTS)
    told = [answer.ids, answer.log_probs, answer.stop_reason, answer.policy_versions]
    return [*told, None if experts is None else experts.plain()]


def read_answer(plain: Sequence[Any]) -> Completion:
    """Return what `plain_answer` gave."""
    ids, log_probs, why, versions, experts = plain
    extras = {} if experts is None else {ROUTED_EXPERTS: RoutedExperts.read(experts)}
    return Completion(tuple(ids), tuple(log_probs), why, tuple(versions), extras)


def transfer_metrics(sampler: VllmEngine) -> dict[str, float]:
    """Return what the last hand-over cost."""
    transfer = sampler.transfer
    if transfer is None:
        return {}
    lost = {} if sampler.config.data_parallel == 1 else {"rollout/lost_copies": float(len(sampler.lost_copies))}
    return lost | {
        "weights/pause_ms": 1000 * transfer.paused_s,
        "weights/staging_ms": 1000 * transfer.staged_s,
        "weights/link_share": transfer.link_share,
    }


def media_columns(media: Sequence[Media]) -> list[dict[str, Any]]:
    """Return what each prompt shows as a batch has it: all rows have the same keys, those of text with nothing in
    them."""
    empty = {key: torch.as_tensor(value)[:0] for one in media for key, value in (one or {}).items()}
    return [{key: torch.as_tensor((one or {}).get(key, none)) for key, none in empty.items()} for one in media]


def _sample(prompt: Sequence[int], answer: Completion, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a batch as the trainer scores it."""
    ids = torch.tensor([*prompt, *answer.ids], dtype=torch.int64)
    mask = torch.arange(len(ids)) >= len(prompt)
    sampled = torch.zeros(len(ids))
    sampled[mask] = torch.tensor(answer.log_probs)
    experts = answer.extras.get(ROUTED_EXPERTS)
    replay = {} if experts is None else {ROUTED_EXPERTS: experts.resized(len(ids)).tensor()}
    seen = dict(shown)
    if TYPES in seen:
        own = seen[TYPES].to(torch.int64)
        seen[TYPES] = torch.cat([own, own.new_zeros(len(ids) - len(own))])  # the rest is text
    return (
        replay
        | seen
        | {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": mask,
            "rollout_log_probs": sampled,
            "reward": 0.0,
            "group": 0,
        }
    )
