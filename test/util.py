"""util.py: helpers of the black-box tests: safetensors and token files, model folders, running train_gpt.

Only NumPy and the standard library. The program under test is the build named by TRAIN_GPT_CPU, TRAIN_GPT_EMU or
TRAIN_GPT_CUDA (scripts/test.sh sets them), else the one in build/.
"""
import itertools
import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FULL = os.environ.get("TRAIN_GPT_FULL") == "1"


def pairwise(rows, values_of):
    """A pairwise set, chosen greedily: each pair of values that occurs in a row occurs in a chosen row. values_of(row)
    is {axis: value}; with one axis each value is chosen."""
    cells = [list(values_of(row).items()) for row in rows]
    pairs = [set(itertools.combinations(row, min(2, len(row)))) for row in cells]
    open_pairs, chosen = set().union(*pairs), []
    while open_pairs:
        chosen.append(max(range(len(rows)), key=lambda i: len(pairs[i] & open_pairs)))
        open_pairs -= pairs[chosen[-1]]
    return [rows[i] for i in sorted(chosen)]


# ---- the program ------------------------------------------------------------------------------------------------
def binary(device):
    return ROOT / os.environ.get(f"TRAIN_GPT_{device.upper()}", f"build/{device}/train_gpt")


def num_gpus():
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return found.stdout.count("GPU ")
    except FileNotFoundError:
        return 0


def built_devices():
    """cpu and emu where they are built, cuda where there is a GPU too."""
    return [d for d in ("cpu", "emu", "cuda") if binary(d).exists() and (d != "cuda" or num_gpus() > 0)]


def in_rank_order(device):
    """Flags of runs on several ranks whose bits are compared: on a GPU NCCL's sums have orders of its own."""
    return ["--deterministic"] if device == "cuda" else []


class Run:
    """A finished train_gpt: exit code, output, log and run folder."""

    def __init__(self, process, out):
        self.code, self.out, self.err, self.folder = process.returncode, process.stdout, process.stderr, out

    @property
    def log(self):
        """The step objects of the run log, merged by step."""
        files = sorted(self.folder.glob("*.jsonl"))
        assert len(files) == 1, f"{self.folder} holds {[f.name for f in files]}"
        return read_log(files[0])

    def series(self, key):
        return [entry[key] for entry in self.log if key in entry]

    def checkpoint(self, step):
        return self.folder / f"step_{step:08d}"

    @property
    def complaint(self):
        """The program's error lines, without mpirun's own."""
        return [line for line in self.err.splitlines() if line.startswith("train_gpt: ")]


def read_log(path):
    steps = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "step" in entry:
            steps.setdefault(entry["step"], {}).update(entry)
    return [steps[step] for step in sorted(steps)]


def command(args, ranks, device, wrapper=()):
    program = [*wrapper, str(binary(device)), *map(str, args)]
    if ranks == 1:
        return program
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *program]


def environment(**extra):
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
               OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    env.update(extra)
    return env


def train_gpt(*args, ranks=1, device="cpu", out=None, ok=True, timeout=300, wrapper=(), cwd=ROOT, verbose=False, **env):
    """Runs the program; with ok it must end with 0, without it must not, with ok=None it may do either. Skips what this
    machine cannot run. verbose: it prints communication volume and host synchronizations too."""
    if not binary(device).exists():
        pytest.skip(f"{device} is not built")
    if device == "cuda" and ranks > num_gpus():
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, have {num_gpus()}")
    if out is not None:
        args = (*args, "-o", out)
    if verbose:
        args = (*args, "--verbose")
    process = subprocess.run(command(args, ranks, device, wrapper), capture_output=True, text=True, errors="replace",
                             timeout=timeout, env=environment(**env), cwd=cwd, stdin=subprocess.DEVNULL)
    run = Run(process, pathlib.Path(out) if out is not None else None)
    if ok:
        assert run.code == 0, f"exit {run.code} of {args}\n{run.out[-2000:]}\n{run.err[-2000:]}"
    elif ok is False:
        assert run.code != 0, f"was not refused: {args}\n{run.out[-2000:]}"
    return run


def plan_rows(out):
    """{label: MiB} of device memory."""
    return memory_rows(out.split("device memory per rank\n")[1].split("host memory")[0])


