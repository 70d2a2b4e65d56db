"""Writes a GGUF file of a Llama with random weights for llama.cpp, and returns the command line of a server
with it. All layers have the same weights, so that the file is written quickly."""

import struct

WIDTH, INNER, HEADS, VOCABULARY, CONTEXT = 4096, 11008, 32, 512, 2048
GIB = 1 << 30
ALIGNMENT = 32
# Types of values in GGUF.
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
# Types of tensors.
F32, F16 = 0, 1
# Types of tokens.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def server(program, weights, port):
    """Returns the command line of a llama-server with these weights, all of them on the GPU."""
    words = [program, "--model", weights, "--host", "127.0.0.1", "--port", port, "--ctx-size", CONTEXT]
    words += ["--parallel", 1, "--gpu-layers", 99, "--flash-attn", "off", "--fit", "off", "--no-warmup"]
    return list(map(str, words))


def text(value):
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(kind, content):
    formats = {UINT32: "<I", INT32: "<i", FLOAT32: "<f"}
    return text(content) if kind == STRING else struct.pack(formats[kind], content)


def entry(key, kind, content):
    """Returns the bytes of a key and its value. A list becomes an array of values of this type."""
    if isinstance(content, list):
        values = b"".join(value(kind, each) for each in content)
        return text(key) + struct.pack("<IIQ", ARRAY, kind, len(content)) + values
    return text(key) + struct.pack("<I", kind) + value(kind, content)


def metadata(layers):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    more = VOCABULARY - len(tokens)
    entries = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", UINT32, ALIGNMENT),
        ("llama.context_length", UINT32, CONTEXT),
        ("llama.embedding_length", UINT32, WIDTH),
        ("llama.block_count", UINT32, layers),
        ("llama.feed_forward_length", UINT32, INNER),
        ("llama.attention.head_count", UINT32, HEADS),
        ("llama.attention.head_count_kv", UINT32, HEADS),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        ("llama.rope.dimension_count", UINT32, WIDTH // HEADS),
        ("llama.vocab_size", UINT32, VOCABULARY),
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.tokens", STRING, tokens + [f"word{i}" for i in range(more)]),
        ("tokenizer.ggml.scores", FLOAT32, [0.0] * VOCABULARY),
        ("tokenizer.ggml.token_type", INT32, kinds + [NORMAL] * more),
        ("tokenizer.ggml.bos_token_id", UINT32, 1),
        ("tokenizer.ggml.eos_token_id", UINT32, 2),
        ("tokenizer.ggml.unknown_token_id", UINT32, 0),
    ]
    return [entry(*each) for each in entries]


def shapes(layers):
    """Returns the names of the tensors, and their shapes with the fastest dimension first."""
    square, up = (WIDTH, WIDTH), (WIDTH, INNER)
    block = {"attn_norm": (WIDTH,), "attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    block |= {"ffn_norm": (WIDTH,), "ffn_gate": up, "ffn_up": up, "ffn_down": (INNER, WIDTH)}
    found = {"token_embd.weight": (WIDTH, VOCABULARY)}
    for layer in range(layers):
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found | {"output_norm.weight": (WIDTH,), "output.weight": (WIDTH, VOCABULARY)}


def size(shape):
    return shape[0] * 4 if len(shape) == 1 else shape[0] * shape[1] * 2


def padded(number):
    return number + -number % ALIGNMENT


def write(path, gib):
    """Writes a model of about this many GiB."""
    import numpy

    per_layer = sum(size(shape) for name, shape in shapes(1).items() if name.startswith("blk."))
    layers = max(1, round(gib * GIB / per_layer))
    tensors, pairs = shapes(layers), metadata(layers)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    at = 0
    for name, shape in tensors.items():
        kind = F32 if len(shape) == 1 else F16
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        at += padded(size(shape))
    random = numpy.random.default_rng(1)
    weights = {}

    def data(name, shape):
        if len(shape) == 1:
            return numpy.ones(shape, numpy.float32).tobytes()
        kind = name.split(".")[-2]
        if kind not in weights:
            values = random.standard_normal(shape[0] * shape[1], numpy.float32)
            weights[kind] = (values * numpy.float32(0.02)).astype(numpy.float16).tobytes()
        return weights[kind]

    with open(path, "wb") as file:
        file.write(header.ljust(padded(len(header)), b"\0"))
        for name, shape in tensors.items():
            file.write(data(name, shape).ljust(padded(size(shape)), b"\0"))
