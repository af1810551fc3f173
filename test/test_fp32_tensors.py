"""--fp32-tensors: some tensors of a 16-bit model are stored in fp32.

GEMMs read them rounded, as with an fp32 master, so if only GEMMs read them all bits must be those of the run without
the flag. Norms and lookups read them in fp32.
"""
import re
import struct

import init
import numpy as np
import pytest
from test_zero import CONFIG, QWEN3, assert_bits, batch, data, start, wide_data
from util import assert_sent_as_planned, built_devices, gpt2_config, model_write, moments, train_gpt, weights

DEVICES = built_devices()
IN_PRODUCTS = "c_attn,mlp,h.1.attn.c_proj"                 # 8, 10 or 12 tensors a block
READ_IN_FP32 = {"gpt2": "wpe,ln_1,*.ln_f.*", "qwen3": "embed_tokens,*norm.weight", "wide": "embed_tokens,lm_head,norm"}


def bf16(folder, kind="gpt2", steps=4, precision="bf16"):
    args = wide_data(folder, steps) if kind == "wide" else start(folder, {"gpt2": CONFIG, "qwen3": QWEN3}[kind], steps)
    return [*args, "-p", precision]


def is_whole(tensor):
    """Has it anything below the 16 bits of a bf16?"""
    return bool((tensor.view(np.uint32) & 0xFFFF).any())


@pytest.mark.parametrize("device,precision,optimizer",
                         [(device, *row) for device in DEVICES
                          for row in [("bf16", "adamw"), ("bf16", "lamb"), ("bf16", "muon"), ("fp16", "adamw")]
                          if device == "cpu" or row[1] == "muon"])
def test_bits_of_a_master(tmp_path, device, precision, optimizer):
    """Read by GEMMs alone: weights, moments and losses of the run with an fp32 master. In LAMB the 42 tensors are
    more than one launch takes, in Muon most are hidden matrices, without a v."""
    args = [*bf16(tmp_path, precision=precision), *batch(1, 2, 4), "--optimizer", optimizer, "--clip", 0]
    whole = train_gpt(*args, device=device, out=tmp_path / "whole")
    chosen = train_gpt(*args, "--fp32-tensors", IN_PRODUCTS, device=device, out=tmp_path / "chosen")
    assert re.search(r"^fp32 +32 tensors", chosen.out, re.M)
    assert chosen.series("loss") == whole.series("loss")
    assert chosen.log[-1]["state_hash"] == whole.log[-1]["state_hash"]
    for ours, theirs in zip((weights(chosen.checkpoint(4)), *moments(chosen.checkpoint(4))),
                            (weights(whole.checkpoint(4)), *moments(whole.checkpoint(4)))):
        assert ours.keys() == theirs.keys() and all(ours[k].tobytes() == theirs[k].tobytes() for k in theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "wide"])
def test_stages_agree(tmp_path, device, kind):
    """Every stage: losses and norms of one rank as close as fp32 sums in another order leave them in 16 bits, bytes as
    planned; at one number of ranks the bits do not depend on stage, overlap, recomputation and bucket."""
    args = [*bf16(tmp_path, kind), "--fp32-tensors", READ_IN_FP32[kind], "--deterministic", "--check-replicas", 2]
    one = train_gpt(*args, *batch(1, 2, 4), device=device, out=tmp_path / "one")
    layouts = [(1, []), (2, ["--overlap", 0]), (3, ["-r", "block", "--gather-bucket", 10**6]),
               (0, ["--reduce-bucket", 10**6])]
    runs = []
    for stage, more in layouts if device == "cpu" else layouts[2:3]:
        run = train_gpt(*args, *batch(2, 2, 4), "-z", stage, *more, ranks=2, device=device, out=tmp_path / f"z{stage}",
                        verbose=True, EMU_SEED="3")
        assert run.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
        assert run.series("norm") == pytest.approx(one.series("norm"), rel=1e-3)
        assert_sent_as_planned(run, 4)
        runs.append(run)
    if kind != "wide":                                     # there stage 3 makes the head's sums in another order
        assert all(run.series("loss") == runs[0].series("loss") for run in runs)


