"""The Hugging Face directory that a run leaves behind."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.run.ranks import rank_and_world
from engines import Engine, TrainEngine, save_adapter


def save_export(engine: TrainEngine, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Path:
    """Return weights, configuration, tokenizer and chat template, as AutoModelForCausalLM and AutoTokenizer read them.

    Adapters are part of the weights there, and alone, as peft reads them, in the folder "adapter" beside it.
    """
    engine.save_hf(str(directory))
    if isinstance(engine, Engine) and engine.config.lora.rank:
        save_adapter(engine, directory.with_name("adapter"))
    if rank_and_world()[0] == 0:
        tokenizer.save_pretrained(directory)
    return directory
