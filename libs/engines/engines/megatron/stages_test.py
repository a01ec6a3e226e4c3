"""Which layers a stage has is megatron-core's own answer too: its checkpoints and names count layers by that."""

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from engines.parallel.stages import split_layers, stage_layers


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "first", "last"),
    [(94, 8, 1, 11, 11), (48, 8, 1, None, None), (10, 4, 1, 1, 1), (7, 2, 1, 3, None), (32, 4, 2, None, None)],
)
def test_layers_of_every_stage_are_those_of_megatron_core(
    layers: int, stages: int, chunks: int, first: int | None, last: int | None
) -> None:
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=chunks > 1,
    )
    split = split_layers(layers, stages, chunks=chunks, first=first, last=last)
    for stage in range(stages):
        for chunk in range(chunks):
            at = chunk if chunks > 1 else None
            start = get_transformer_layer_offset(config, vp_stage=at, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=at, pp_rank=stage)
            assert list(stage_layers(split, stage, chunk)) == list(range(start, start + count)), (stage, chunk)
