"""`python -m engines.megatron.external_mappings.megatron_bridge WHEEL`: our names beside Megatron-Bridge 0.6.2's.

Its mapping tables are read off the wheel's source (they are dictionaries and calls with names in them), so that nothing
of it, nor Transformer Engine, has to be there. What differs is told by `FUSED`: Transformer Engine has a layer's norm
inside the linear after it, our layer specification (`engines.megatron.model.layer_spec`) beside it, as megatron-core's
own has. One value differs too, where no name does: it keeps the delta net's norm as its distance from one, we as it is
on disk.
`bridge_test` holds `PEER`, which is what this command found.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping

from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.weights.bridge import held_by
from engines.parallel.layout import ParallelLayout

Names = frozenset[str]
LAYER, STOCK = "decoder.layers.*.", "model.layers.*."
FUSED = {
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight": f"{LAYER}input_layernorm.weight",
    f"{LAYER}self_attention.in_proj.layer_norm_weight": f"{LAYER}input_layernorm.weight",
    f"{LAYER}mlp.linear_fc1.layer_norm_weight": f"{LAYER}pre_mlp_layernorm.weight",
}
FILES = {
    "Qwen3": ("qwen3_bridge.py", "mapping_registry"),
    "Qwen3 MoE": ("qwen3_moe_bridge.py", "mapping_registry"),
    "Qwen3.5": ("qwen35_bridge.py", "_get_dense_lm_mappings"),
    "Qwen3.5 MoE": ("qwen35_bridge.py", "_get_moe_lm_mappings"),
}
"""File of `megatron/bridge/models/qwen` with a model's table, and the function that makes it, by model."""


def _attention(*more: str) -> dict[str, Names]:
    at, stock = f"{LAYER}self_attention.", f"{STOCK}self_attn."
    out = {
        "embedding.word_embeddings.weight": frozenset({"model.embed_tokens.weight"}),
        "output_layer.weight": frozenset({"lm_head.weight"}),
        "decoder.final_layernorm.weight": frozenset({"model.norm.weight"}),
        f"{LAYER}input_layernorm.weight": frozenset({f"{STOCK}input_layernorm.weight"}),
        f"{LAYER}pre_mlp_layernorm.weight": frozenset({f"{STOCK}post_attention_layernorm.weight"}),
        f"{at}linear_qkv.weight": frozenset({f"{stock}{x}_proj.weight" for x in "qkv"}),
        f"{at}linear_proj.weight": frozenset({f"{stock}o_proj.weight"}),
        f"{at}q_layernorm.weight": frozenset({f"{stock}q_norm.weight"}),
        f"{at}k_layernorm.weight": frozenset({f"{stock}k_norm.weight"}),
    }
    if "delta" in more:
        delta = f"{STOCK}linear_attn."
        out |= {
            f"{at}{x}": frozenset({f"{delta}{x}"}) for x in ("conv1d.weight", "out_proj.weight", "A_log", "dt_bias")
        }
        out[f"{at}in_proj.weight"] = frozenset({f"{delta}in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")})
        out[f"{at}out_norm.weight"] = frozenset({f"{delta}norm.weight"})
    return out


def _mlp(to: str, stock: str) -> dict[str, Names]:
    return {
        f"{LAYER}mlp.{to}linear_fc1.weight": frozenset({f"{STOCK}mlp.{stock}{x}_proj.weight" for x in ("gate", "up")}),
        f"{LAYER}mlp.{to}linear_fc2.weight": frozenset({f"{STOCK}mlp.{stock}down_proj.weight"}),
    }


_ROUTED = _mlp("experts.local_experts.*.", "experts.*.") | {
    f"{LAYER}mlp.router.weight": frozenset({f"{STOCK}mlp.gate.weight"})
}
_SHARED = _mlp("shared_experts.", "shared_expert.") | {
    f"{LAYER}mlp.shared_experts.gate_weight": frozenset({f"{STOCK}mlp.shared_expert_gate.weight"})
}
PEER: Mapping[str, Mapping[str, Names]] = {
    "Qwen3": _attention() | _mlp("", ""),
    "Qwen3 MoE": _attention() | _ROUTED,
    "Qwen3.5": _attention("delta") | _mlp("", ""),
    "Qwen3.5 MoE": _attention("delta") | _ROUTED | _SHARED,
}
"""Transformers tensors of each parameter of Megatron-Bridge's, with numbers as `*`, by model."""


