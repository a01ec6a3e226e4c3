"""The decision whether the fast path can run, before it is switched on: Supported, or Unsupported with the reason."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.dtypes import compute_dtype
from engines.families.registry import family_of
from engines.fast.delta_rule import has_delta_nets
from engines.fast.settings import replication_refusal, settings_refusal, traced_settings_refusal
from engines.fast.triton_kernels import has_triton

LAYERS = Supported("fast/cuda_test.py::test_compiled_layers_equal_plain_ones")
TRACED = Supported("fast/traced_layers_test.py::test_equals_plain_packed_layers")
"""Stock layers compiled as they are (`engines.fast.traced_layers`)."""
KERNELS = ("flash_qla", "triton")
"""The first is of delta nets alone."""
FAMILIES = ("qwen3_5", "qwen3", "qwen3_5_moe", "qwen3_moe")
Refusal = Callable[[Any], str | None]
"""Why the layers of a model's config cannot be compiled as they are; None where they can."""
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


def compiled_layers(
    config: EngineConfig, model_config: Any, device: torch.device, refusal: Refusal = lambda _: "not compared"
) -> Supported | Unsupported:
    """Return whether decoder layers and head can run as compiled functions over fused kernels; else, where it is asked
    for, whether stock layers can be compiled as they are: `refusal` compares them (`engines.prove.traced`)."""
    machine, asked = Machine.of(config, device), config.compile == "on"
    reason = settings_refusal(config) or model_refusal(model_config)
    if reason is None and not asked and family_of(model_config).routed:
        reason = "layers with experts are compiled where compile='on' asks for it"
    reason = reason or machine_refusal(machine, model_config.get_text_config())
    if reason is None:
        return LAYERS
    if not asked:
        return Unsupported(reason)
    other = traced_settings_refusal(config) or traced_machine_refusal(machine) or refusal(model_config)
    return TRACED if other is None else Unsupported(reason if other == reason else f"{reason}; {other}")


def replicated_weights(config: EngineConfig, device: torch.device) -> Supported | Unsupported:
    """Return whether every rank can hold the weights whole, with exact values and moments sharded."""
    if reason := replication_refusal(config):
        return Unsupported(reason)
    if device.type == "cuda" and not has_triton():
        return Unsupported("the update is a Triton kernel, and Triton is not installed")
    return REPLICATED


def use_compiled_layers(
    config: EngineConfig, model_config: Any, device: torch.device, refusal: Refusal
) -> Supported | Unsupported:
    """Return whether `config.compile` compiles the layers here; ValueError where it is "on" and cannot."""
    if config.compile == "off":
        return Unsupported("compile='off'")
    answer = compiled_layers(config, model_config, device, refusal)
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
        return f"the layers of {family.name} are compiled where compile='on' asks for it"
    if text.attention_bias:
        return "attention with biases is not written as a function"
    kinds = getattr(text, "layer_types", None)  # Qwen3 MoE has none, and one window for all
    if "sliding_attention" in kinds if kinds else text.sliding_window:
        return "attention in windows is not written as a function"
    if text.hidden_act != "silu":
        return f"the activation is {text.hidden_act}, the functions are written for silu"
    return None


def traced_machine_refusal(machine: Machine) -> str | None:
    """Return why this machine cannot compile layers as they are."""
    if machine.kind != "cuda":
        return "on a CPU the plain layers are as fast"
    if machine.capability < 8:
        return "compiled layers attend by flash attention, for compute capability 8.0 and newer"
    return "triton is not installed" if "triton" in machine.missing else None


def machine_refusal(machine: Machine, text: Any) -> str | None:
    """Return why this machine has no fused kernels for layers of these sizes (`text`: a text model's configuration)."""
    if machine.kind != "cuda":
        return "on a CPU the plain layers are as fast"
    if machine.dtype != torch.bfloat16:
        return "the fused kernels compute in bfloat16"
    delta_nets = has_delta_nets(text)
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
    inner = getattr(text, "moe_intermediate_size", None)
    if inner and (inner % 8 or text.hidden_size % 8):
        return f"grouped products have sizes that are multiples of 8, the model {inner} and {text.hidden_size}"
    return None
