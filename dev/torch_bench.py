#!/usr/bin/env python3
"""torch_bench.py: times steps of train_gpt and of PyTorch, eager and compiled, in turn on the same cores. Run it with a
Python that has torch:  PYTHON dev/torch_bench.py [--rounds 3] [--steps 4] [--shapes gpt2:4:64 ...] [--preload LIBRARY]

fp32, two threads (--threads); scaled_dot_product_attention, fused AdamW, gradients clipped, as train_gpt does. PyTorch
gets an allocator that does not return memory: --preload libtcmalloc_minimal.so.4 or libjemalloc.so.2, else glibc's with
the tunables below; otherwise each step has page faults again. Each contender is one process for all rounds, so
torch.compile is not timed. The ratio is tokens/s of train_gpt over those of the faster of eager and compiled."""
import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCABULARY = {"gpt2": 50257, "llama-60m": 32000}
KEEP_MEMORY = ("glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:"
               "glibc.malloc.top_pad=268435456:glibc.malloc.hugetlb=1")


# ---- PyTorch ----------------------------------------------------------------------------------------------------
def llama(layers, channels, heads, width, vocabulary, context):
    """LLaMA as in Hugging Face transformers, with PyTorch's fused attention and norms."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(channels, eps=1e-6), nn.RMSNorm(channels, eps=1e-6)
            self.qkv = nn.Linear(channels, 3 * channels, bias=False)
            self.out = nn.Linear(channels, channels, bias=False)
            self.up, self.down = nn.Linear(channels, 2 * width, bias=False), nn.Linear(width, channels, bias=False)

        def forward(self, x, cosine, sine):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            q, k = (y * cosine + torch.cat((-y[..., y.shape[-1] // 2:], y[..., :y.shape[-1] // 2]), -1) * sine
                    for y in (qkv[0], qkv[1]))
            y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, channels))
            gate, up = self.up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(vocabulary, channels)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(channels, eps=1e-6), nn.Linear(channels, vocabulary, bias=False)
            size = channels // heads
            angle = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
            self.register_buffer("cosine", angle.cos())
            self.register_buffer("sine", angle.sin())

        def forward(self, tokens, targets):
            x = self.token(tokens)
            for block in self.blocks:
                x = block(x, self.cosine, self.sine)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    return Llama()


def worker(kind, name, batch, length, threads):
    """For each line of input, a number of steps: runs them and prints their seconds."""
    import torch
    from torch import nn
    from torch_gpt2 import GPT2
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2(12, 768, 12, 50304, length) if name == "gpt2" else llama(8, 512, 8, 1376, 32000, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model) if kind == "compile" else model
    tokens = torch.randint(VOCABULARY[name], (batch, length + 1))

    def step():
        start = time.perf_counter()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        print(*(step() for _ in range(int(line))), flush=True)


class Torch:
    def __init__(self, kind, name, batch, length, options):
        env = dict(os.environ, OMP_NUM_THREADS=str(options.threads))
        if options.preload:
            env["LD_PRELOAD"] = options.preload
        else:
            env["GLIBC_TUNABLES"] = KEEP_MEMORY
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", kind, name, str(batch), str(length),
                                         str(options.threads)], env=env, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.version = self.process.stdout.readline().strip()
        if not self.version:
            sys.exit(f"PyTorch, {kind}, did not start: {sys.executable} {__file__} --worker {kind} {name} {batch} "
                     f"{length} {options.threads}")

    def steps(self, num_steps):
        self.process.stdin.write(f"{num_steps}\n")
        self.process.stdin.flush()
        return [float(x) for x in self.process.stdout.readline().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# ---- train_gpt --------------------------------------------------------------------------------------------------
def ours(data, name, batch, length, num_steps, options):
    """Runs one more step than `steps`: the first is not counted."""
    out = subprocess.run([options.program, "-m", name, "-d", data / name, "-b", str(batch), "-t", str(length),
                          "-n", str(num_steps + 1), "--sample-tokens", "0"], check=True, capture_output=True, text=True,
                         env=dict(os.environ, OMP_NUM_THREADS=str(options.threads))).stdout
    return [1e-3 * float(ms) for ms in re.findall(r"^step \d.*\| (\d+) ms ", out, re.MULTILINE)[1:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", default=["gpt2:4:64", "gpt2:4:256", "gpt2:1:1024", "llama-60m:4:256"])
    parser.add_argument("--preload", default="")
    parser.add_argument("--program", default=ROOT / "build/cpu/train_gpt")
    options = parser.parse_args()
    sys.path += [str(ROOT / "dev"), str(ROOT / "test")]
    import init
    import util
    print("| shape | train_gpt ms | tok/s | eager ms | compile ms | tok/s, best | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder)
        for shape in options.shapes:
            name, batch, length = shape.split(":")
            batch, length = int(batch), int(length)
            util.shard_write(data / name / "train_000000.bin", init.tokens(100000, VOCABULARY[name], 1),
                             VOCABULARY[name])
            contenders = [Torch(kind, name, batch, length, options) for kind in ("eager", "compile")]
            times = [[], [], []]
            for _ in range(options.rounds):
                times[0] += ours(data, name, batch, length, options.steps, options)
                for contender, series in zip(contenders, times[1:]):
                    series += contender.steps(options.steps)
            for contender in contenders:
                contender.close()
            s = [statistics.median(series) for series in times]
            toks, best = batch * length, min(s[1:])
            print(f"| {name} B={batch} T={length} | {1e3 * s[0]:.0f} | {toks / s[0]:.0f} | {1e3 * s[1]:.0f} | "
                  f"{1e3 * s[2]:.0f} | {toks / best:.0f} | {best / s[0]:.2f} |", flush=True)
    print(f"torch {contenders[0].version}, {options.threads} threads, allocator {options.preload or KEEP_MEMORY}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
    else:
        main()
