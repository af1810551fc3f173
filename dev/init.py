"""init.py: the weights of step 0 in NumPy, element by element the same as train_gpt's.

Element i (row-major in the shape of the Hugging Face file) of tensor NAME at seed s:

    mix(z)  = SplitMix64's finaliser, mix() below
    key     = fnv1a64(NAME) ^ mix(s + 0x9E3779B97F4A7C15)
    z       = mix(key + (i+1) * 0x9E3779B97F4A7C15)
    u1, u2  = ((z >> 32) + 1) / 2^32, (z & 0xffffffff) / 2^32
    normal  = sqrt(-2 ln u1) * cos(2 pi u2)                       in double
    weight  = float(std * normal)

so any element can be computed alone, on any rank. Weights N(0, 0.02), residual projections 0.02 / sqrt(2 L), biases 0,
norm weights 1.
"""
import numpy as np

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def mix(z):
    z = z ^ (z >> np.uint64(30))
    z = z * np.uint64(0xBF58476D1CE4E5B9)
    z = z ^ (z >> np.uint64(27))
    z = z * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fnv1a64(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return np.uint64(h)


def splitmix64(first, n):
    """n numbers of the counter-based stream that starts at `first`."""
    with np.errstate(over="ignore"):
        return mix(np.uint64(first) + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * GOLDEN_RATIO)


def normal(name, shape, std, seed):
    n = int(np.prod(shape))
    z = splitmix64(fnv1a64(name) ^ splitmix64(seed, 1)[0], n)
    u1 = ((z >> np.uint64(32)).astype(np.float64) + 1) / 2**32
    u2 = (z & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    return (std * (np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2))).astype(np.float32).reshape(shape)


def gpt2_shapes(config):
    """{name: shape} of a GPT-2 in the order and layout of its file: Conv1D weights are (in, out)."""
    V, T, C, L = config["vocab_size"], config["n_positions"], config["n_embd"], config["n_layer"]
    F = config.get("n_inner") or 4 * C
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C)}
    for l in range(L):
        block = {"ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
                 "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
                 "mlp.c_fc.weight": (C, F), "mlp.c_fc.bias": (F,), "mlp.c_proj.weight": (F, C), "mlp.c_proj.bias": (C,)}
        shapes.update({f"h.{l}.{name}": shape for name, shape in block.items()})
    shapes.update({"ln_f.weight": (C,), "ln_f.bias": (C,)})
    return {"transformer." + name: shape for name, shape in shapes.items()}


def gpt2_weights(config, seed):
    weights = {}
    for name, shape in gpt2_shapes(config).items():
        if name.endswith(".bias"):
            weights[name] = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
        else:
            std = 0.02 / np.sqrt(2 * config["n_layer"]) if name.endswith("c_proj.weight") else 0.02
            weights[name] = normal(name, shape, std, seed)
    return weights


def llama_shapes(config):
    """{name: shape} of a LLaMA or a family with the names of its tensors: weights are (out, in)."""
    V, C, F, L = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"))
    NH = config["num_attention_heads"]
    NKV, HS = config.get("num_key_value_heads", NH), config.get("head_dim", C // NH)
    qwen2 = config["model_type"] == "qwen2"
    shapes = {"model.embed_tokens.weight": (V, C)}
    for l in range(L):
        linears = {"self_attn.q_proj": (NH * HS, C), "self_attn.k_proj": (NKV * HS, C),
                   "self_attn.v_proj": (NKV * HS, C), "self_attn.o_proj": (C, NH * HS), "mlp.gate_proj": (F, C),
                   "mlp.up_proj": (F, C), "mlp.down_proj": (C, F)}
        if config["model_type"] == "arcee":
            del linears["mlp.gate_proj"]
        block = {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,)}
        for name, shape in linears.items():
            block[name + ".weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias") or (qwen2 and name[-6] in "qkv"):
                block[name + ".bias"] = shape[:1]
        if config["model_type"] == "qwen3":
            block.update({"self_attn.q_norm.weight": (HS,), "self_attn.k_norm.weight": (HS,)})
        shapes.update({f"model.layers.{l}.{name}": shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (C,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, C)
    return shapes


def random_weights(shapes, seed, std):
    """Weights for tests: large, so that every term matters; norms and biases are random too."""
    weights = {name: normal(name, shape, std, seed) for name, shape in shapes.items()}
    for name in weights:
        if name.endswith("weight") and len(weights[name].shape) == 1:
            weights[name] += np.float32(1)
    return weights


GPT2_124M = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024,
             "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "activation_function": "gelu_new",
             "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_positions": 24,
        "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 112, "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}


def tokens(num_tokens, V, seed):
    """A text that can be learned: token i is 31 * (token i-1) + 7 mod 61 with probability 3/4, else any of the V."""
    z = splitmix64(seed, num_tokens)
    ids = np.empty(num_tokens, np.int64)
    previous = 0
    for i in range(num_tokens):
        previous = (31 * previous + 7) % 61 if z[i] & np.uint64(3) else int((z[i] >> np.uint64(8)) % np.uint64(V))
        ids[i] = previous
    return ids
