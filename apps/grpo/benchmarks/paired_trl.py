"""The grpo app's quickstarts in TRL's GRPOTrainer, with every setting that both have made equal.

Equal: the model and its tokens, prompts and their order, steps, prompts a step, answers a prompt, tokens a turn, turns,
temperature, AdamW and its betas, epsilon and weight decay, the rate of each step, the clipped norm, one update a step
(so that no ratio is clipped), the mean over the step's tokens, no KL, advantages over a group's sample deviation,
float32, the reward, 0 for an answer that was cut off, and the calculator. TRL's own: it adds 1e-4 to that deviation (we
1e-6), a call that can't be read is an answer (we say so to the model), and an image token can't be sampled.
"""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOConfig as TrlConfig
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_5_template
from trl.data_utils import prepare_multimodal_messages

from apps.common.data.answers import exact_reward
from apps.common.data.tokenizer import load_tokenizer
from apps.common.tasks import Tasks
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.chat import chat_of
from apps.quickstart.tokenizer import TURN_END
from engines import EngineConfig
from engines.execution.lr_schedule import learning_rate
from rollout.tools.arithmetic import evaluate, show


class NoVideos:
    """In the place of a video processor, which needs torchvision."""

    merge_size, temporal_patch_size = 2, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")


class PictureProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """Qwen3-VL's processor, without its check of the video part."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Take `NoVideos` as it is."""
        return (
            NoVideos
            if isinstance(argument, NoVideos)
            else super().check_argument_for_proper_class(argument_name, argument)
        )


def calculator(expression: str) -> str:
    """Return the value of an arithmetic expression.

    Args:
        expression: For example (3+4)*5

    Returns:
        The value.
    """
    return show(evaluate(expression))


def reward_of(tokenizer: PreTrainedTokenizerBase, with_tool: bool) -> Callable[..., list[float]]:
    """Return the recipes' reward: 1 for the right number in a box, after a call that worked where there is a tool."""
    end = tokenizer.convert_tokens_to_ids(TURN_END)

    def exact(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        return [
            score(messages, right) if ids[-1] == end else 0.0
            for messages, ids, right in zip(completions, completion_ids, answer, strict=True)
        ]

    def score(messages: list[dict[str, Any]], right: str) -> float:
        worked = any(m["role"] == "tool" and not m["content"].startswith("{'error'") for m in messages)
        if messages[-1].get("tool_calls") or messages[-1]["role"] == "tool" or (with_tool and not worked):
            return 0.0
        return exact_reward(messages[-1]["content"], right)

    return exact


def rows_of(config: GrpoConfig, tasks: Tasks) -> Dataset:
    """Return the prompts of all steps, in order."""
    rows = []
    for step in range(config.steps):
        for task in tasks.tasks(step, config.prompts_per_step):
            problem = task.data["problem"]
            row = {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.answer}
            if config.engine.vision != "off":
                row["image"] = Image.open(io.BytesIO(base64.b64decode(problem.image.partition(",")[2])))
            rows.append(row)
    return Dataset.from_list(rows)


def optimizer_of(model: torch.nn.Module, engine: EngineConfig) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW and the learning rates of our engine's steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=engine.lr, betas=engine.betas, eps=engine.eps, weight_decay=engine.weight_decay
    )
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate(engine, step) / engine.lr)


def trainer_of(config: GrpoConfig, tasks: Tasks, model: Path, folder: Path) -> GRPOTrainer:
    """Return TRL's trainer of a configuration, at the weights of the directory `model`."""
    sees, with_tool = config.engine.vision != "off", config.max_turns > 1
    tokenizer = load_tokenizer(model)
    tokenizer.response_template = qwen3_5_template if with_tool else None
    processor: PreTrainedTokenizerBase | ProcessorMixin = tokenizer
    kind = transformers.Qwen3_5ForCausalLM
    if sees:
        pictures = Qwen2VLImageProcessorPil.from_pretrained(model)
        template = tokenizer.chat_template
        processor = PictureProcessor(pictures, tokenizer, NoVideos(), chat_template=template)
        kind = transformers.Qwen3_5ForConditionalGeneration
    module = kind.from_pretrained(model, dtype=torch.float32)
    engine, rows = config.engine, config.prompts_per_step * config.group_size
    assert (config.epochs, config.mini_batches, config.objective.aggregation) == (1, 1, "token")
    return GRPOTrainer(
        model=module,
        reward_funcs=reward_of(tokenizer, with_tool),
        args=TrlConfig(
            output_dir=str(folder), max_steps=config.steps, per_device_train_batch_size=rows,
            num_generations=config.group_size, max_completion_length=config.max_episode_tokens,
            generation_kwargs={"max_new_tokens": config.sampling.max_new_tokens},
            max_tool_calling_iterations=config.max_turns - 1 if with_tool else None,
            temperature=config.sampling.temperature, beta=0.0, loss_type="dapo", scale_rewards="group",
            max_grad_norm=engine.grad_clip, shuffle_dataset=False, report_to=[], save_strategy="no", logging_steps=1,
            use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, seed=config.seed,
        ),
        train_dataset=rows_of(config, tasks),
        processing_class=processor,
        tools=[calculator] if with_tool else None,
        optimizers=optimizer_of(module, engine),
    )  # fmt: skip


def check_prompts(trainer: GRPOTrainer, config: GrpoConfig, tasks: Tasks, model: Path) -> None:
    """Raise ValueError unless the first step's prompts are the tokens that our sampler sees."""
    chat = chat_of(config, load_tokenizer(model), model)
    for task, row in zip(tasks.tasks(0, config.prompts_per_step), trainer.train_dataset, strict=False):
        asked: Any = tasks.environment(task)
        images = [row["image"]] if "image" in row else None
        prompt = row["prompt"] if images is None else prepare_multimodal_messages(row["prompt"], images=images)
        theirs, ours = trainer._tokenize_prompts([prompt])[0][0], chat.opening(asked.messages, asked.tools).ids
        if list(theirs) != list(ours):
            raise ValueError(f"TRL is asked {theirs}, we are asked {ours}")
