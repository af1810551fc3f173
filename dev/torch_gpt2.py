#!/usr/bin/env python3
"""torch_gpt2.py: times the same GPT-2 in PyTorch with torch.compile, for a comparison with train_gpt on a GPU.
bf16 autocast, flash attention by scaled_dot_product_attention, fused AdamW, gradients clipped. Prints one line."""
import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

PRESETS = {"d2": (2, 128, 2), "gpt2": (12, 768, 12), "gpt2-xl": (48, 1600, 25)}


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        batch, length, channels = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, channels))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, channels, heads, vocabulary, context):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, channels), nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="gpt2", choices=PRESETS)
    parser.add_argument("-b", "--micro-batch", type=int, default=16)
    parser.add_argument("-t", "--seq-len", type=int, default=1024)
    parser.add_argument("-n", "--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT2(*PRESETS[options.model], 50304, options.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=device == "cuda")
    loss_of = model if options.eager else torch.compile(model)
    tokens = torch.randint(50257, (options.micro_batch, options.seq_len + 1), device=device)
    times = []
    for _ in range(options.steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()                          # waits for the step
        times.append(time.perf_counter() - start)
    best = sorted(times[len(times) // 2:])[len(times) // 4]
    toks = options.micro_batch * options.seq_len
    print(f"torch {torch.__version__} {options.model} B={options.micro_batch} T={options.seq_len} | "
          f"{1e3 * best:.1f} ms | {toks / best:.0f} tok/s")


if __name__ == "__main__":
    main()
