"""Words of `python -m engines prove` for an engine's options."""

import pytest

from engines import EngineConfig, LoraConfig
from engines.prove_command import parse_engine_options


def test_words_give_the_settings_that_they_name() -> None:
    words = (
        "--engine.expert-parallel 8 --engine.optimizer-on-host --engine.reshard-after-forward false "
        "--engine.device cpu --engine.lora.rank 4 --engine.lora.targets q_proj v_proj --engine.betas 0.9 0.95 "
        "--engine.learning-rates a=1 b=2"
    )
    assert parse_engine_options(words.split()) == EngineConfig(
        expert_parallel=8, optimizer_on_host=True, reshard_after_forward=False, device="cpu", betas=(0.9, 0.95),
        lora=LoraConfig(rank=4, targets=("q_proj", "v_proj")), learning_rates=("a=1", "b=2"), prove="always",
    )  # fmt: skip
    assert parse_engine_options(()) == EngineConfig(prove="always")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("8", "prove takes --engine.NAME VALUE, got '8'"),
        ("--tensor-parallel 2", "got '--tensor-parallel'"),
        (
            "--engine.tensor-paralel 2",
            r"--engine\.tensor_paralel is no setting of .*, did you mean tensor_parallel",
        ),
        ("--engine.lora 2", r"--engine\.lora is no setting of EngineConfig"),
        ("--engine.lora.size 2", r"--engine\.lora\.size is no setting of LoraConfig"),
        ("--engine.expert-parallel two", "expert_parallel must be int, got 'two'"),
    ],
)
def test_other_words_are_refused(words: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_engine_options(words.split())
