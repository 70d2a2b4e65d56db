"""A vLLM plugin: `--load-format dummy` fills the weights with random values that influence the
answers. The seed of a weight is the CRC of its name, so every process gets the same weights.

vLLM's own dummy values lie within 0.001, also those of the norms. In bf16, the layers then add
nothing to their input, and the answers would not show damaged weights.
"""

import zlib

EMBEDDING_DEVIATION = 1.0
DEVIATION = 0.02  # standard deviation of the other weights, as in Llama's own initialization


def register():
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.DummyModelLoader.load_weights = load_weights


def load_weights(self, model, model_config):
    import torch

    with torch.no_grad():
        for name, weight in sorted(model.state_dict().items()):
            if not torch.is_floating_point(weight) or weight.device.type == "meta":
                continue
            if "norm" in name:
                weight.fill_(1.0)
                continue
            seed = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
            weight.normal_(0.0, EMBEDDING_DEVIATION if "embed_tokens" in name else DEVIATION, generator=seed)
