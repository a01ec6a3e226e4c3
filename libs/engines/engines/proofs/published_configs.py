"""Published configs of families that runs are likely to name: what differs from transformers' defaults, and verdicts.

Each is proven in small, by a test and by `python -m engines prove --published`, which writes the figures of
docs/certificates.md: packed rows equal stock transformers, or it is refused with the missing operation.
Values are spelled as in the published config.json; fields that no modelling code reads are left out, and compression
too (a compressed checkpoint is refused by that name). Sources are named without the model's own page: copies of its
config.json in `aiconfigurator-core` 0.12.0 (`model_configs/`), in other public repositories, or the defaults of
transformers' config class, which names the checkpoint that they are from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from engines.prove.proof import prove

_COPIES = "aiconfigurator-core 0.12.0, model_configs/{}_config.json"
_DEFAULTS = "defaults of transformers' config class, which names this checkpoint"


@dataclass(frozen=True)
class Published:
    """One published checkpoint's config."""

    name: str
    model_type: str
    """Of its text part; of the whole where that is no causal language model alone."""
    source: str
    values: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    """Pattern of what a proof says against it; None where packed rows are equal."""

    def measured(self) -> dict[str, str]:
        """Prove it; return what a table says of it."""
        certificate = prove(self.config())
        numbers = {"log-probs": f"{certificate.log_probs:.0e}", "gradients": f"{certificate.gradients:.0e}"}
        verdict = "equal" if certificate.holds else "; ".join(certificate.problems)
        fields = ", ".join(certificate.not_exercised) or "-"
        return {"verdict": verdict, **numbers, "not exercised": fields, "config": self.source}

    def config(self) -> Any:
        """Return the config."""
        return AutoConfig.for_model(self.model_type, **self.values)


def _copy(name: str) -> str:
    return _COPIES.format(name.replace("/", "--"))


def _yarn(**values: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, **values}


_DEEPSEEK = _yarn(factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
_QWEN3_6 = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_PHI4_LONG = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]

