"""The decision whether the fast path can run, before it is switched on: Supported, or Unsupported with the reason."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.dtypes import compute_dtype
from engines.families.registry import family_of
from engines.fast.settings import replication_refusal, settings_refusal
from engines.fast.triton_kernels import has_triton

LAYERS = Supported("fast/cuda_test.py::test_compiled_layers_equal_plain_ones")
KERNELS = ("flash_qla", "triton")
"""The first is of delta nets alone."""
FAMILIES = ("qwen3_5", "qwen3")
REPLICATED = Supported("replicated/replicated_two_test.py::test_two_ranks_equal_one")


@dataclass(frozen=True)
class Machine:
    """The properties of a device that the decision uses: torch's name of its kind, the compute dtype, the first number
    of its compute capability, and kernels that are not installed."""

    kind: str
    dtype: torch.dtype = torch.float32
    capability: int = 0
    missing: tuple[str, ...] = ()

    @staticmethod
    def of(config: EngineConfig, device: torch.device) -> "Machine":
        """Read a device's properties; for other kinds than CUDA only the kind."""
        if device.type != "cuda":
            return Machine(device.type)
        missing = tuple(name for name in KERNELS if find_spec(name) is None)
        return Machine("cuda", compute_dtype(config, device), torch.cuda.get_device_capability(device)[0], missing)


def compiled_layers(config: EngineConfig, model_config: Any, device: torch.device) -> Supported | Unsupported:
    """Return whether decoder layers and head can run as compiled functions over fused kernels."""
    reason = settings_refusal(config) or model_refusal(model_config)
    reason = reason or machine_refusal(Machine.of(config, device), model_config.get_text_config())
    return LAYERS if reason is None else Unsupported(reason)


def replicated_weights(config: EngineConfig, device: torch.device) -> Supported | Unsupported:
    """Return whether every rank can hold the weights whole, with exact values and moments sharded."""
    if reason := replication_refusal(config):
        return Unsupported(reason)
    if device.type == "cuda" and not has_triton():
        return Unsupported("the update is a Triton kernel, and Triton is not installed")
    return REPLICATED


def use_compiled_layers(config: EngineConfig, model_config: Any, device: torch.device) -> Supported | Unsupported:
    """Return whether `config.compile` compiles the layers here; ValueError where it is "on" and cannot."""
    if config.compile == "off":
        return Unsupported("compile='off'")
    answer = compiled_layers(config, model_config, device)
    if config.compile == "on" and isinstance(answer, Unsupported):
        raise ValueError(f"compile='on' cannot be had: {answer.reason}; use compile='auto'")
    return answer


def use_replicated_weights(config: EngineConfig, device: torch.device, ranks: int) -> Supported | Unsupported:
    """Return whether `config.weights` replicates here: "auto" does on one GPU alone. ValueError where it cannot."""
    if config.weights == "sharded":
        return Unsupported("weights='sharded'")
    answer = replicated_weights(config, device)
    if config.weights == "replicated":
        if isinstance(answer, Unsupported):
            raise ValueError(f"weights='replicated' cannot be had: {answer.reason}")
        return answer
    if device.type != "cuda":
        return Unsupported("one process on a CPU has the weights whole, and several share them")
    if ranks > 1:
        return Unsupported("several ranks hold more when they share the weights: set weights='replicated' if they fit")
    return answer


def model_refusal(model_config: Any) -> str | None:
    """Return why layers of this model have no compiled functions; None where they have."""
    family, text = family_of(model_config), model_config.get_text_config()
    if family.name not in FAMILIES:
        return f"only the layers of Qwen3.5 and Qwen3 (dense) are written as functions, not those of {family.name}"
    if text.attention_bias:
        return "attention with biases is not written as a function"
    if "sliding_attention" in text.layer_types:
        return "attention in windows is not written as a function"
    if text.hidden_act != "silu":
        return f"the activation is {text.hidden_act}, the functions are written for silu"
    return None


def machine_refusal(machine: Machine, text: Any) -> str | None:
    """Return why this machine has no fused kernels for layers of these sizes (`text`: a text model's configuration)."""
    if machine.kind != "cuda":
        return "on a CPU the plain layers are as fast"
    if machine.dtype != torch.bfloat16:
        return "the fused kernels compute in bfloat16"
    delta_nets = "linear_attention" in text.layer_types
    if machine.capability != 9 and delta_nets:
        return "the delta rule's kernels are FlashQLA's for Hopper (compute capability 9.0)"
    if machine.capability != 9:
        return "compiled layers ran on no GPU but Hopper's (compute capability 9.0)"
    missing = [name for name in machine.missing if delta_nets or name != "flash_qla"]
    if missing:
        return f"{missing[0].replace('_', '-')} is not installed"
    if delta_nets and (sizes := {text.linear_key_head_dim, text.linear_value_head_dim}) != {128}:
        return f"FlashQLA's kernels have heads of 128 features, the model {sorted(sizes)}"
    if text.head_dim > 256 or text.head_dim % 8:
        return f"flash attention has heads of at most 256 features, a multiple of 8; the model {text.head_dim}"
    return None
