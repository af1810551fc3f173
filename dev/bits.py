#!/usr/bin/env python3
"""bits.py: do two versions of train_gpt compute the same bits? Short runs of tiny models, and plans of large ones.

  dev/bits.py BEFORE [AFTER] [--device cpu|emu] [-k WORDS]

BEFORE and AFTER: a commit, which is copied to build/bits/COMMIT, or a folder; AFTER is this working tree if left out.
Where there is a Makefile the program is built first, elsewhere build/DEVICE/train_gpt is taken as it is. Results are
kept beside it, in bits.json, and used again until the program changes.

A run is compared step by step, by all FIELDS of its log, and by the files of its last checkpoint. Plans are compared
number by number: their words may change. Exit code 1 if anything differs.
"""
import argparse
import hashlib
import itertools
import json
import multiprocessing.pool
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

# MODEL RANKS FLAGS, and after a bar RANKS FLAGS with which the run is resumed.
RUNS = """
gpt2     1  --temperature 0 --check-replicas 2
gpt2     1  -r cheap --dropout 0.1 --schedule linear --no-kv-cache
gpt2     1  -r 2 --offload activations --optimizer adam --weight-decay 0.1 --schedule constant
gpt2     1  -p bf16 -r mlp --optimizer muon --schedule wsd --decay 0.5
gpt2     1  -p bf16 -r block --offload activations,optimizer --master none --state-dtype bf16 --grad-dtype bf16
gpt2     1  -p bf16 --fp32-tensors ln_1,wpe --master split --optimizer lamb --schedule wsd-sqrt --decay 0.6
gpt2     1  -p fp16 --initial-scale-power 24 --hysteresis 1 -r attention -n 8
gpt2     1  -p fp16 --grad-dtype fp16 --dropout 0.2 --attn-dropout 0 --optimizer adagrad --schedule warmup-log
gpt2     1  --optimizer sgd --momentum 0.8 --dampening 0.1 --schedule onecycle --no-shuffle --repetition-penalty 1.5
gpt2     1  -b 2 -g 1 -n 30 --spike-deviations 0.5 --spike-window 5 --spike-skip --optimizer sgd -l 0.3
gpt2     3  --deterministic --optimizer lion -l 1e-4 --schedule lr-range-test
gpt2     3  -z 1 --optimizer muon --muon-lr 0.01 --momentum 0.9 -r block
gpt2     3  -z 1 -p fp16 --initial-scale-power 24 --loss-scale-window 1 --consecutive-hysteresis --optimizer lion -n 8
gpt2     3  -z 2 -p bf16 -r attention --optimizer lamb --batch-ramp 3:3 --seq-ramp 8:3 -g 3
gpt2     3  -z 2 --reduce step --comm-dtype bf16 --optimizer sgd --nesterov --top-p 0.5
gpt2     3  -z 3 -p bf16 --optimizer muon --overlap 0
gpt2     3  -z 3 --persist-below 300 --reduce-bucket 60000 --gather-bucket 30000 --dropout 0.1 -r block
gpt2     3  -z 3 -p fp16 --offload optimizer,gradients,parameters --initial-scale-power 12
gpt2     3  -z 2 -n 3 --eval-every 2  | 1  -n 6 -b 2 -g 3 --eval-stride 8
odd      1  -p bf16 -r mlp --dropout 0.1 --optimizer adam
odd      1  -r attention --optimizer lamb
odd      3  -z 3 -p fp16 -r cheap --initial-scale-power 12
d2       1  -p bf16 -t 128 -n 3 -r block
d2       3  -z 3 -t 100 -n 3 -g 1
llama    1  --top-k 5
llama    1  -p bf16 -r mlp --optimizer adagrad --schedule constant
llama    1  -p fp16 --loss-scale 1024 --dropout 0.1 -r cheap
llama    1  -r block --offload activations --optimizer muon --param-group *embed*:lr=0.5,wd=0;*norm*:lr=2
llama    3  -z 1 -r 2 --optimizer lamb
llama    3  -z 2 -p bf16 --comm-dtype fp32 --grad-dtype bf16 --optimizer adagrad --schedule linear
llama    3  -z 3 --optimizer lion -l 1e-4 --deterministic --comm-dtype bf16
llama    3  -z 3 -p bf16 --master none --offload gradients,parameters --optimizer sgd --seq-ramp 8:4
llama    3  -z 3 -p bf16 -n 3 --dropout 0.1  | 1  -n 6 -b 3 --dropout 0.1  | 3  -n 7 -z 1 -p fp16
mistral  1  -p bf16 --offload optimizer --master split --state-dtype bf16 -r attention --optimizer adam
mistral  3  -z 2 -r block --offload optimizer,gradients --optimizer adagrad
qwen2    1  -p bf16 --fp32-tensors norm -r block --optimizer lion
qwen2    3  -z 2 -p fp16 -r cheap --offload gradients --initial-scale-power 8
qwen2    3  -z 3 -r mlp --optimizer muon --clip 0.1 --batch-ramp 3:2
"""
DEFAULTS = {"-b": "1", "-g": "2", "-n": "5", "-l": "1e-3", "--warmup": "2", "--sample-tokens": "16"}
FIELDS = ["loss", "norm", "lr", "loss_scale", "tokens", "skipped", "nonfinite", "loss_deviations", "norm_deviations",
          "state_hash", "val_loss", "val_tokens", "bits_per_byte", "sample"]