def our_names(config: object) -> dict[str, Names]:
    """Return the transformers names of each parameter by our bridge; experts by their names on disk, where each has
    tensors."""
    sizes = ModelSizes.of(config)
    split = ((len(sizes.layer_types),),)
    table: dict[str, Names] = {}
    for mapped in held_by(sizes, ParallelLayout(), 0, split):
        stock = {re.sub(r"\b\d+\b", "*", piece.tensor) for piece in mapped.pieces}
        one = {re.sub(r"experts\.down_proj$", "experts.*.down_proj.weight", name) for name in stock}
        for name in [name for name in one if name.endswith("experts.gate_up_proj")]:
            one.remove(name)
            one |= {name.replace("experts.gate_up_proj", f"experts.*.{x}_proj.weight") for x in ("gate", "up")}
        name = re.sub(r"\b\d+\b", "*", mapped.name)
        for tensor, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):  # one tensor of all
            name = name.replace(f"experts.{tensor}", f"experts.local_experts.*.{linear}.weight")
        table[name] = frozenset(one)
    return table


def peer_names(source: str, function: str) -> dict[str, Names]:
    """Read a table from the source of one of Megatron-Bridge's files."""
    tree = ast.parse(source)
    table: dict[str, Names] = {}
    wanted = (function, "_moe_routed_expert_mappings")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name not in wanted:
            continue
        if node.name == wanted[1] and "moe" not in function:
            continue
        named: dict[str, str] = {}
        for one in ast.walk(node):  # what is not under an `if` comes first: experts with tensors of their own
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and (text := _text(one.value, {})):
                named.setdefault(one.targets[0].id, text)
        for names in _entries(node, named):
            own = [FUSED.get(name, name) for name in names if _is_ours(name)]
            if own:
                table.setdefault(own[0], frozenset(name for name in names if not _is_ours(name)))
    return {name: stock for name, stock in table.items() if not name.endswith("weight*")}  # grouped experts


def _entries(node: ast.AST, named: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the names in each entry of a dictionary, and in each call."""
    for one in ast.walk(node):
        if isinstance(one, ast.Dict):
            for key, value in zip(one.keys, one.values, strict=True):
                yield [text for part in (key, value) if part is not None and (text := _text(part, named))]
        elif isinstance(one, ast.Call):
            parts = [*one.args, *(keyword.value for keyword in one.keywords)]
            yield [text for part in parts if (text := _text(part, named))]


def _is_ours(name: str) -> bool:
    return name.startswith(("decoder.", "embedding.", "output_layer."))


def _text(node: ast.AST, named: Mapping[str, str]) -> str | None:
    """Return the name that a node stands for, with the prefixes of a text model; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if not isinstance(node, ast.JoinedStr):
        return None
    prefixes = {"hf_prefix": "model.", "megatron_prefix": ""}
    parts = [
        _text(part, {}) if isinstance(part, ast.Constant) else prefixes.get(getattr(part.value, "id", ""), "?")
        for part in node.values
        if isinstance(part, (ast.Constant, ast.FormattedValue))
    ]
    return "".join(part or "" for part in parts)


def main(wheel: str) -> int:
    """Compare the names, and print what differs; return 1 where something does."""
    wrong = 0
    with zipfile.ZipFile(wheel) as archive:
        for model, (file, function) in FILES.items():
            source = archive.read(f"megatron/bridge/models/qwen/{file}").decode()
            table = {name: stock for name, stock in peer_names(source, function).items() if "mtp" not in name}
            differs = [name for name in table.keys() | PEER[model].keys() if table.get(name) != PEER[model].get(name)]
            print(f"{model}: {len(table)} parameters, {len(differs)} differ {sorted(differs)}")
            wrong += len(differs)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
