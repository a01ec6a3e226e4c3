"""vLLM in a plan, held to the bytes of the tensors that its engine allocates."""

import pytest

from engines.tiny import tiny_model
from rollout.vllm.weights.shared_weights import SharedWeights
from runplan.model.model_shape import shape_of
from runplan.plain_settings import PlainRollout
from runplan.samplers.vllm import VllmPlan, vllm_weights


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
def test_vllm_has_two_sets_of_weights_in_memory(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    shape = shape_of(model.config, kind)
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    shared = SharedWeights(shapes, {}, 0)
    try:
        (buffer,) = VllmPlan().buffers(shape, PlainRollout(engine="vllm"), 2)
        assert buffer.always
        assert buffer.host == pytest.approx(2 * shared.nbytes, rel=0.02)  # slots are aligned
        assert vllm_weights(shape, PlainRollout(engine="vllm")) * 2 == buffer.host
        (there,) = VllmPlan().buffers(shape, PlainRollout(engine="vllm", weights_on_device=True), 2)
        assert (there.device, there.host) == (buffer.host, 0)
    finally:
        shared.close()