SAVED = ["model.safetensors", "optimizer.safetensors"]
GPT2 = {"model_type": "gpt2", "vocab_size": 94, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 3}
LLAMA = {"model_type": "llama", "vocab_size": 94, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3,
         "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 32}
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA,     # LLAMA's head is wide beside a block: it is split
           "odd": {**GPT2, "n_positions": 31, "n_embd": 36, "n_inner": 50, "activation_function": "gelu"},
           "mistral": {**LLAMA, "model_type": "mistral", "head_dim": 16, "rope_scaling": ROPE},
           "qwen2": {**LLAMA, "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 96,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}}

# All for a GPU: what is estimated for a CPU depends on what was measured on it.
PLANS = """
--gpu h100 --ranks 8 -m llama3-8b -z 3 -p bf16
--gpu h100 --ranks 64 -m llama2-7b -z 2 -p bf16 -r cheap -b 1 -g 4 --reduce step --comm-dtype bf16
--gpu h200 --ranks 2 -m qwen2.5-1.5b -p bf16 -t 4096 -r 4 --offload activations --master split
--gpu b200 --ranks 8 -m llama-1b -z 1 -p fp16 --optimizer muon -b 8
--gpu a100 --ranks 4 -m gpt2 -z 0 -p fp32 -b 16 --optimizer sgd --dropout 0.1
--gpu a100 --ranks 8 -m gpt2-large -z 3 -p bf16 -r mlp --persist-below 100000 --gather-bucket 5e7 --overlap 0
--gpu l4 --ranks 2 -m gpt2-xl -z 2 -p bf16 -r attention --offload optimizer --optimizer lamb
--gpu l4 --ranks 2 -m gpt2-xl -z 3 -p bf16 -r block --offload activations,optimizer,gradients,parameters -b 1
--gpu l4 --ranks 1 -m gpt2-xl -p bf16 -b 16 --master none --state-dtype bf16 --grad-dtype bf16
--gpu a10g --ranks 1 -m llama3-8b -p bf16 --auto -b 2 -t 2048
--gpu l4 --ranks 4 -m gpt2-medium -p fp16 --auto --batch 64 --optimizer lion
--gpu h100 --ranks 16 -m d24 -z 1 -p bf16 --auto -b 8 --fp32-tensors ln_1,ln_2 --optimizer adagrad
"""
# What is not compared: host memory of the executable itself and the total it is in; of one rank, that it sends nothing.
NOT_IN_PLANS = re.compile(r"^ .*\n +total .*\n(?=time )|^ZeRO .* 0\.00 MiB sent .*\n", re.M)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\.?\w)")     # not those in names: bf16, gpt2-xl, 0.1.0


def write_inputs(folder):
    """Model folders, and text of 94 letters in which three of four follow from the one before."""
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": bytes_level, "decoder": bytes_level,
                 "model": {"type": "BPE", "vocab": {chr(33 + i): i for i in range(94)}, "merges": []}}
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "data").mkdir()
    (folder / "data" / "tokenizer.json").write_text(json.dumps(tokenizer))
    rng = random.Random(1)
    for split, count in (("train", 3000), ("val", 150)):
        tokens = [0]
        while len(tokens) < count:
            tokens.append((31 * tokens[-1] + 7) % 61 if rng.random() < 0.75 else rng.randrange(94))
        header = struct.pack("<256I", 20240520, 1, count, 0, 94, count, *[0] * 250)
        (folder / "data" / f"{split}_000000.bin").write_bytes(header + struct.pack(f"<{count}H", *tokens))


