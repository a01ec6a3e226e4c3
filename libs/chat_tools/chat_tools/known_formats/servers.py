"""The names that vLLM and SGLang register for tool-call parsers, with the versions they were read from.

`benchmarks/server_names.py` reads the packages' sources again and says what has changed.
"""

from __future__ import annotations

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
# fmt: off
NAMES: dict[str, tuple[str, ...]] = {
    "vllm": (
        "apertus", "beam", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32",
        "deepseek_v4", "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45",
        "glm47", "granite", "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b", "hy_v3", "hy_v4",
        "inkling", "internlm", "jamba", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json",
        "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral",
        "muse", "muse_glimmer", "musespark1x", "olmo3", "openai", "phi4_mini_json", "plamo3", "poolside_v1",
        "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5", "step5", "xlam",
    ),
    "sglang": (
        "apertus2509", "beam", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4",
        "deepseekv41", "dots", "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47", "gpt-oss",
        "hermes", "hunyuan", "inkling", "interns1", "iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2",
        "ling3", "llama3", "mimo", "minicpm5", "minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige",
        "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "response_template", "spark25", "step3",
        "step3p5", "trinity",
    ),
}
# fmt: on
OTHER_FORMATS = {("sglang", "hunyuan"): "hy_v3"}
"""Names that mean another format there than the plain name does here."""

_CHECKPOINT = (
    "it stands for the response_template in the checkpoint's tokenizer_config.json, not for one format: "
    "detect_format(tokenizer) names the format that this template reads"
)
REFUSED = {
    "hf": _CHECKPOINT,
    "beam": _CHECKPOINT,
    "response_template": _CHECKPOINT,
    "inkling": "its messages have headers with a tool's name before the marker of a call, which no format reads here",
    "trinity": "its calls may stand within thinking, where no format reads calls here: 'hermes' reads those outside",
}
"""Names that are known and not read, with the reason."""


def plain_name(name: str) -> str:
    """Return a name without the server's before it (`sglang:hunyuan`), as this library means it.

    ValueError for a server that has no such name.
    """
    server, separator, rest = name.partition(":")
    if not separator or server not in NAMES:
        return name
    if rest not in NAMES[server]:
        known = ", ".join(NAMES[server])
        raise ValueError(f"{server} {VERSIONS[server]} has no tool-call parser {rest!r}; it has: {known}")
    return OTHER_FORMATS.get((server, rest), rest)
