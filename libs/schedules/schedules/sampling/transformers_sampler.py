"""Source of native samplers over a model directory of transformers."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import Chat, NativeEngine, RolloutEngine


@dataclass(frozen=True)
class TransformersSampler:
    """Native engine over a causal language model, on a CPU (`SamplerSource`); weights have the module's names."""

    model: Path
    """A Hugging Face directory with the weights that the run begins with, and its tokenizer."""
    threads: int = 1
    module_names: bool = True

    def prepare_process(self) -> None:
        """Set the threads of a process that samples."""
        torch.set_num_threads(self.threads)

    def engine(self, version: int) -> NativeEngine:
        """Return an engine with the directory's weights as number `version`."""
        return NativeEngine(AutoModelForCausalLM.from_pretrained(self.model), version=version)

    def chat(self) -> Chat:
        """Return the chat format of the directory's tokenizer."""
        return Chat(AutoTokenizer.from_pretrained(self.model))

    def dtype(self, engine: RolloutEngine) -> str:
        """Return what the module computes in."""
        assert isinstance(engine, NativeEngine)
        return str(engine.dtype).removeprefix("torch.")
