#!/usr/bin/env python3
"""torch_bench.py: times steps of train_gpt and of PyTorch in turn on the same cores, with a Python that has torch:
    PYTHON dev/torch_bench.py [--rounds 7] [--steps 4] [--shapes gpt2:4:64 ...] [--kinds eager compile]
                              [--preload LIBRARY]

Three pairs: fp32; -p bf16 against autocast to bf16 over fp32 weights; all of it in bf16 on both sides. In the same
round dev/bench_floor.cpp measures the floor of the step. Medians and, in brackets, fastest and slowest; a ratio is
train_gpt's time over that of the faster kind.

PyTorch gets what makes it fast: scaled_dot_product_attention; fused AdamW, whose pass also scales the gradients for
the clipping; MKL's kernels for Intel on any x86-64 (`cc` builds the switch, a library of one function); an allocator
that does not return memory, else each step has page faults again: --preload libtcmalloc_minimal.so.4 or
libjemalloc.so.2, else glibc's with the tunables below. Each contender is one process for all rounds, so torch.compile
is not timed."""
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
DTYPES = {"fp32": [], "autocast": ["-p", "bf16"],
          "bf16": ["-p", "bf16", "--master", "none", "--state-dtype", "bf16", "--grad-dtype", "bf16"]}
SIZES = {"gpt2": "gpt2 12 768 3072 50304", "llama-60m": "llama 8 512 1376 32000"}       # for bench_floor
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


def worker(kind, dtype, name, batch, length, threads):
    """For each line of input, a number of steps: runs them and prints their seconds."""
    import torch
    from torch import nn
    from torch_gpt2 import GPT2
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2(12, 768, 12, 50304, length) if name == "gpt2" else llama(8, 512, 8, 1376, 32000, length)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model) if kind == "compile" else model
    tokens = torch.randint(VOCABULARY[name], (batch, length + 1))

    def step():
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.grad_scale = norm.float().clamp(min=1.0)          # what the update divides gradients by
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        print(*(step() for _ in range(int(line))), flush=True)


def mkl_switch(folder):
    """MKL asks whether the CPU is Intel's before it takes its best kernels: a library that says yes."""
    (folder / "switch.c").write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", folder / "switch.c", "-o", folder / "switch.so"], check=True)
    return folder / "switch.so"


class Torch:
    def __init__(self, kind, dtype, name, batch, length, folder, options):
        env = dict(os.environ, OMP_NUM_THREADS=str(options.threads),
                   LD_PRELOAD=f"{mkl_switch(folder)} {options.preload}".strip())
        if not options.preload:
            env["GLIBC_TUNABLES"] = KEEP_MEMORY
        self.command = [sys.executable, __file__, "--worker", kind, dtype, name, str(batch), str(length),
                        str(options.threads)]
        self.errors = open(folder / f"{kind}-{dtype}", "w+", encoding="utf-8")
        self.process = subprocess.Popen(self.command, env=env, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors)
        self.version = self.read()

    def read(self):
        line = self.process.stdout.readline().strip()
        if not line:
            self.errors.seek(0)
            sys.exit(f"{self.errors.read()}\nPyTorch ended: {' '.join(self.command)}")
        return line

    def steps(self, num_steps):
        self.process.stdin.write(f"{num_steps}\n")
        self.process.stdin.flush()
        return [float(x) for x in self.read().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# ---- train_gpt --------------------------------------------------------------------------------------------------
def ours(words, data, name, batch, length, num_steps, options):
    """Runs one more step than `steps`: the first is not counted."""
    out = subprocess.run([options.program, "-m", name, "-d", data / name, "-b", str(batch), "-t", str(length),
                          "-n", str(num_steps + 1), "--sample-tokens", "0", *words], check=True, capture_output=True,
                         text=True, env=dict(os.environ, OMP_NUM_THREADS=str(options.threads))).stdout
    return [1e-3 * float(ms) for ms in re.findall(r"^step \d.*\| (\d+) ms ", out, re.MULTILINE)[1:]]


def floors(name, batch, length, options):
    """Seconds in fp32 and with the bf16 peak."""
    out = subprocess.run([ROOT / "build/cpu/bench_floor", *SIZES[name].split(), str(batch), str(length)], check=True,
                         capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS=str(options.threads)))
    return [1e-3 * float(re.search(rf"\b{which} (\S+)", out.stdout)[1]) for which in ("floor_ms", "bf16_floor_ms")]


def shape_rows(name, batch, length, data, options):
    """The rows of one shape, and PyTorch's version."""
    contenders = {(dtype, kind): Torch(kind, dtype, name, batch, length, data, options)
                  for dtype in DTYPES for kind in options.kinds}
    times, floor = {key: [] for key in [*contenders, *DTYPES]}, []
    for _ in range(options.rounds):
        floor.append(floors(name, batch, length, options))
        for dtype, words in DTYPES.items():
            times[dtype] += ours(words, data, name, batch, length, options.steps, options)
            for kind in options.kinds:
                times[dtype, kind] += contenders[dtype, kind].steps(options.steps)
    for contender in contenders.values():
        contender.close()
    for dtype in DTYPES:
        best = min((times[dtype, kind] for kind in options.kinds), key=statistics.median)
        median = statistics.median(times[dtype])
        least = statistics.median(pair[dtype != "fp32"] for pair in floor)
        cells = [f"{1e3 * statistics.median(series):.0f} ({1e3 * min(series):.0f}-{1e3 * max(series):.0f})"
                 for series in [times[dtype], *(times[dtype, kind] for kind in options.kinds)]]
        print(f"| {name} B={batch} T={length} {dtype} |", " | ".join(cells),
              f"| {median / statistics.median(best):.2f} | {1e3 * least:.0f} | {median / least:.2f} |", flush=True)
    return next(iter(contenders.values())).version


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", default=["gpt2:4:64", "gpt2:4:256", "gpt2:1:1024", "llama-60m:4:256"])
    parser.add_argument("--kinds", nargs="*", default=["eager", "compile"])
    parser.add_argument("--preload", default="")
    parser.add_argument("--program", default=ROOT / "build/cpu/train_gpt")
    options = parser.parse_args()
    sys.path += [str(ROOT / "dev"), str(ROOT / "test")]
    import init
    import util
    subprocess.run(["make", "-s", "DEVICE=cpu", "build/cpu/bench_floor"], cwd=ROOT, check=True)
    print("| shape | train_gpt ms |", " | ".join(f"{kind} ms" for kind in options.kinds), "| ratio | floor | x floor |")
    print("|---" * (5 + len(options.kinds)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder)
        for shape in options.shapes:
            name, batch, length = shape.split(":")
            util.shard_write(data / name / "train_000000.bin", init.tokens(100000, VOCABULARY[name], 1),
                             VOCABULARY[name])
            version = shape_rows(name, int(batch), int(length), data, options)
    print(f"torch {version}, {options.threads} threads, allocator {options.preload or KEEP_MEMORY}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:5], *map(int, sys.argv[5:]))
    else:
        main()
