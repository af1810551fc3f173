#!/usr/bin/env python3
"""golden_llama.py: stores results of transformers for tiny models in test/golden/.

    pip install torch numpy transformers safetensors
    python dev/golden_llama.py           # seconds
    python dev/golden_llama.py NAME...   # only these configs; what is stored of the others stays

families.json              configs, seeds and sizes, from which the same weights and tokens can be made
families_NAME.safetensors  of one batch: logits (B,T,V), losses (B,T), and grad.TENSOR of the mean loss
families_text.json         greedy continuations of a few prompts, as token ids
families_steps.json        losses and gradient norms of ten steps of AdamW, a batch each
families_bf16.safetensors  weights rounded to bf16: NAME.truth, logits in fp64 as above, and NAME.plain, those of
                           transformers in bf16. far.*: one block of rotary attention at positions 3, 257 and 2047
Weights are init.random_weights(), tokens init.tokens(). Computed in fp64 as far as transformers supports it (its
RMSNorm and its rotary table are always fp32), rounded to fp32.
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.numpy import load_file, save_file

import init

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "test" / "golden"
B, T, SEED, STD = 2, 24, 7, 0.4
STEPS, STEP_B, LR = 10, 6, 1e-3


def llama(model_type, architecture, **more):
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": 61, "hidden_size": 24,
              "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
              "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    return {**config, **more}


CONFIGS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 61, "n_positions": 128,
             "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "activation_function": "gelu_new",
             "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
             "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
    "mha": llama("llama", "LlamaForCausalLM"),
    # heads wider than C / NH; a context so short that llama3 scaling has all three kinds of frequency
    "gqa": llama("llama", "LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=2, head_dim=8,
                 rope_scaling={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 32}),
    "mqa": llama("llama", "LlamaForCausalLM", num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True,
                 mlp_bias=True, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "mistral": llama("mistral", "MistralForCausalLM", num_attention_heads=6, num_key_value_heads=2, head_dim=16,
                     sliding_window=None),
    # every query but the first few sees fewer keys than there are; then the same in the upper of two layers alone
    "mistral_window": llama("mistral", "MistralForCausalLM", num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                            sliding_window=7),
    "qwen2_window": llama("qwen2", "Qwen2ForCausalLM", num_attention_heads=4, num_key_value_heads=1, hidden_size=32,
                          rms_norm_eps=1e-6, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    # the MLP without a gate, and its biases
    "arcee": llama("arcee", "ArceeForCausalLM", num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
                   hidden_act="relu2", mlp_bias=True),
    "qwen2": llama("qwen2", "Qwen2ForCausalLM", num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
                   rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=False),
    # a norm of each query and key head, of a size that has nothing to do with C / NH
    "qwen3": llama("qwen3", "Qwen3ForCausalLM", num_attention_heads=6, num_key_value_heads=2, head_dim=10,
                   rope_theta=1000000.0, rms_norm_eps=1e-6, attention_bias=True, use_sliding_window=False),
    "qwen3_tied": llama("qwen3", "Qwen3ForCausalLM", num_key_value_heads=1, head_dim=24, hidden_size=30,
                        rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=None),
}
FAR = llama("llama", "LlamaForCausalLM", hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048)
FAR_POSITIONS = [3, 257, 2047]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [60], [11, 22, 33], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], [40, 3]]


def shapes(config):
    return init.gpt2_shapes(config) if config["model_type"] == "gpt2" else init.llama_shapes(config)


def build(config, rounded=False):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32)
    weights = {name: torch.from_numpy(a) for name, a in init.random_weights(shapes(config), SEED, STD).items()}
    if rounded:
        weights = {name: a.bfloat16().float() for name, a in weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.double().eval()


def one_batch(model, config):
    tokens = torch.from_numpy(init.tokens(B * T + 1, config["vocab_size"], SEED))
    idx, targets = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    logits = model(idx).logits
    losses = F.cross_entropy(logits.view(B * T, -1), targets.reshape(-1), reduction="none").view(B, T)
    losses.mean().backward()
    result = {"logits": logits, "losses": losses}
    result.update({"grad." + name: p.grad for name, p in model.named_parameters()})
    return {name: x.detach().float().contiguous().numpy() for name, x in result.items()}


def adamw_steps(config):
    """train_gpt's defaults at a constant learning rate."""
    model = build(config)
    groups = [{"params": [p for p in model.parameters() if (p.dim() == 2) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.from_numpy(init.tokens(STEPS * STEP_B * T + 1, config["vocab_size"], SEED))
    losses, norms = [], []
    for idx, targets in zip(tokens[:-1].view(STEPS, STEP_B, T), tokens[1:].view(STEPS, STEP_B, T)):
        loss = F.cross_entropy(model(idx).logits.view(STEP_B * T, -1), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    return {"loss": losses, "norm": norms}


@torch.no_grad()
def logits_bf16(config, tokens, rows=slice(None)):
    """(truth, plain) of tokens (B,T): train_gpt's error may be at most twice that of plain code."""
    truth, plain = build(config, rounded=True), build(config, rounded=True).bfloat16()
    return [model(tokens).logits[:, rows].float().contiguous().numpy() for model in (truth, plain)]


@torch.no_grad()
def continue_greedily(model, prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt):]


if __name__ == "__main__":
    names, texts, steps, bf16 = sys.argv[1:] or [*CONFIGS, "far"], {}, {}, {}
    if sys.argv[1:]:
        texts = json.loads((GOLDEN / "families_text.json").read_text())["texts"]
        steps = json.loads((GOLDEN / "families_steps.json").read_text())
        bf16 = load_file(GOLDEN / "families_bf16.safetensors")
    for name, config in [(name, CONFIGS[name]) for name in names if name in CONFIGS]:
        model = build(config)
        save_file(one_batch(model, config), GOLDEN / f"families_{name}.safetensors")
        steps[name] = adamw_steps(config)
        texts[name] = [continue_greedily(model, prompt, 64) for prompt in PROMPTS]
        print(name, len(set(texts[name][0])), "different tokens in the first continuation")
    for name, config in [(name, CONFIGS.get(name, FAR)) for name in names]:
        tokens = torch.from_numpy(init.tokens(2048 if name == "far" else B * T + 1, config["vocab_size"], SEED))
        batch = tokens[None] if name == "far" else tokens[:-1].view(B, T)
        bf16[name + ".truth"], bf16[name + ".plain"] = logits_bf16(config, batch,
                                                                   FAR_POSITIONS if name == "far" else slice(None))
    save_file(bf16, GOLDEN / "families_bf16.safetensors")
    about = {"made_by": "dev/golden_llama.py", "torch": torch.__version__, "transformers": transformers.__version__,
             "B": B, "T": T, "seed": SEED, "std": STD, "step_B": STEP_B, "lr": LR, "configs": CONFIGS,
             "far": FAR, "far_positions": FAR_POSITIONS}
    (GOLDEN / "families.json").write_text(json.dumps(about, indent=1) + "\n")
    (GOLDEN / "families_steps.json").write_text(json.dumps(steps, indent=1) + "\n")
    (GOLDEN / "families_text.json").write_text(json.dumps({"prompts": PROMPTS, "texts": texts}) + "\n")
