"""The memory of a head for multi-token prediction beside the model, but for its states: activations, and copies."""

from engines import EngineConfig
from runplan.estimates.activations import Kind, layer_elements
from runplan.model.model_shape import ModelShape, head_parameters


def mtp_bytes(
    shape: ModelShape, engine: EngineConfig, tokens: int, width: int, tp: int = 1, apart: bool = False
) -> float:
    """Return the bytes that the head adds when its backward pass begins; 0 where it is not trained.

    Its layer is not recomputed. FSDP2 has gathered its weights; Megatron keeps a copy of the embedding where another
    stage has that (`apart`). Its logits come after the model's, a chunk at a time, and take no memory of their own.
    """
    if not engine.mtp_loss_scaling_factor:
        return 0.0
    kind: Kind = "fused norms" if engine.backend == "megatron" or engine.device == "cpu" else "stock"
    inputs = 7 * shape.hidden / tp  # two inputs and their norms, both beside each other as one, and the last norm's
    kept = width * tokens * (inputs + layer_elements(shape, False, tp, kind))
    if engine.backend == "megatron":
        return kept + (width * shape.vocab * shape.hidden / tp if apart and not shape.tied_embeddings else 0.0)
    return kept + width * head_parameters(shape).total
