"""vLLM as the sampler of a run, as `--rollout` asks for it."""

from pathlib import Path

from transformers import PretrainedConfig

from apps.common.cluster import VLLM_FLAG, RolloutLayout
from apps.common.vllm_arguments import vllm_arguments
from apps.grpo.config import GrpoConfig
from engines.devices.detect import devices_of
from engines.loading import resolve_device
from rollout import RolloutConfig, RolloutEngine, VllmConfig, VllmEngine
from rollout.vllm.client.process import VARIABLE, find_python, known_arguments
from rollout.vllm.limits.cpu import arguments_refusal, chosen_dtype, refusal
from rollout.vllm.node import vllm_engine
from rollout.vllm.settings.arguments import check_arguments
from rollout.vllm.weights.shared_weights import checkpoint_shapes
from runplan.samplers.vllm import VllmPlan
from schedules.backend import SamplerBackend

EXPERTS_OF_COPIES = (
    "experts over several copies of a model ran on a CPU alone: set --rollout.device cpu, or have each copy "
    "hold all experts, over its own tp workers"
)


class VllmBackend(SamplerBackend):
    """vLLM in a process of its own. It reads weights under the names of a checkpoint."""

    spans_ranks = True
    variables = (VARIABLE,)

    def build(self, config: GrpoConfig, model: Path, version: int) -> VllmEngine:
        """Return vLLM, started from the weights in `model`; to be closed."""
        return vllm_engine(model, rollout_config(config), version)

    def begin(self, config: GrpoConfig, model: Path, version: int) -> VllmEngine:
        """Return vLLM, whose process has begun to start."""
        return vllm_engine(model, rollout_config(config), version, wait=False)

    def shares_device(self, config: GrpoConfig) -> bool:
        """Return whether vLLM takes memory of training's devices, or in turn with training: not on a CPU, where its
        caches have a set size."""
        return config.cluster.rollout.sleep or not samples_on_a_cpu(config)

    def dtype(self, config: GrpoConfig, model: Path, engine: RolloutEngine) -> str:
        """Return what vLLM says that it computes in."""
        del config, model
        assert isinstance(engine, VllmEngine)
        return str(engine.info["dtype"])

    def devices(self, layout: RolloutLayout) -> int:
        """Return how many devices one vLLM spans."""
        return layout.devices

    def check_machine(self, config: GrpoConfig) -> None:
        """Refuse settings that this machine's devices cannot obey, a missing vLLM, and arguments that it lacks."""
        device, layout = resolve_device(config.engine), config.cluster.rollout
        if layout.weights_on_device and device.type != "cuda":
            raise ValueError(
                "--rollout.weights-on-device: weights pass through the memory of a CUDA device, and training "
                f"is on {device.type}: set --rollout.no-weights-on-device"
            )
        if layout.sleep and device.type == "cpu":
            raise ValueError(
                "--rollout.sleep: vLLM has no memory of a device to give back on a CPU, and refuses it: set "
                "--rollout.no-sleep"
            )
        sampler = rollout_config(config).vllm
        try:
            find_python(sampler)
        except ValueError as error:
            raise ValueError(
                f"--rollout.engine vllm: {error}. With Bazel, run //apps/grpo:vllm, which brings one"
            ) from error
        if sampler.arguments:
            try:
                check_arguments(sampler.arguments, known_arguments(sampler))
            except ValueError as error:
                raise ValueError(f"{VLLM_FLAG}: {error}") from error

    def check_model(self, config: GrpoConfig, directory: Path, model: PretrainedConfig) -> None:
        """Refuse files that its weights are not read from, and what vLLM's kernels for CPUs lack: its process would say
        so after the warm start."""
        try:
            checkpoint_shapes(directory)
        except ValueError as error:
            raise ValueError(f"--rollout.engine vllm: {error}{_conversion(directory)}") from error
        if not samples_on_a_cpu(config):
            return
        described = model.get_text_config().to_dict()
        layout = config.cluster.rollout
        dtype = chosen_dtype(described, layout.dtype)
        if why := refusal(described, dtype) or arguments_refusal(vllm_arguments(layout.vllm), dtype):
            raise ValueError(f"--rollout.engine vllm can't sample from {directory}: {why}")

    def layout_problems(self, layout: RolloutLayout) -> list[str]:
        """Return the reason why an engine argument of `--rollout.vllm` can't be set there."""
        try:
            vllm_arguments(layout.vllm)
        except ValueError as error:
            return [str(error)]
        return []

    def plan(self) -> VllmPlan:
        """Return vLLM in a plan."""
        return VllmPlan()


def _conversion(directory: Path) -> str:
    """Return what makes safetensors of a directory that has older weights alone."""
    if not any(directory.glob("pytorch_model*.bin")) or any(directory.glob("model*.safetensors*")):
        return ""
    made = directory.with_name(f"{directory.name}-safetensors")
    build = f'build_engine(EngineConfig(model="{directory}", device="cpu")).save_hf("{made}")'
    return (
        ". engines reads its .bin files and writes safetensors in the same dtypes: "
        f"python -c 'from engines import EngineConfig, build_engine; {build}', then --model {made}"
    )


def rollout_config(config: GrpoConfig) -> RolloutConfig:
    """Return the settings of the sampler that the configuration names, where it is vLLM.

    Raises:
        ValueError: experts are to be spread over copies of the model, and it samples on no CPU.
    """
    layout = config.cluster.rollout
    if layout.experts_over_copies and not samples_on_a_cpu(config):
        raise ValueError(f"{EXPERTS_OF_COPIES}: set --rollout.expert-parallel to tp = {layout.tp}")
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
            pipeline_parallel=layout.pp,
            data_parallel=layout.dp,
            nodes=layout.ray_nodes,
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