def host_rows(out):
    rows = memory_rows(out.split("host memory per rank\n")[1].split("total")[0])
    return {label: mib for label, mib in rows.items() if label != "program and libraries"}


def memory_rows(block):
    return {label.strip(): float(mib) for label, mib in re.findall(r"  (.+?) +([\d.]+) MiB\n", block)}


def assert_sent_as_planned(run, steps):
    """Of a run with verbose=True on several ranks: what was sent is as expected, and steps sent what was planned."""
    sent, expected, in_steps, per_step = map(int, re.search(
        r"sent\s+communication volume of rank 0: (\d+) bytes, expected (\d+); (\d+) in steps, planned per step (\d+)",
        run.out).groups())
    assert sent == expected and in_steps == steps * per_step


def ranks_of(launcher):
    """{rank: process id} of the programs that this mpirun has started."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == launcher and "train_gpt" in (entry / "comm").read_text():
                environ = (entry / "environ").read_bytes().split(b"\0")
                rank = next(v for v in environ if v.startswith(b"OMPI_COMM_WORLD_RANK="))
                found[int(rank.split(b"=")[1])] = int(entry.name)
        except (OSError, StopIteration):
            continue
    return found


# ---- safetensors: 8 bytes of header length, a JSON header, the tensors one after another --------------------------
# NumPy has no bf16: those are their 16 bits.
DTYPES = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "BF16": np.uint16,
          "I64": np.int64, "U64": np.uint64, "U8": np.uint8}


def safetensors_write(path, tensors, metadata=None):
    header, offset = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        dtype = next(k for k, v in DTYPES.items() if v == tensor.dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def safetensors_header(path):
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def safetensors_read(path):
    data = pathlib.Path(path).read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    tensors, covered = {}, 0
    for name, entry in json.loads(data[8:first]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        covered += end - begin
        tensors[name] = np.frombuffer(data[first + begin:first + end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    assert covered == len(data) - first, f"{path}: the tensors cover {covered} of {len(data) - first} bytes"
    return tensors


# ---- token shards and model folders -----------------------------------------------------------------------------
def shard_write(path, tokens, vocab_size=0):
    """llm.c's format: 256 header words (magic, version, count, vocabulary), then uint16 tokens."""
    header = np.zeros(256, np.uint32)
    header[:5] = 20240520, 1, len(tokens), 0, vocab_size
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_bytes(header.tobytes() + np.asarray(tokens, np.uint16).tobytes())


def docs_write(path, counts, begins):
    """The flags beside a shard (data/tokens.h): of each token, does it count; the tokens that begin a document."""
    flags = np.asarray(counts, np.uint8)
    flags[list(begins)] |= 2
    header = np.array([0x1_7363_6F64, len(flags), len(begins), np.sum(flags & 1), 0, 0, 0, 0], np.uint64)
    pathlib.Path(path).with_suffix(".docs").write_bytes(header.tobytes() + flags.tobytes())


def gpt2_config(V, C, T, L=1, NH=1, **more):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": V, "n_positions": T,
              "n_embd": C, "n_layer": L, "n_head": NH, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
              "tie_word_embeddings": True}
    config.update(more)
    return config


def llama_config(V, C, T, L=1, NH=1, F=None, model_type="llama", **more):
    """As transformers writes it. Every key that train_gpt reads can be given in `more`."""
    architectures = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                     "arcee": "ArceeForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = {"architectures": [architectures[model_type]], "model_type": model_type, "vocab_size": V, "hidden_size": C,
              "intermediate_size": F or 2 * C, "num_hidden_layers": L, "num_attention_heads": NH,
              "num_key_value_heads": NH, "max_position_embeddings": T, "hidden_act": "silu", "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": False}
    config.update(more)
    return config


def model_write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors_write(folder / "model.safetensors", tensors)
    return folder


def saved_bytes(path):
    """A file of a checkpoint; of state.json what does not depend on how far the run was to go."""
    if path.name != "state.json":
        return path.read_bytes()
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in ("flags", "check")}


def weights(folder):
    return safetensors_read(folder / "model.safetensors")


def moments(folder):
    """Adam's first and second moments of a checkpoint, by tensor name."""
    state = safetensors_read(folder / "optimizer.safetensors")
    return ({k[:-2]: v for k, v in state.items() if k.endswith(".m")},
            {k[:-2]: v for k, v in state.items() if k.endswith(".v")})
