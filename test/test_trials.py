"""Hand-computed trials: tiny models whose losses, gradients and updates are derived by hand.

Z   zero-weight model: the loss is ln V, only column 0 of wte has a gradient
Z2  two windows, over ranks and micro-steps: means, not sums, not one rank's share
U   targets that do not count: the mean over those that do, of all ranks and micro-steps
E   Adam's epsilon, and clipping by the global norm
W   weight decay and the schedule, with no gradient at all
D   which window each rank sees, read off the loss
TIE the tied head: its gradient and the embedding's add up
R   LLaMA: which elements rotary embedding pairs
K   LLaMA: the epsilon of RMSNorm
X   import and export are byte-equal, for vocabularies on both sides of the padding
Each at ZeRO stages 0 to 3 and 1 to 4 ranks, on one of the devices (on each with TRAIN_GPT_FULL=1).
"""
import json
import re

import init
import numpy as np
import pytest
from util import (built_devices, docs_write, gpt2_config, llama_config, model_write, moments, safetensors_header,
                  safetensors_write, shard_write, train_gpt, weights)

WTE = "transformer.wte.weight"
STAGES = [0, 1, 2, 3]
RANKS = [pytest.param(1, marks=pytest.mark.quick), 2, 3, 4]
PLAIN = ["--schedule", "constant", "--warmup", 0, "--weight-decay", 0, "--no-shuffle", "--sample-tokens", 0,
         "--clip", 0]
LAYOUTS = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (3, 2, 1), (4, 1, 1), (4, 2, 1)]   # ranks, micro-steps, micro-batch

pytestmark = pytest.mark.pairwise                    # of the stages, numbers of ranks and devices


def same_copies(device, V, **_):
    """Large vocabularies on the emulated device: the copies are the same code as on the CPU."""
    return device == "emu" and V > 129


@pytest.fixture(params=built_devices())
def device(request):
    return request.param


def zero_model(folder, V, C, T, wte=None, ln_f_bias=(), ln_f_weight=0.0):
    """All tensors 0 but the weights of ln_1 and ln_2, and those given."""
    config = gpt2_config(V, C, T)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in init.gpt2_shapes(config).items()}
    tensors["transformer.h.0.ln_1.weight"][:] = 1
    tensors["transformer.h.0.ln_2.weight"][:] = 1
    tensors["transformer.ln_f.weight"][:] = ln_f_weight
    tensors["transformer.ln_f.bias"][:len(ln_f_bias)] = ln_f_bias
    if wte is not None:
        tensors[WTE][:] = wte
    return model_write(folder, config, tensors)


def model_z(tmp_path):
    return zero_model(tmp_path / "model", V=5, C=4, T=4, ln_f_bias=[1])


def shards(tmp_path, tokens, copies):
    for copy in range(copies):
        shard_write(tmp_path / "data" / f"train_{copy:06d}.bin", tokens)
    return tmp_path / "data"


