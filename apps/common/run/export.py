"""The Hugging Face directory that a run exports."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.run.full_disk import writing
from engines import Engine, TrainEngine, save_adapter
from schedules.runtime.collectives import rank_and_world


def save_export(engine: TrainEngine, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Path:
    """Write weights, configuration, tokenizer and template as AutoModelForCausalLM reads them; return the path.

    Adapters are part of the weights there, and alone, as peft reads them, in the folder "adapter" beside it.
    """
    with writing("the export", directory.parent):
        engine.save_hf(str(directory))
        if isinstance(engine, Engine) and engine.config.lora.rank:
            save_adapter(engine, directory.with_name("adapter"))
        if rank_and_world()[0] == 0:
            tokenizer.save_pretrained(directory)
    return directory
