"""Engine arguments of vLLM from the command line: on their way to it, and held to what it takes before a run begins."""

import stat
from dataclasses import fields, replace
from pathlib import Path

import pytest

from apps.common.cli.flags import flag
from apps.common.cluster import Cluster, RolloutLayout
from apps.common.vllm_arguments import INSTEAD, vllm_arguments
from apps.grpo.config import GrpoConfig
from apps.grpo.main import configure
from apps.grpo.preflight import check_machine
from apps.grpo.sampling.vllm import rollout_config
from apps.grpo.testing.recipe import RECIPE
from rollout.vllm.settings.arguments import OWNED

LAYOUT = RolloutLayout("vllm", dtype="bfloat16", max_requests=8, vllm=("block_size=32", "kv_cache_dtype=auto"))


def with_layout(layout: RolloutLayout) -> GrpoConfig:
    return replace(RECIPE.config, cluster=Cluster(rollout=layout))


def test_the_sampler_gets_what_the_flags_say() -> None:
    words = "--rollout.vllm block_size=32 kv_cache_dtype=auto --rollout.dtype bfloat16"
    config = configure(["--recipe", "quickstart-vllm", "--rollout.max-requests", "8", *words.split()])
    assert config.cluster.rollout == LAYOUT
    found = rollout_config(config)
    assert found.max_batch == 8
    assert (found.vllm.dtype, found.vllm.arguments) == ("bfloat16", {"block_size": 32, "kv_cache_dtype": "auto"})
    sizes = rollout_config(with_layout(RolloutLayout("vllm", tp=2, dp=4, ep=2, chunked_prefill=True))).vllm
    assert (sizes.tensor_parallel, sizes.data_parallel, sizes.expert_parallel) == (2, 4, True)
    assert (sizes.split_prompts, sizes.prefix_cache, sizes.drop_seeds) == (True, False, True)
    assert not sizes.experts_over_copies
    over_copies = with_layout(RolloutLayout("vllm", tp=2, dp=4, ep=8))
    assert rollout_config(over_copies).vllm.experts_over_copies
    on_cuda = replace(over_copies, engine=replace(over_copies.engine, device="cuda"))
    with pytest.raises(ValueError, match=r"ran on a CPU alone: .*rollout.device cpu.*expert-parallel to tp = 2"):
        rollout_config(on_cuda)
    beside = replace(on_cuda, cluster=Cluster(rollout=replace(over_copies.cluster.rollout, device="cpu")))
    assert rollout_config(beside).vllm.experts_over_copies
    assert (found.vllm.split_prompts, found.vllm.drop_seeds, found.vllm.memory_share) == (False, False, None)
    device = rollout_config(with_layout(RolloutLayout("vllm", memory_share=0.5, cuda_graph_sizes=(2, 1)))).vllm
    assert (device.memory_share, device.graph_sizes) == (0.5, (2, 1))
    cuda = replace(RECIPE.config, engine=replace(RECIPE.config.engine, device="cuda"))
    assert rollout_config(cuda).vllm.drop_seeds


def test_an_argument_that_the_interpreters_vllm_lacks_is_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter here says what it takes, as one with vLLM does (libs/rollout's process_test)."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho noise\necho '["9.9", ["block_size", "kv_cache_dtype", "tokenizer"]]'\n""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(python))
    check_machine(with_layout(LAYOUT))
    for word, text in (
        ("kv_cache_dtipe=fp8", "vLLM 9.9 has no engine argument 'kv_cache_dtipe'; did you mean kv_cache_dtype"),
        ("tokeniser=no", "no engine argument 'tokeniser'$"),  # the near match is refused itself
    ):
        with pytest.raises(ValueError, match=f"--rollout.vllm: .*{text}"):
            check_machine(with_layout(replace(LAYOUT, vllm=(word,))))
    python.write_text("#!/bin/sh\necho 'no module vllm' >&2\nexit 1\n")
    with pytest.raises(ValueError, match="can't import vLLM; its last words:\nno module vllm"):
        check_machine(with_layout(LAYOUT))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("model=there",), "can't hold model: use --model"),
        (("tensor_parallel_size=2",), "use --rollout.tensor-parallel"),
        (("pipeline_parallel_size=2",), "use --rollout.pipeline-parallel"),
    ],
)
def test_an_argument_with_a_flag_of_its_own_is_refused_where_it_is_set(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RolloutLayout("vllm", vllm=words)


def test_every_argument_that_the_library_owns_is_refused_with_what_the_app_has_instead() -> None:
    for name in OWNED | INSTEAD:
        with pytest.raises(ValueError, match=f"can't hold {name}: ") as refusal:
            vllm_arguments([f"{name}=1"])
        assert "Config" not in str(refusal.value)
    flags = {text.removeprefix("use --rollout.") for text in INSTEAD.values() if "--rollout" in text}
    assert flags <= {flag(f"cluster.rollout.{item.name}").removeprefix("--rollout.") for item in fields(RolloutLayout)}
    assert vllm_arguments(["block_size=32", "a=b=c", "b=[1]"]) == {"block_size": 32, "a": "b=c", "b": [1]}