def column(gradient, C=4):
    """(V, C) with the gradient in column 0 and 0 elsewhere."""
    full = np.zeros((len(gradient), C))
    full[:, 0] = gradient
    return full


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_z(tmp_path, device, stage, ranks):
    model, data = model_z(tmp_path), shards(tmp_path, [0, 1, 1, 2, 3], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 2, "-l", 0.1, "--save-every", 1, *PLAIN,
                    ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("loss") == pytest.approx([1.609438, 1.534167], abs=2e-6)
    assert run.series("norm")[0] == pytest.approx(0.418330, abs=2e-6)
    gradient = column([0.2, -0.3, -0.05, -0.05, 0.2])
    m, v = moments(run.checkpoint(1))
    for name in m:
        expected = gradient if name == WTE else 0
        assert m[name] == pytest.approx(0.1 * expected, abs=1e-8), name
        assert v[name] == pytest.approx(0.05 * expected**2 if name == WTE else 0, abs=1e-8), name
        if name != WTE:
            assert not m[name].any() and not v[name].any(), f"{name} must have a gradient of exactly 0"
    assert not m[WTE][:, 1:].any()
    after = weights(run.checkpoint(1))[WTE]
    assert after.shape == (5, 4)
    assert after == pytest.approx(column([-0.1, 0.1, 0.1, 0.1, -0.1]), abs=1e-6)


@pytest.mark.parametrize("ranks,grad_accum,micro_batch", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_z2(tmp_path, device, stage, ranks, grad_accum, micro_batch):
    copies = max(1, ranks * grad_accum * micro_batch // 2)
    model, data = model_z(tmp_path), shards(tmp_path, [0, 1, 1, 2, 3, 4, 4, 4, 4], copies)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", micro_batch, "-g", grad_accum, "-n", 1, "-l", 0.1,
                    *PLAIN, ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("norm")[0] == pytest.approx(0.379144, abs=2e-6)
    m, _ = moments(run.checkpoint(1))
    assert m[WTE] == pytest.approx(0.1 * column([0.2, -0.05, 0.075, 0.075, -0.3]), abs=1e-7)


def shards_u(tmp_path, copies):
    """Z2's windows; of the second only the first target counts."""
    data = shards(tmp_path, [0, 1, 1, 2, 3, 4, 4, 4, 4], copies)
    for path in data.glob("*.bin"):
        docs_write(path, counts=[0, 1, 1, 1, 1, 1, 0, 0, 0], begins=[0])
    return data


@pytest.mark.parametrize("ranks,grad_accum,micro_batch", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_u(tmp_path, device, stage, ranks, grad_accum, micro_batch):
    """One rank or micro-step has four targets, the other one: a mean of means would give 0.379144."""
    copies = ranks * grad_accum * micro_batch // 2
    model, data = model_z(tmp_path), shards_u(tmp_path, copies)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", micro_batch, "-g", grad_accum, "-n", 1, "-l", 0.1,
                    "--documents", "joined", *PLAIN, ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("loss")[0] == pytest.approx(1.609438, abs=2e-6)
    assert run.series("norm")[0] == pytest.approx(0.282843, abs=2e-6)
    assert run.series("tokens")[0] == 5 * copies
    m, _ = moments(run.checkpoint(1))
    assert m[WTE] == pytest.approx(0.1 * column([0.2, -0.2, 0, 0, 0]), abs=1e-7)
    assert f"{9 * copies} tokens in" in run.out and f"of which {5 * copies} count in the loss" in run.out


@pytest.mark.parametrize("stage,ranks", [(0, 1), (0, 3), (3, 1), (3, 2)])
def test_u_validation(tmp_path, device, stage, ranks):
    """The loss of target k is 0.1 k lower: ln(sum of e^(0.1 k)) less a tenth of the counted targets' mean, 11/5."""
    wte = np.outer(0.1 * np.arange(5), [1, 0, 0, 0]).astype(np.float32)
    model = zero_model(tmp_path / "model", V=5, C=4, T=4, wte=wte, ln_f_bias=[1])
    run = train_gpt("--eval", "-m", model, "-d", shards_u(tmp_path, 3), "-v", tmp_path / "data/train_*.bin", "-b", 1,
                    "-z", stage, "--documents", "joined", ranks=ranks, device=device)
    loss, tokens = re.search(r"val \| loss ([\d.]+) .* per token, (\d+) tokens", run.out).groups()
    assert float(loss) == pytest.approx(np.log(np.exp(wte[:, 0]).sum()) - 0.22, abs=2e-6) and tokens == "15"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_u_without_targets(tmp_path, device, stage, ranks):
    """A step in which no token counts changes nothing, and is a step; a validation of none prints n/a."""
    path = tmp_path / "data/train_000000.bin"
    tokens = np.resize([0, 1, 1, 2, 3], 8 * ranks + 1)
    shard_write(path, tokens)
    docs_write(path, counts=[0] * (4 * ranks + 1) + [1] * (4 * ranks), begins=[0])
    run = train_gpt("-m", model_z(tmp_path), "-d", path.parent, "-v", path, "-z", stage, "-b", 1, "-n", 2, "-l", 0.1,
                    "--save-every", 1, "--eval-every", 1, "--eval-batches", 1, "--documents", "joined", *PLAIN,
                    ranks=ranks, device=device,
                    out=tmp_path / "run")
    assert run.out.count("SKIPPED: no token counts") == 1 and run.out.count("loss n/a: no token counts in its") == 2
    assert [entry["tokens"] for entry in run.log] == [0, 4 * ranks]
    assert run.log[0]["loss"] is None and run.log[1]["loss"] == pytest.approx(1.609438, abs=2e-6)
    assert not weights(run.checkpoint(1))[WTE].any() and weights(run.checkpoint(2))[WTE].any()


@pytest.mark.parametrize("clip,expected", [(0, [-0.0666667, 0.0750000, 0.0333333, 0.0333333, -0.0666667]),
                                           (0.1, [-0.0323452, 0.0417635, 0.0106762, 0.0106762, -0.0323452])])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_e(tmp_path, device, stage, ranks, clip, expected):
    model, data = model_z(tmp_path), shards(tmp_path, [0, 1, 1, 2, 3], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 1, "-l", 0.1, "--eps", 0.1, *PLAIN[:-1], clip,
                    ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("norm")[0] == pytest.approx(0.418330, abs=2e-6)
    assert weights(run.checkpoint(1))[WTE][:, 0] == pytest.approx(expected, abs=2e-7)


def model_w(tmp_path):
    """Every gradient is mathematically 0. In fp32 the gradient of ln_f.bias, a sum of V terms that cancel, is exactly 0
    only while the weights are powers of two; after that it is rounding noise of 1e-8, which Adam at eps 1e-8 would turn
    into full steps. So W runs at eps 1, which no number of the trial depends on."""
    config = gpt2_config(4, 4, 4)
    tensors = {name: np.ones(shape, np.float32) for name, shape in init.gpt2_shapes(config).items()}
    tensors["transformer.ln_f.weight"][:] = 0
    tensors["transformer.ln_f.bias"][:] = 0
    return model_write(tmp_path / "model", config, tensors)


def assert_decayed(folder, factor):
    for name, tensor in weights(folder).items():
        if tensor.ndim == 2:
            assert tensor == pytest.approx(np.full(tensor.shape, factor), abs=5e-7), name
        elif "ln_f" in name:
            assert np.all(abs(tensor) < 1e-7), name
        else:
            assert np.all(tensor == 1), f"{name} is 1-D: it must not decay"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_w_decay(tmp_path, device, stage, ranks):
    model, data = model_w(tmp_path), shards(tmp_path, [0, 1, 2, 3, 0], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 2, "-l", 0.1, "--weight-decay", 0.5,
                    "--eps", 1, "--warmup", 0, "--schedule", "constant", "--save-every", 1, "--sample-tokens", 0,
                    ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("loss") == pytest.approx([1.386294] * 2, abs=2e-6)
    assert run.series("norm") == pytest.approx([0, 0], abs=2e-7)
    assert_decayed(run.checkpoint(1), 0.95)
    assert_decayed(run.checkpoint(2), 0.9025)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_w_schedule(tmp_path, device, stage, ranks):
    model, data = model_w(tmp_path), shards(tmp_path, [0, 1, 2, 3, 0], ranks)
    flags = ["-d", data, "-z", stage, "-b", 1, "-n", 8, "-l", 0.1, "--min-lr", 0.01, "--warmup", 4, "--weight-decay", 1,
             "--eps", 1, "--schedule", "cosine", "--save-every", 4, "--sample-tokens", 0]
    lrs = [0.025, 0.05, 0.075, 0.1, 0.1, 0.0868198, 0.055, 0.0231802]
    whole = train_gpt("-m", model, *flags, ranks=ranks, device=device, out=tmp_path / "whole")
    assert whole.series("lr") == pytest.approx(lrs, abs=1e-7)
    assert_decayed(whole.checkpoint(4), 0.7711031)
    assert_decayed(whole.checkpoint(8), 0.5850025)
    rest = train_gpt("--resume", whole.checkpoint(4), *flags, ranks=ranks, device=device, out=tmp_path / "rest")
    assert [entry["step"] for entry in rest.log] == [5, 6, 7, 8]
    assert rest.series("lr") == whole.series("lr")[4:]
    for name, tensor in weights(whole.checkpoint(8)).items():
        assert np.array_equal(tensor, weights(rest.checkpoint(8))[name]), name


def run_d(tmp_path, device, *args, **kw):
    """The k of each window of the run, R of them summed in one step: loss = 3.626651 - 0.1 * mean k."""
    wte = column(0.1 * np.arange(16))
    model = zero_model(tmp_path / "model", V=16, C=4, T=4, wte=wte, ln_f_bias=[1])
    data = shards(tmp_path, [0] + [k for k in range(16) for _ in range(4)], 1)
    flags = ["--resume" if "resume" in kw else "-m", kw.pop("resume", model), "-d", data, "-b", 1, "-l", 0,
             "--schedule", "constant", "--warmup", 0, "--sample-tokens", 0]
    run = train_gpt(*flags, *args, device=device, **kw)
    ks = (3.626651 - np.array(run.series("loss"))) / 0.1 * kw.get("ranks", 1)
    assert ks == pytest.approx(np.round(ks), abs=1e-3)
    return [int(k) for k in np.round(ks)]


@pytest.mark.parametrize("stage", STAGES)
def test_d_in_order(tmp_path, device, stage):
    ks = run_d(tmp_path, device, "-n", 20, "-z", stage, "--no-shuffle", out=tmp_path / "run")
    assert ks == [*range(16), *range(4)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_d_ranks_in_order(tmp_path, device, stage, ranks):
    """Windows go round the ranks; with 3 ranks the last of an epoch carries over into the next."""
    ks = run_d(tmp_path, device, "-n", 16, "-z", stage, "--no-shuffle", ranks=ranks, out=tmp_path / "run")
    assert ks == [sum((step * ranks + r) % 16 for r in range(ranks)) for step in range(16)]


def test_d_shuffled(tmp_path, device):
    ks = run_d(tmp_path, device, "-n", 48, out=tmp_path / "run")
    epochs = [ks[0:16], ks[16:32], ks[32:48]]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])
    assert run_d(tmp_path, device, "-n", 16, "-s", 7, out=tmp_path / "seed") != epochs[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_d_ranks_shuffled(tmp_path, device, ranks):
    """The order depends on the seed alone: ranks share out the same series, and an epoch's mean is 3.626651 - 0.75."""
    one = run_d(tmp_path, device, "-n", 32, out=tmp_path / "one")
    many = run_d(tmp_path, device, "-n", 32 // ranks, "-z", 2, ranks=ranks, out=tmp_path / "many")
    assert many == [sum(one[step * ranks:(step + 1) * ranks]) for step in range(32 // ranks)]
    assert 3.626651 - 0.1 * sum(many[:16 // ranks]) / 16 == pytest.approx(2.876651, abs=1e-6)


@pytest.mark.parametrize("stop", [1, 15, 16, 17, 30])
def test_d_resume(tmp_path, device, stop):
    whole = run_d(tmp_path, device, "-n", 34, "--save-every", stop, out=tmp_path / "whole")
    rest = run_d(tmp_path, device, "-n", 34, resume=tmp_path / "whole" / f"step_{stop:08d}", out=tmp_path / "rest")
    assert rest == whole[stop:]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_tie(tmp_path, device, stage, ranks):
    model = zero_model(tmp_path / "model", V=4, C=4, T=2, wte=np.eye(4), ln_f_weight=1)
    data = shards(tmp_path, [0, 1, 2], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 1, "-l", 0.1, *PLAIN, ranks=ranks,
                    device=device, out=tmp_path / "run")
    assert run.series("loss") == pytest.approx([2.570149], abs=2e-6)
    assert run.series("norm") == pytest.approx([3.267383], abs=5e-6)
    m, _ = moments(run.checkpoint(1))
    assert 10 * m[WTE][0] == pytest.approx([0.645149, -0.925923, 0.140387, 0.140387], abs=5e-6)
    assert 10 * np.linalg.norm(m[WTE].astype(np.float64)) == pytest.approx(2.053099, abs=5e-6)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_r(tmp_path, device, stage, ranks):
    """Interleaved pairs would give 1.627663."""
    model, data = model_r(tmp_path / "model"), shards(tmp_path, [0, 1, 3], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 1, "-l", 0, *PLAIN, ranks=ranks, device=device,
                    out=tmp_path / "run")
    assert run.series("loss") == pytest.approx([1.481067], abs=2e-6)


@pytest.mark.parametrize("ranks,stage,cache", [(1, 0, []), (1, 0, ["--no-kv-cache"]), (2, 2, []), (3, 1, []),
                                               (3, 3, []), (2, 3, ["--no-kv-cache"])])
def test_r_tokens(tmp_path, device, ranks, stage, cache):
    """The loss of each token, from the logits after it; by both ways through the model."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"ids": ids, "max_tokens": 0, "logits": True}) + "\n"
                                                    for ids in ([0], [0, 1])))
    run = train_gpt("-m", model_r(tmp_path / "model"), "--prompts", tmp_path / "prompts.jsonl", "-z", stage, *cache,
                    ranks=ranks, device=device)
    lines = sorted(map(json.loads, run.out.splitlines()), key=lambda line: line["index"])
    for line, target, loss in zip(lines, [1, 3], [2.344540, 0.617594], strict=True):
        logits = np.array(line["logits"])
        assert np.log(np.exp(logits).sum()) - logits[target] == pytest.approx(loss, abs=2e-6)


def model_r(folder):
    config = llama_config(4, 4, 2)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in init.llama_shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name][:] = 1
    attention = "model.layers.0.self_attn."
    for name in ("model.embed_tokens.weight", "lm_head.weight", attention + "o_proj.weight"):
        tensors[name][:] = np.eye(4)
    tensors[attention + "v_proj.weight"][3][0] = 1
    tensors[attention + "q_proj.weight"][0][1] = 1
    tensors[attention + "k_proj.weight"][2][0] = 1
    return model_write(folder, config, tensors)


@pytest.mark.parametrize("eps,losses", [(1e-5, [1.894664, 1.593153, 1.291642, 0.990130]),
                                        (1e-6, [2.739776, 2.032669, 1.325562, 0.618455])])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_k(tmp_path, device, stage, ranks, eps, losses):
    """A window whose targets are all k has the loss of target k; the shard holds the windows in order."""
    config = llama_config(4, 4, 2, rms_norm_eps=eps)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in init.llama_shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name][:] = 1
    tensors["model.embed_tokens.weight"][:] = 0.001
    tensors["lm_head.weight"][:] = (np.arange(4) / 4)[:, None]
    model, data = model_write(tmp_path / "model", config, tensors), shards(tmp_path, [0, 0, 0, 1, 1, 2, 2, 3, 3], ranks)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-n", 4, "-l", 0, *PLAIN, ranks=ranks, device=device,
                    out=tmp_path / "run")
    expected = losses if ranks == 1 else [np.mean([losses[(step * ranks + r) % 4] for r in range(ranks)])
                                          for step in range(4)]
    assert run.series("loss") == pytest.approx(expected, abs=2e-6)


def random_model(folder, config, prefix="transformer."):
    rng = np.random.default_rng(0)
    names = {name.replace("transformer.", prefix): shape for name, shape in init.gpt2_shapes(config).items()}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = (config["vocab_size"], config["n_embd"])
    return model_write(folder, config, {n: rng.standard_normal(s).astype(np.float32) for n, s in names.items()})


@pytest.mark.pairwise(without=same_copies)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks,stage", [(1, 0), (3, 2)])
@pytest.mark.parametrize("V", [127, 128, 129, 50257, 32000, 128256])
def test_x(tmp_path, device, V, ranks, stage, tied):
    config = gpt2_config(V, 8, 16, L=2, NH=2, tie_word_embeddings=tied, n_inner=24, summary_type="cls_index")
    model = random_model(tmp_path / "model", config)
    train_gpt("-m", model, "--export", tmp_path / "export", "-z", stage, ranks=ranks, device=device)
    before, after = weights(model), weights(tmp_path / "export")
    assert set(before) == set(after)
    assert ("lm_head.weight" in after) == (not tied)
    assert after[WTE].shape == (V, 8)
    for name in before:
        assert before[name].tobytes() == after[name].tobytes(), name
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == {**config, "n_ctx": 16}
    assert safetensors_header(tmp_path / "export" / "model.safetensors")["__metadata__"]["format"] == "pt"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_x_layouts(tmp_path, device, stage, ranks):
    """Every stage and number of ranks, each with one vocabulary."""
    test_x(tmp_path, device, 126 + (stage + ranks) % 3 + 1, ranks, stage, tied=ranks % 2 == 0)


@pytest.mark.pairwise(without=same_copies)
@pytest.mark.parametrize("model_type,ranks,stage", [("llama", 1, 0), ("qwen3", 3, 2), ("qwen2", 2, 1),
                                                    ("mistral", 4, 2)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("V", [127, 128, 129, 50257, 32000, 128256])
def test_x_llama(tmp_path, device, V, tied, model_type, ranks, stage):
    config = llama_config(V, 8, 16, L=2, NH=2, F=12, model_type=model_type, num_key_value_heads=1, head_dim=6,
                          tie_word_embeddings=tied, bos_token_id=1)
    tensors = init.random_weights(init.llama_shapes(config), 3, 0.5)
    model = model_write(tmp_path / "model", config, tensors)
    train_gpt("-m", model, "--export", tmp_path / "export", "-z", stage, ranks=ranks, device=device)
    after = weights(tmp_path / "export")
    assert set(tensors) == set(after)
    assert ("lm_head.weight" in after) == (not tied)
    assert after["model.embed_tokens.weight"].shape == (V, 8)
    for name in tensors:
        assert tensors[name].tobytes() == after[name].tobytes(), name
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == config
    assert safetensors_header(tmp_path / "export" / "model.safetensors")["__metadata__"]["format"] == "pt"


def test_x_names_without_prefix(tmp_path, device):
    """The published GPT-2 files leave `transformer.` out and hold each block's mask, which is no weight."""
    config = gpt2_config(97, 8, 16)
    model = random_model(tmp_path / "model", config, prefix="")
    tensors = weights(model)
    safetensors_write(model / "model.safetensors", {**tensors, "h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)})
    train_gpt("-m", model, "--export", tmp_path / "export", device=device)
    after = weights(tmp_path / "export")
    assert {name.removeprefix("transformer.") for name in after} == set(tensors)
    for name, tensor in after.items():
        assert tensor.tobytes() == tensors[name.removeprefix("transformer.")].tobytes(), name
