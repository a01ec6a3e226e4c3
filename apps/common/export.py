"""The Hugging Face directory that a run leaves behind."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.ranks import rank_and_world
from engines import TrainEngine


def save_export(engine: TrainEngine, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Path:
    """Weights, configuration, tokenizer and chat template, as AutoModelForCausalLM and AutoTokenizer read them."""
    engine.save_hf(str(directory))
    if rank_and_world()[0] == 0:
        tokenizer.save_pretrained(directory)
    return directory
