"""Builds a Llama with 6.7 billion random weights (12.6 GiB in bf16) on the GPU, offline."""

LAYERS = 32
VOCABULARY = 32000


def build(layers=LAYERS):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
