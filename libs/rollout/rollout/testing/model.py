"""For tests: a tiny hybrid Qwen3.5 made from a configuration, with weights large enough to tell tokens apart."""

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig


def tiny_model(vocab: int = 48, layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """Gated-delta-net and full-attention layers by turns, hidden size 32, float32, eval mode."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        full_attention_interval=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("proj.weight", "proj_qkv.weight", "embed_tokens.weight")):
                parameter.normal_(0, 0.25)  # the default 0.02 leaves every token about equally likely
    return model.eval()
