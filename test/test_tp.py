"""Tensor parallelism (--tp): the numbers of one rank in every layout, bytes as planned in every group, what is refused.

The reference is one rank with the same global batch. CI runs a pairwise set, TRAIN_GPT_FULL=1 all layouts for 20 steps.
"""
import json
import os
import re
import signal
import subprocess

import init
import numpy as np
import pytest
from util import (FULL, ROOT, built_devices, command, environment, gpt2_config, in_rank_order, llama_config, ranks_of,
                  shard_write, train_gpt, weights)

V, T, B = 97, 16, 4


def llama(**more):
    return llama_config(V, 64, T, L=2, NH=4, F=176, **more)


# "odd": nothing but the heads divides by a vector; "wide": a vocabulary that stages 2 and 3 cut into pieces, of which
# the last ranks have less, or padding alone.
MODELS = {
    "gpt2": gpt2_config(V, 64, T, L=2, NH=4),
    "odd": gpt2_config(65, 20, T, L=2, NH=4, tie_word_embeddings=False),
    "llama4": llama(num_key_value_heads=4),
    "llama2": llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama1": llama(num_key_value_heads=1),
    "qwen2": llama(model_type="qwen2", num_key_value_heads=2),
    "qwen3": llama(model_type="qwen3", num_key_value_heads=1, head_dim=24),
    "wide": llama_config(300, 16, T, L=2, NH=4, F=16, num_key_value_heads=2),
}
LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2)]         # tp, dp
STEPS = 20 if FULL else 4


def start(folder, name, steps=STEPS):
    config = MODELS[name]
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for split, count, seed in (("train", 3000, 3), ("val", 200, 4)):
        tokens = init.tokens(count, config["vocab_size"], seed)
        shard_write(folder / "data" / f"{split}_000000.bin", tokens, config["vocab_size"])
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-t", T, "-n", steps, "-l", 1e-3,
            "--warmup", 2, "--sample-tokens", 0]