PUBLISHED = (
    Published(
        "openai/gpt-oss-20b",
        "gpt_oss",
        _copy("openai/gpt-oss-20b"),
        {
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "rope_theta": 150000,
            "rope_scaling": _yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False),
        },
    ),
    Published(
        "google/gemma-3-27b-it",
        "gemma3_text",
        "the 27B text config that TensorRT-LLM and PyTorch/XLA keep for tests, equal in both",
        {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    ),
    Published(
        "google/gemma-4-26B-A4B",
        "gemma4_text",
        _copy("google/gemma-4-26B-A4B"),
        {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_key_value_heads": 8,
            "sliding_window": 1024,
            "top_k_experts": 8,
            "use_bidirectional_attention": "vision",
        },
    ),
    Published(
        "zai-org/GLM-4.5-Air",
        "glm4_moe",
        "config that a public Megatron-to-Hugging-Face converter writes for the 106B model",
        {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_attention_heads": 96,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
        },
    ),
    Published(
        "zai-org/GLM-5",
        "glm_moe_dsa",
        _copy("zai-org/GLM-5"),
        {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    ),
    Published(
        "deepseek-ai/DeepSeek-V3",
        "deepseek_v3",
        _copy("deepseek-ai/DeepSeek-V3"),
        {"max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": _DEEPSEEK},
    ),
    Published(
        "deepseek-ai/DeepSeek-V3.2",
        "deepseek_v32",
        _copy("deepseek-ai/DeepSeek-V3.2"),
        {"rope_theta": 10000, "rope_scaling": _DEEPSEEK},
    ),
    Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "kimi_linear",
        _DEFAULTS,
        {
            "linear_attn_config": {
                "full_attn_layers": _KIMI_FULL,
                "kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI_FULL],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            }
        },
    ),
    Published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h",
        _copy("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        {
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856,
            "mamba_num_heads": 64,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 52,
            "num_key_value_heads": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    Published(
        "nvidia/Nemotron-H-56B-Base-8K",
        "nemotron_h",
        _copy("nvidia/Nemotron-H-56B-Base-8K"),
        {
            "hidden_size": 8192,
            "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
            "intermediate_size": 32768,
            "mamba_num_heads": 256,
            "max_position_embeddings": 8192,
            "num_attention_heads": 64,
            "num_hidden_layers": 118,
            "ssm_state_size": 256,
        },
    ),
    Published(
        "mistralai/Ministral-3-8B-Instruct-2512",
        "ministral3",
        "copy of its config.json in the repository YellowPerson792/ByteCaption, 0f46888c",
        {
            "rope_parameters": _yarn(
                factor=16.0,
                llama_4_scaling_beta=0.1,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=16384,
                rope_theta=1000000.0,
            )
        },
    ),
    Published(
        "Qwen/Qwen3-VL-8B-Instruct",
        "qwen3_vl",
        _copy("Qwen/Qwen3-VL-8B-Instruct"),
        {
            "text_config": {
                "intermediate_size": 12288,
                "max_position_embeddings": 262144,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rope_theta": 5000000,
            }
        },
    ),
    Published(
        "Qwen/Qwen3.6-27B",
        "qwen3_5_text",
        _copy("nvidia/Qwen3.6-27B-NVFP4"),
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
            "max_position_embeddings": 262144,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "rope_parameters": _QWEN3_6,
        },
    ),
    Published(
        "Qwen/Qwen3.6-35B-A3B",
        "qwen3_5_moe_text",
        _copy("nvidia/Qwen3.6-35B-A3B-NVFP4"),
        {"max_position_embeddings": 262144, "rope_parameters": _QWEN3_6},
    ),
    Published(
        "HuggingFaceTB/SmolLM3-3B",
        "smollm3",
        _DEFAULTS,
        {"rope_theta": 5000000.0, "tie_word_embeddings": True},
    ),
    Published(
        "microsoft/Phi-4-mini-instruct",
        "phi3",
        "factors and fields of its config.json in public tests of other engines",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _PHI4_LONG},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    Published(
        "allenai/Olmo-3-7B-Instruct",
        "olmo3",
        "its fields in a public note on accessible Olmo 3 configs and in allenai's Molmo code, equal in both",
        {
            "max_position_embeddings": 65536,
            "rope_theta": 500000,
            "rope_scaling": _yarn(
                attention_factor=1.2079441541679836, factor=8.0, original_max_position_embeddings=8192
            ),
            "sliding_window": 4096,
            "vocab_size": 100278,
        },
    ),
    Published(
        "ibm-granite/granite-4.0-h-small",
        "granitemoehybrid",
        "its fields in a public note on hybrid models; layers are 36 of Mamba and 4 of attention",
        {
            "hidden_size": 4096,
            "intermediate_size": 768,
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
            "mamba_d_conv": 4,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "num_attention_heads": 32,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "shared_intermediate_size": 1536,
            "tie_word_embeddings": True,
            "vocab_size": 100352,
        },
    ),
    Published(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "llama4_text",
        _copy("meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        {
            "max_position_embeddings": 10485760,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        },
    ),
    Published(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "llama4_text",
        _copy("meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
        {
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_theta": 500000.0,
            "use_qk_norm": False,
        },
    ),
)


def measure(docs: Path, names: Sequence[str], date: str) -> int:
    """Prove published configs, all of them or those whose names have one of these words, and print what a table says of
    them; all are written into a file of `docs`. Return 1 where one is not as it stands in `PUBLISHED`."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    values, wrong = {}, False
    for one in PUBLISHED:
        if not names or any(name in one.name for name in names):
            values[one.name] = one.measured()
            wrong = wrong or (values[one.name]["verdict"] == "equal") == (one.refused is not None)
            print(f"{one.name}: {json.dumps(values[one.name])}", flush=True)
    if not names:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        run = {"date": date, "device": "CPU", "versions": versions, "values": values}
        what = "Published configs in small against stock transformers, in float64: largest differences of packed rows."
        figures = {"what": what, "command": "python -m engines prove --published", "runs": [run]}
        path = docs / "benchmarks" / "published_configs.json"
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(wrong)
