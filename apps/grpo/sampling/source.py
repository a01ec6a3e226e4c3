"""Source of a run's samplers, which every process that samples is given."""

from dataclasses import dataclass, replace
from pathlib import Path

from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.run.ranks import init_rank
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.chat import chat_of
from engines.loading import compute_dtype, resolve_device
from rollout import Chat, RolloutEngine
from schedules.backend import SamplerBackend
from schedules.sampling.settings import RolloutSettings


@dataclass(frozen=True)
class RunSampler:
    """Sampler of a run, by the backend that its configuration names (`schedules.protocols.SamplerSource`)."""

    config: GrpoConfig
    model: Path
    """The directory of the weights that the run began with."""

    @property
    def backend(self) -> SamplerBackend:
        """The backend that the configuration names."""
        return self.config.cluster.rollout.backend

    @property
    def module_names(self) -> bool:
        """Whether it takes weights under the names of the trained module."""
        return self.backend.module_names

    def prepare_process(self) -> None:
        """Set threads, seeds and logging of a process that samples."""
        init_rank(self.config.threads, self.config.seed)
        quiet_libraries()

    def engine(self, version: int) -> RolloutEngine:
        """Return a sampler with the run's first weights, which count as number `version`."""
        return self.backend.build(self.config, self.model, version)

    def chat(self) -> Chat:
        """Return the chat format of the run's model."""
        return chat_of(self.config, load_tokenizer(self.model), self.model)

    def dtype(self, engine: RolloutEngine) -> str:
        """Return what the sampler computes in."""
        return self.backend.dtype(self.config, self.model, engine)


def rollout_settings(config: GrpoConfig, ranks: int = 1) -> RolloutSettings:
    """Return the rollout settings of a run on so many training ranks."""
    return RolloutSettings(
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        sampling=replace(config.sampling, seed=config.seed),
        max_turns=config.max_turns,
        max_episode_tokens=config.max_episode_tokens,
        max_episode_seconds=config.max_episode_seconds,
        environment_processes=config.environment_processes,
        environment_memory_gib=config.environment_memory_gib,
        environment_servers=config.environment_servers,
        stall_seconds=config.stall_seconds,
        ranks_per_sampler=config.cluster.rollout.ranks_each(ranks),
        offload=config.cluster.offload,
        sleep=config.cluster.rollout.sleep,
        trainer_dtype=str(compute_dtype(config.engine, resolve_device(config.engine))).removeprefix("torch."),
        allow_untested=config.engine.allow_untested,
        filter_groups=config.filter_groups,
        num_generations_eval=config.num_generations_eval,
    )