def execute(program, ranks, args, folder):
    """What it prints; a refusal or a crash is a RuntimeError."""
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
    env = dict(os.environ, OMP_NUM_THREADS="2" if ranks == 1 else "1", TMPDIR=str(folder), OMPI_ALLOW_RUN_AS_ROOT="1",
               OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1")
    done = subprocess.run([*mpirun, program, *args], cwd=folder, env=env, capture_output=True, text=True,
                          errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        complaint = re.search(r"^train_gpt: .*", done.stderr, re.M)
        raise RuntimeError(complaint[0] if complaint else f"exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def run(program, setting, folder):
    """[value, its name] of each field of each step, and of the last checkpoint's files."""
    model, rest = setting.split(maxsplit=1)
    source = ["-m", f"../{model}", "--from-scratch"] if model in CONFIGS else ["-m", model]
    found = []
    for i, part in enumerate(rest.split("|")):
        ranks, *flags = part.split()
        flags += [word for flag, value in DEFAULTS.items() if flag not in flags for word in (flag, value)]
        out = folder / f"run{i}"
        execute(program, int(ranks), [*source, "-d", "../data", "-o", out.name, "--hash-every", "1", *flags], folder)
        for step in map(json.loads, (out / "log.jsonl").read_text().splitlines()):
            found += [[as_text(step[name]), f"{name} of step {step['step']}"] for name in FIELDS if name in step]
        source = ["--resume", out.name]
    last = max(out.glob("step_*"))
    return found + [[hashlib.sha256((last / name).read_bytes()).hexdigest(), f"hash of {name}"] for name in SAVED]


def as_text(value):
    """Of a number the digits that the log has, so that it is the same as number and as string."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def plan(program, setting, folder):
    """[number, its line] of all that is printed."""
    printed = NOT_IN_PLANS.sub("", execute(program, 1, ["--plan", "-d", "none", *setting.split()], folder))
    return [[number, line] for line in printed.splitlines() for number in NUMBER.findall(line)]


def results(program, settings):
    """{setting: its values, or why there are none}."""
    inputs = repr((DEFAULTS, FIELDS, SAVED, CONFIGS, NOT_IN_PLANS, NUMBER)).encode()
    key, path = hashlib.sha256(program.read_bytes() + inputs).hexdigest(), program.with_name("bits.json")
    found = json.loads(path.read_text()).get(key, {}) if path.exists() else {}
    missing = [setting for setting in settings if setting not in found]

    def compute(setting):
        work = folder / str(settings.index(setting))
        work.mkdir()
        try:
            return (plan if setting.startswith("--") else run)(program, setting, work)
        except RuntimeError as error:
            return str(error)

    with tempfile.TemporaryDirectory() as name, multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
        folder = pathlib.Path(name)
        write_inputs(folder)
        found.update(zip(missing, pool.map(compute, missing, chunksize=1)))
    if missing:
        path.write_text(json.dumps({key: {k: v for k, v in found.items() if not isinstance(v, str)}}, indent=0))
    return found


def build(place, device):
    """The program of a folder or a commit."""
    folder = pathlib.Path(place).resolve()
    if not folder.is_dir():
        git = ["git", "-C", ROOT]
        commit = subprocess.check_output([*git, "rev-parse", "--verify", f"{place}^{{commit}}"], text=True).strip()
        folder = ROOT / "build/bits" / commit
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.check_output([*git, "archive", commit])
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    program = folder / "build" / device / "train_gpt"
    if (folder / "Makefile").exists():
        subprocess.run(["make", "-s", "-C", folder, f"DEVICE={device}", program.relative_to(folder)], check=True)
    return program


def difference(before, after):
    """The first two values that are not equal, in words; None if all are."""
    for side, values in (("before", before), ("after", after)):
        if isinstance(values, str):
            return f"fails {side}: {values}"
    for (old, where), (new, there) in itertools.zip_longest(before, after, fillvalue=["nothing", "the end"]):
        if old != new:
            return f"{old} is {new} now: {where}" + (f" | {there}" if there != where else "")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default=ROOT)
    parser.add_argument("--device", choices=["cpu", "emu"], help="both, if none is named")
    parser.add_argument("-k", metavar="WORDS", default="", help="only settings that contain these words")
    args = parser.parse_args()
    settings = [line for line in (RUNS + PLANS).splitlines() if line and args.k in line]
    num_equal = num_differ = 0
    for device in [args.device] if args.device else ["cpu", "emu"]:
        before, after = (results(build(place, device), settings) for place in (args.before, args.after))
        for setting in settings:
            found = difference(before[setting], after[setting])
            num_equal, num_differ = num_equal + (found is None), num_differ + (found is not None)
            print(f"{device} {setting}: {found or 'equal'}", flush=True)
    print(f"{num_equal} settings equal, {num_differ} differ")
    return num_differ > 0


if __name__ == "__main__":
    sys.exit(main())
