"""Wheels hold what somebody can use, and each extra brings all that its modules import."""

import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from shipped import asked_for, at_once, distribution, files, imports, is_left_out, mentions, module_name, project

ROOT = Path(__file__).absolute().parents[1]
LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog", "runplan", "schedules"]
BESIDE_TESTS = {"pytest", "hypothesis"}

# Of `testing`, what pages tell others to use; what the apps run with (`--shrink` of a recipe on NPUs); beside it,
# what a module that is shipped needs is shipped.
PUBLIC = {
    "dyncp": ["dyncp.testing.megatron"],
    "engines": ["engines.fake_npu.build", "engines.fake_npu.path", "engines.fake_npu.site.torch_npu"],
    "rollout": ["rollout.testing", "rollout.testing.chat", "rollout.testing.model", "rollout.testing.pieces"],
    "seqpack": ["seqpack.testing"],
}
# Extra -> the modules that need it, by their paths in the package.
EXTRAS = {
    "chat_tools": {"data": ["dataset.py"], "templates": []},
    "dyncp": {"megatron": ["testing/megatron.py"]},
    "engines": {
        "images": ["media/image_reader.py"],
        "megatron": ["megatron/*", "proofs/megatron_*", "private_api.py"],
        "mbridge": ["megatron/external_mappings/*"],
    },
    "objectives": {},
    "rollout": {
        "native": ["native/*", "tools/escape_control_tokens.py", "testing/*"],
        "guided": ["native/scheduler/grammars.py", "structured_outputs.py"],
        "vllm": ["vllm/weights/shared_weights.py"],
        "openai": ["openai/*"],
        "gateway": ["gateway/*"],
        "ray": ["workers/ray_*"],
        "math": ["rewards/math_*"],
        "gymnasium": ["environments/gymnasium_games.py"],
        "openenv": ["environments/openenv_task.py"],
        "textarena": ["environments/textarena_games.py"],
        "mcp": ["tools/mcp_tools.py"],
        "verifiers": ["gateway/verifiers_agent.py"],
    },
    "runlog": {
        "report": ["report.py", "page.py"],
        "tensorboard": ["run.py", "trackers.py"],
        "wandb": ["trackers.py"],
        "mlflow": ["trackers.py"],
        "trackio": ["trackers.py"],
    },
    "runplan": {},
    "schedules": {},
    "seqpack": {"tensordict": ["batches/*"], "transformers": ["adapters/attention.py"]},
}
# Asked for by an extra, and imported by code elsewhere: transformers' templates, megatron-core's checkpoints, mbridge.
BY_OTHERS = {
    "templates": {"jinja2"},
    "megatron": {"psutil"},
    "mbridge": {"einops", "psutil", "megatron-core"},
    "gateway": {"tokenizers"},
    "guided": {"tokenizers"},  # by the native engine
    "verifiers": {"starlette", "uvicorn", "tokenizers"},  # by the gateway that it plays through
}
# No extra can bring these: what comes with a device, what runs in vLLM's own environment, and what a command names when
# it is asked for.
ELSEWHERE = {
    "chat_tools": {
        "__main__.py": {"transformers"},
        "collator.py": {"torch"},  # who trains has it
        "parsing/token_text.py": {"tokenizers"},  # where it gets a fast tokenizer
        "serving/vllm_plugin.py": {"vllm"},
        "conformance/*": {"transformers", "tokenizers", "trl"},
        "testing/*": {"transformers", "tokenizers", "trl"},
    },
    "engines": {
        "capability.py": {"megatron-core"},  # asks whether it is there
        "devices/npu.py": {"torch_npu"},
        "fast/*": {"triton", "flash_qla"},
        "megatron/gpu/*": {"triton"},
        "private_api.py": {"mbridge"},  # for what has the extra
        "proofs/checkpoint_matrix.py": {"objectives"},
    },
    "rollout": {
        "environments/processes/messages.py": {"pillow"},  # where a task has images
        "vllm/server/*": {"vllm", "packaging", "llguidance"},
        "private_api.py": {"ray"},
    },
    "seqpack": {"ops/fused.py": {"fla", "causal_conv1d", "flash_qla"}},
}


@cache
def modules(library: str) -> dict[str, Path]:
    """The modules that are shipped, by their paths in the package."""
    shipped, _ = files(ROOT, library)
    folder = ROOT / "libs" / library
    return {path.removeprefix(f"{library}/"): folder / path for path in sorted(shipped) if path.endswith(".py")}