def layout(tp, dp):
    return ["--tp", tp, "-b", B // dp]


@pytest.fixture(scope="module", params=built_devices())
def device(request):
    return request.param


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The run of a model on one rank with the same flags, made on first use."""
    runs = {}

    def get(device, name, *flags, steps=STEPS):
        key = (device, name, steps, *map(str, flags))
        if key not in runs:
            folder = tmp_path_factory.mktemp("one")
            runs[key] = train_gpt(*start(folder, name, steps), "-b", B, *flags, device=device, out=folder / "run")
        return runs[key]

    return get


def assert_close(run, reference):
    assert len(run.log) == len(reference.log)
    assert run.series("loss") == pytest.approx(reference.series("loss"), rel=1e-6)
    assert run.series("norm")[0] == pytest.approx(reference.series("norm")[0], rel=1e-6)
    assert run.series("val_loss") == pytest.approx(reference.series("val_loss"), rel=1e-6)


def sent(run):
    """{group: (sent, expected, in steps, planned per step)} of rank 0."""
    found = re.findall(r"^sent +(.+?): (\d+) bytes, expected (\d+); (\d+) in steps, planned per step (\d+)", run.out,
                       re.M)
    return {group: tuple(map(int, numbers)) for group, *numbers in found}


def assert_sent_as_planned(run, steps):
    groups = sent(run)
    assert any("tp group" in group for group in groups)
    for group, (bytes_sent, expected, in_steps, per_step) in groups.items():
        assert bytes_sent == expected and in_steps == steps * per_step, group
    total, *parts = groups.values()
    assert total == tuple(map(sum, zip(*parts)))


# ---- the numbers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_dp", LAYOUTS, ids=lambda x: f"tp{x[0]}dp{x[1]}")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.pairwise
def test_layouts(tmp_path, device, one_rank, name, tp_dp, stage):
    tp, dp = tp_dp
    run = train_gpt(*start(tmp_path, name), *layout(tp, dp), "-z", stage, ranks=tp * dp, device=device,
                    out=tmp_path / "run", verbose=True, OMP_NUM_THREADS="1")
    assert_close(run, one_rank(device, name))
    assert_sent_as_planned(run, STEPS)


WITH = [
    ("gpt2", ["-r", "cheap", "-g", 2]), ("llama1", ["-r", "attention", "--deterministic"]), ("gpt2", ["-r", "mlp"]),
    ("qwen3", ["-r", "block", "--offload", "activations,optimizer"]),
    ("gpt2", ["--dropout", 0.1, "-r", 2]), ("llama2", ["--dropout", 0.1, "--head-rows", 7]),
    ("qwen2", ["--optimizer", "lamb", "--clip", 0.1]), ("llama4", ["--overlap", 0, "--reduce-bucket", 20000]),
]


@pytest.mark.parametrize("name,flags", WITH, ids=lambda x: "-".join(map(str, x)) if isinstance(x, list) else x)
def test_with(tmp_path, one_rank, name, flags):
    """Recomputation, dropout by global rows and heads, accumulation, offload, clipping."""
    stage = WITH.index((name, flags)) % 4
    run = train_gpt(*start(tmp_path, name), *layout(2, 2), "-z", stage, *flags, ranks=4, out=tmp_path / "run",
                    verbose=True, OMP_NUM_THREADS="1")
    assert_close(run, one_rank("cpu", name, *flags))
    assert_sent_as_planned(run, STEPS)


def test_initial_weights(tmp_path):
    """The same bytes, in the same files, however the tensors are cut."""
    for name in ("gpt2", "odd", "qwen3"):
        files = []
        for tp, dp in ((1, 1), (4, 1), (2, 2)):
            folder = tmp_path / f"{name}{tp}{dp}"
            args = start(tmp_path / name, name)[:3]
            train_gpt(*args, "--tp", tp, "-z", dp, "--export", folder, "--shard-bytes", 30000, ranks=tp * dp,
                      OMP_NUM_THREADS="1")
            files.append({file.name: file.read_bytes() for file in folder.glob("model*")})
        assert files[0] == files[1] == files[2] and len(files[0]) > 2, name


def test_checkpoints_of_other_layouts(tmp_path):
    """A run that goes from layout to layout has the losses of an unbroken one; each reads what the one before saved."""
    steps, walk = 6, [(2, 2, 1), (1, 1, 0), (4, 1, 3), (1, 3, 2)]                # tp, dp, stage
    args = [*start(tmp_path, "llama1", steps), "--schedule", "constant"]
    one = train_gpt(*args, "-b", 12, out=tmp_path / "one")
    args.remove("--from-scratch")
    for i, (tp, dp, stage) in enumerate(walk):
        args[args.index("-n") + 1] = steps if i == 3 else i + 1
        ranks = {"ranks": tp * dp, "OMP_NUM_THREADS": "1"}
        if i > 0:
            train_gpt("--export", tmp_path / f"export{i}", "-m", run.checkpoint(i), "--tp", tp, "-z", stage, **ranks)
            saved = (run.checkpoint(i) / "model.safetensors").read_bytes()
            assert (tmp_path / f"export{i}" / "model.safetensors").read_bytes() == saved
        run = train_gpt(*args, *(["--resume", "auto"] if i > 0 else ["--from-scratch"]), "--tp", tp, "-b", 12 // dp,
                        "-z", stage, **ranks, out=tmp_path / "run")
    assert run.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    for name, tensor in weights(one.checkpoint(steps)).items():
        assert np.abs(weights(run.checkpoint(steps))[name] - tensor).mean() < 1e-6, name


def test_elastic(tmp_path):
    """--elastic changes the number of replicas alone: the same global batch, the same losses."""
    args = [*start(tmp_path, "llama4", 4), "--tp", 2, "--save-every", 2, "--schedule", "constant"]
    two = train_gpt(*args, "-b", 2, ranks=4, out=tmp_path / "two", OMP_NUM_THREADS="1")
    args.remove("--from-scratch")
    one = train_gpt(*args, "-b", 4, "--resume", two.checkpoint(2), "--elastic", ranks=2, out=tmp_path / "one",
                    OMP_NUM_THREADS="1")
    assert "batch   4 sequences = 4 per micro-step x 1 micro-steps x 1 replicas" in one.out
    assert one.series("loss") == pytest.approx(two.series("loss")[2:], rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits(tmp_path, one_rank, precision):
    """No further from fp32 than twice one rank of the same precision, and a step of the loss."""
    truth, plain = (np.array(one_rank("cpu", "gpt2", *flags, steps=10).series("loss"))
                    for flags in ([], ["-p", precision]))
    run = train_gpt(*start(tmp_path, "gpt2", 10), *layout(2, 2), "-z", 2, "-p", precision, ranks=4,
                    out=tmp_path / "run", OMP_NUM_THREADS="1")
    ours = np.array(run.series("loss"))
    assert np.abs(ours - truth).max() <= 2 * np.abs(plain - truth).max() + 2.0**-23 * truth.max()


def test_fp32_tensors(tmp_path, one_rank):
    """Those that all ranks have and those of which each has a part are in units of their own."""
    flags = ["-p", "bf16", "--fp32-tensors", "norm,embed_tokens"]
    run = train_gpt(*start(tmp_path, "llama4"), *layout(2, 2), "-z", 1, *flags, ranks=4, out=tmp_path / "run",
                    OMP_NUM_THREADS="1")
    one = one_rank("cpu", "llama4", *flags)
    assert run.series("loss") == pytest.approx(one.series("loss"), rel=2e-4)
    assert run.series("norm")[0] == pytest.approx(one.series("norm")[0], rel=2e-3)


def test_skipped_steps(tmp_path, one_rank):
    """An overflow on any rank skips the step on all: the loss scale goes as on one rank."""
    flags = ["-p", "fp16", "--initial-scale-power", 20, "--hysteresis", 1]
    one = one_rank("cpu", "gpt2", *flags, steps=10)
    run = train_gpt(*start(tmp_path, "gpt2", 10), *layout(2, 2), "-z", 2, *flags, ranks=4, out=tmp_path / "run",
                    OMP_NUM_THREADS="1")
    assert run.series("loss_scale") == one.series("loss_scale")
    assert run.series("skipped") == one.series("skipped") and 0 < sum(run.series("skipped")) < 10


@pytest.mark.parametrize("seed", range(1, 51 if FULL else 4))
def test_any_order_of_streams(tmp_path, in_order, seed):
    """The emulated build, its streams drained in a random legal order, against the order of the calls."""
    run = order_run(tmp_path, seed)
    assert run.series("loss") == in_order.series("loss")
    assert run.log[-1]["state_hash"] == in_order.log[-1]["state_hash"]


def order_run(folder, seed):
    return train_gpt(*start(folder, "odd", 2), *layout(2, 2), "-z", 3, "-r", "block", ranks=4, device="emu",
                     out=folder / "run", EMU_SEED=str(seed), OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def in_order(tmp_path_factory):
    return order_run(tmp_path_factory.mktemp("in_order"), 0)


def test_deterministic(tmp_path):
    """The stand-in for NCCL sums in rank order, as --deterministic does: the same bits."""
    hashes = set()
    for i, flags in enumerate(([], ["--deterministic"])):
        run = train_gpt(*start(tmp_path, "llama1"), *layout(4, 1), "-z", 1, *flags, ranks=4, out=tmp_path / f"run{i}",
                        OMP_NUM_THREADS="1")
        hashes.add(run.log[-1]["state_hash"])
    assert len(hashes) == 1


@pytest.mark.parametrize("name,stage", [("gpt2", 0), ("qwen3", 1), ("wide", 3)])
def test_text(tmp_path, name, stage):
    """The most likely tokens and their logits, with and without the cache, as on one rank."""
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [50], list(range(12))]
    (tmp_path / "prompts").write_text("".join(json.dumps({"ids": ids, "logits": True}) + "\n" for ids in prompts))
    for flags in ([], ["--no-kv-cache"]):
        texts = []
        for tp, dp in ((1, 1), (2, 2)):
            args = [*start(tmp_path, name)[:3], "--prompts", tmp_path / "prompts", "--sample-tokens", 6,
                    "--temperature", 0, "-t", T, "-b", 3, "--tp", tp, "-z", stage, *flags]
            run = train_gpt(*args, ranks=tp * dp, OMP_NUM_THREADS="1")
            texts.append(sorted((json.loads(line) for line in run.out.splitlines() if line.startswith("{")),
                                key=lambda text: text["index"]))
        for one, other in zip(*texts):
            assert one["ids"] == other["ids"] and len(one["ids"]) == 6
            assert one["logits"] == pytest.approx(other["logits"], abs=1e-5)
        assert len(texts[0]) == len(texts[1]) == len(prompts)


# ---- groups and words --------------------------------------------------------------------------------------------
def test_groups(tmp_path):
    """Rank t + tp d: rank 0 of 8 with --tp 2 exchanges activations with 1, and shares what it has with 2, 4 and 6."""
    run = train_gpt(*start(tmp_path, "llama1", 1), "--tp", 2, "-b", 1, "--check-replicas", 1, ranks=8, verbose=True,
                    OMP_NUM_THREADS="1")
    assert set(sent(run)) == {"communication volume of rank 0", "to all ranks", "in tp group 0 (ranks 0, 1)",
                              "in dp group 0 (ranks 0, 2, 4, 6)", "in kv group 0 (ranks 0, 1)"}
    assert "= 1 per micro-step x 1 micro-steps x 4 replicas" in run.out


def test_spelling(tmp_path):
    run = train_gpt(*start(tmp_path, "llama4", 1), "--tensor-model-parallel-size", 2, "-b", 1, ranks=2)
    assert "layout  1 replica of 2 ranks" in run.out


REFUSED = [
    (["--tp", 2], 1, "--tp 2 with 1 rank: a replica of the model is 2 ranks: start a multiple of them"),
    (["--tp", 2], 3, "--tp 2 with 3 ranks: a replica of the model is 2 ranks"),
    (["--tp", 3], 3, "--tp 3: 4 query heads do not divide by it"),
    (["--tp", 2, "--optimizer", "muon"], 2, "--tp 2 with --optimizer muon: it orthogonalizes whole matrices"),
    (["--tp", 2, "-t", 15, "-b", 1], 2, "--tp 2: -b 1 x -t 15 = 15 tokens in a micro-step do not divide by it"),
]


@pytest.mark.parametrize("flags,ranks,words", REFUSED, ids=range(len(REFUSED)))
def test_refused(tmp_path, flags, ranks, words):
    args = [a for a in start(tmp_path, "gpt2")]
    if "-t" in flags:
        args = args[:args.index("-t")] + args[args.index("-t") + 2:]
    run = train_gpt(*args, *flags, ranks=ranks, ok=False, OMP_NUM_THREADS="1")
    assert len(run.complaint) == 1 and words in run.complaint[0], run.err


@pytest.mark.parametrize("tp", [2, 4])
def test_plan_of_each_rank(tmp_path, tp):
    """--plan on one process has the memory that the run's ranks allocate, which the run itself checks."""
    args = [*start(tmp_path, "llama1", 1), "--tp", tp, "-b", 2, "-z", 2]
    plan = train_gpt(*args, "--plan", "--ranks", tp, OMP_NUM_THREADS="1")
    run = train_gpt(*args, ranks=tp, OMP_NUM_THREADS="1")
    rows = [re.search(r"device memory per rank\n(.*?)host memory", r.out, re.S)[1] for r in (plan, run)]
    assert rows[0] == rows[1] and "activations of tensor parallelism" in rows[0]


def test_micro_batches_tried(tmp_path):
    """What --auto and the advice of a run that does not fit try has rows that --tp divides."""
    args = start(tmp_path, "gpt2", 1)
    args[args.index("-t") + 1] = T - 1
    out = train_gpt(*args, "--tp", 2, "-b", 4, "--plan", "--ranks", 2, "--device-mb", 1, OMP_NUM_THREADS="1").out
    tried = [int(b) for b in re.findall(r"^  -z \d -r \S+ +-b (\d+)", out, re.M)]
    assert 2 in tried and not any(b * (T - 1) % 2 for b in tried), out


def test_lost_rank(tmp_path):
    """A rank is stopped: the others end within a minute and name the collective with its group."""
    args = [*start(tmp_path, "llama4", 10**6), *layout(4, 1), "--timeout", 4, "--log-every", 1]
    for attempt in range(3):                       # it may be stopped before a sum over all ranks
        process = subprocess.Popen(command(args, 4, "cpu"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment(OMP_NUM_THREADS="1"), cwd=ROOT)
        while not process.stdout.readline().startswith("step 2/"):
            assert process.poll() is None
        os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
        said = [line for line in err.splitlines() if line.startswith("train_gpt: ")]
        assert process.returncode != 0 and len(said) == 1 and "rank 1 has no heartbeat" in said[0], err
        assert not ranks_of(process.pid)
        if re.search(r"in nccl\w+ of \d+ elements in tp group 0 \(ranks 0, 1, 2, 3\)", said[0]):
            return
    pytest.fail(said[0])