@pytest.mark.parametrize("device", DEVICES)
def test_storage(tmp_path, device):
    """Beside bf16 weights, moments and gradients: the chosen tensors alone have more than 16 bits, and the bytes
    sent are theirs in fp32, the others' in bf16: gradients of blocks in both micro-steps, of the rest once."""
    listed = ["transformer.wte.weight", *(f"transformer.h.{k}.ln_2.{p}" for k in range(5) for p in ("weight", "bias"))]
    args = [*bf16(tmp_path), *batch(2, 2, 4), "-z", 2, "--master", "none", "--state-dtype", "bf16", "--grad-dtype",
            "bf16", "--fp32-tensors", "wte,ln_2"]
    run = train_gpt(*args, ranks=2, device=device, out=tmp_path / "run", verbose=True)
    assert_sent_as_planned(run, 4)
    for tensors in (weights(run.checkpoint(4)), *moments(run.checkpoint(4))):
        assert {name for name in tensors if is_whole(tensors[name])} == set(listed)
    C, chosen = 24, 128 * 24 + 10 * 64                     # V and vectors are padded to 64
    block = 12 * C**2 + 2 * 64 + 2 * 128 + 2 * 64          # ln_1, the wide biases, the others
    rest = 16 * C + 2 * 64                                 # positions, the last norm
    wire = (8 * chosen + 2 * (2 * 5 * block + rest) + 2 * (5 * block + rest)) // 2 + 48    # 48 of sums
    assert int(re.search(r"planned per step (\d+)", run.out)[1]) == wire


def test_resume(tmp_path):
    """Stopped and resumed, the same bits; with the flag turned on or off, close. An export has the saved weights."""
    args = [*bf16(tmp_path, "qwen3", 6), *batch(2, 2, 4), "-z", 3, "--save-every", 3]
    chosen = ["--fp32-tensors", READ_IN_FP32["qwen3"]]
    whole = train_gpt(*args, *chosen, ranks=2, out=tmp_path / "whole")
    saved = weights(whole.checkpoint(3))
    assert is_whole(saved["model.norm.weight"])
    rest = train_gpt("--resume", whole.checkpoint(3), *args[3:], *chosen, ranks=2, out=tmp_path / "rest")
    assert_bits(rest, whole, first=3)
    plain = train_gpt(*args, ranks=2, out=tmp_path / "plain")
    for run, more in ((plain, chosen), (whole, [])):
        other = train_gpt("--resume", run.checkpoint(3), *args[3:], *more, ranks=2, out=tmp_path / f"to{len(more)}")
        assert other.series("loss") == pytest.approx(run.series("loss")[3:], rel=1e-3)
    train_gpt("--export", tmp_path / "export", "-m", whole.checkpoint(3), "-p", "bf16", *chosen, "-z", 3, ranks=2)
    assert (weights(tmp_path / "export")["model.norm.weight"] == saved["model.norm.weight"]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name,listed", [("transformer.ln_f.weight", "ln_f"), ("transformer.wpe.weight", "wpe"),
                                         ("transformer.wte.weight", "wte")])
def test_read_in_fp32(tmp_path, device, name, listed):
    """A change below a bf16's last bit is seen in the loss where the tensor is kept in fp32, and nowhere else. Of a
    tied wte by the lookup alone."""
    data(tmp_path)
    losses = {}
    for factor in (1, 1 + 2**-11):
        config = gpt2_config(97, 24, 16, L=2, NH=3)
        tensors = dict(init.gpt2_weights(config, 1))
        rounded = (tensors[name].view(np.uint32) & 0xFFFF0000).view(np.float32)
        tensors[name] = (rounded * np.float32(factor)).astype(np.float32)
        folder = model_write(tmp_path / f"model{factor}", config, tensors)
        for flags in ((), ("--fp32-tensors", listed)):
            out = train_gpt("--eval", "-m", folder, "-d", tmp_path / "data", "-p", "bf16", *flags, device=device).out
            losses[factor, flags != ()] = re.search(r"val .*?loss (\d+\.\d+)", out)[1]
    same, seen = (losses[1, flag] == losses[1 + 2**-11, flag] for flag in (False, True))
    assert same and not seen, losses


@pytest.mark.parametrize("flags,words", [
    (["--fp32-tensors", "ln_9"], "'ln_9': no tensor has that in its name"),
    (["--fp32-tensors", ","], "',': names no tensor"),
    (["--fp32-tensors", "ln_f.weight"], "transformer.ln_f.weight and transformer.ln_f.bias go together"),
    (["--fp32-tensors", "ln_f", "-p", "fp32"], "in fp32 all tensors are")])
def test_refused(tmp_path, flags, words):
    args = bf16(tmp_path)
    run = train_gpt(*(args[:-2] if "-p" in flags else args), *flags, "-b", 2, ok=False)
    assert run.code == 2 and words in run.complaint[0]


@pytest.mark.parametrize("kind", ["proj", "norm"])
def test_go_together(tmp_path, kind):
    run = train_gpt(*bf16(tmp_path, "qwen3"), "--fp32-tensors", f"q_{kind}", "-b", 2, ok=False)
    said = f"q_{kind}.weight and model.layers.0.self_attn.k_{kind}.weight go together"
    assert run.code == 2 and said in run.complaint[0]