def strangers(library: str, names: frozenset[str]) -> set[str]:
    """The distributions beside the library's own that imports are from."""
    found = {name.partition(".")[0] for name in names} - {library} - set(sys.stdlib_module_names)
    return {distribution(name) for name in found}


def owners(library: str, path: str) -> set[str]:
    """The extras that a module needs one of: those with the longest pattern that is its own."""
    found = {extra: [p for p in patterns if fnmatch(path, p)] for extra, patterns in EXTRAS[library].items()}
    lengths = {extra: max(map(len, patterns)) for extra, patterns in found.items() if patterns}
    return {extra for extra, length in lengths.items() if length == max(lengths.values())}


def brought_along(library: str, path: str) -> set[str]:
    """The modules of the library that are imported at once with one of them, by their paths."""
    found, todo = {path}, [path]
    paths = {module_name(f"{library}/{other}"): other for other in modules(library)}
    while todo:
        new = {paths[name] for name in at_once(modules(library)[todo.pop()]) & set(paths)} - found
        found |= new
        todo += new
    return found


def allowed(library: str, path: str) -> set[str]:
    """What a module may import beside what every install has."""
    found = [names for pattern, names in ELSEWHERE.get(library, {}).items() if fnmatch(path, pattern)]
    return set().union(*found)


@pytest.mark.parametrize(("library", "extra"), [(library, extra) for library in EXTRAS for extra in EXTRAS[library]])
def test_an_extra_brings_what_its_modules_import(library: str, extra: str) -> None:
    mine = [path for path in modules(library) if extra in owners(library, path)]
    assert mine or not EXTRAS[library][extra]
    used: set[str] = set()
    for path in mine:
        asked = set().union(*(asked_for(ROOT, library, owner) for owner in owners(library, path)))
        later = strangers(library, imports(modules(library)[path])) - allowed(library, path)
        assert later <= asked, f"{path}: {library}[{extra}] does not bring {later - asked}"
        used |= later
        for other in brought_along(library, path):
            first = strangers(library, at_once(modules(library)[other])) - allowed(library, other)
            assert first <= asked, f"{path} imports {other}: {library}[{extra}] does not bring {first - asked}"
    brought = asked_for(ROOT, library, extra) - asked_for(ROOT, library) - BY_OTHERS.get(extra, set())
    assert brought <= used, f"no module of {library}[{extra}] imports {brought - used}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_an_extra_all_other_modules_import_what_is_there(library: str) -> None:
    assert set(EXTRAS[library]) == set(project(ROOT, library)["project"].get("optional-dependencies", {}))
    for path, file in modules(library).items():
        if not owners(library, path):
            missing = strangers(library, imports(file)) - asked_for(ROOT, library) - allowed(library, path)
            assert not missing, (
                f"{library}/{path} imports {missing}, which no install brings: an extra, and EXTRAS here"
            )


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_shipped_is_used_and_finds_what_it_imports(library: str) -> None:
    shipped, left_out = files(ROOT, library)
    assert not [path for path in left_out if not (path.endswith("_test.py") or "testing" in path or ".jsonl" in path)]
    folder, here = ROOT / "libs" / library, {module_name(path): path for path in shipped if path.endswith(".py")}
    gone = {module_name(path) for path in left_out if path.endswith(".py")}
    for path in here.values():
        assert not strangers(library, imports(folder / path)) & BESIDE_TESTS, f"{path} is for tests: exclude it"
        missing = mentions(folder / path) & gone
        assert not missing, f"{path} imports {missing}, which pyproject.toml excludes"
    todo = [name for name in here if ".testing" not in name] + PUBLIC.get(library, [])
    used = set(todo)
    while todo:
        new = mentions(folder / here[todo.pop()]) & set(here) - used
        used |= new
        todo += new
    packages = {name.rpartition(".")[0] for name in used}
    unused = set(here) - used - packages
    assert not unused, f"nobody but tests can use {unused}: exclude it in pyproject.toml, or name it in PUBLIC here"


def test_patterns() -> None:
    patterns = ["*_test.py", "/a/testing/npu", "/a/testing/x.py"]
    for out in ("a/b_test.py", "a/testing/npu/c.h", "a/testing/npu/d/e.py", "a/testing/x.py"):
        assert is_left_out(out, patterns)
    for kept in ("a/b.py", "a/testing/npu.py", "a/testing/xx.py", "b/a/testing/x.py"):
        assert not is_left_out(kept, patterns)
