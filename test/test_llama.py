"""GPT-2, LLaMA, Mistral, Qwen2, Qwen3 and Arcee against transformers. dev/golden_llama.py made test/golden/families*.

Losses and logits agree to 2e-5 relative, and each tensor's gradient g to 2e-5 |g| + 1e-7 |all gradients|. Where
transformers itself is installed, folders go both ways.
"""
import json
import re
import subprocess
import time

import init
import numpy as np
import pytest
from util import (ROOT, built_devices, command, environment, gpt2_config, llama_config, model_write, moments,
                  safetensors_read, shard_write, train_gpt, weights)

GOLDEN = ROOT / "test" / "golden"
ABOUT = json.loads((GOLDEN / "families.json").read_text())
NAMES = list(ABOUT["configs"])
B, T = ABOUT["B"], ABOUT["T"]
QUIET = ["--no-shuffle", "--sample-tokens", 0, "--schedule", "constant", "--warmup", 0]


@pytest.fixture(params=built_devices())
def device(request):
    return request.param


def golden_tensors(name):
    config = ABOUT["configs"][name]
    shapes = init.gpt2_shapes(config) if config["model_type"] == "gpt2" else init.llama_shapes(config)
    return config, init.random_weights(shapes, ABOUT["seed"], ABOUT["std"])


def golden_model(folder, name):
    return model_write(folder, *golden_tensors(name))


def golden_data(folder, V, num_batches=1):
    shard_write(folder / "train_000000.bin", init.tokens(num_batches * B * T + 1, V, ABOUT["seed"]), V)
    return folder


@pytest.mark.pairwise
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks,stage,micro_batch,grad_accum", [(1, 0, 2, 1), (2, 2, 1, 1), (1, 1, 1, 2)])
def test_gradients(tmp_path, device, name, ranks, stage, micro_batch, grad_accum):
    """After one step from nothing, Adam's first moment is a tenth of the gradient."""
    golden = safetensors_read(GOLDEN / f"families_{name}.safetensors")
    model, data = golden_model(tmp_path / "model", name), golden_data(tmp_path / "data", 61)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", micro_batch, "-g", grad_accum, "-t", T, "-n", 1,
                    "-l", 0, "--clip", 0, "--beta1", 0.9, *QUIET, ranks=ranks, device=device, out=tmp_path / "run")
    assert run.series("loss")[0] == pytest.approx(golden["losses"].astype(np.float64).mean(), rel=2e-5)
    grads = {key[5:]: value.astype(np.float64) for key, value in golden.items() if key.startswith("grad.")}
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert run.series("norm")[0] == pytest.approx(norm, rel=2e-5)
    m, _ = moments(run.checkpoint(1))
    assert set(m) == set(grads)
    for key, g in grads.items():
        off = np.linalg.norm(10 * m[key].astype(np.float64) - g)
        assert off <= 2e-5 * np.linalg.norm(g) + 1e-7 * norm, (key, off / np.linalg.norm(g))


def test_each_family_has_golden_files():
    table = (ROOT / "model" / "shapes.cuh").read_text().split("families[] = {")[1].split("};")[0]
    families = re.findall(r'^    \{"(\w+)", ', table, re.M)
    assert set(families) == {config["model_type"] for config in ABOUT["configs"].values()} and len(families) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_has_a_gradient(tmp_path, name):
    """Also one that no golden file has: what the forward uses and the backward forgets is named."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ABOUT["configs"][name]))
    run = train_gpt("-m", tmp_path / "model", "--from-scratch", "-d", golden_data(tmp_path / "data", 61), "-b", 2,
                    "-t", T, "-n", 1, *QUIET, out=tmp_path / "run")
    m, _ = moments(run.checkpoint(1))
    assert [key for key in m if not np.any(m[key])] == []


@pytest.mark.pairwise
@pytest.mark.parametrize("name", [name for name in NAMES if re.match("qwen3|.*window", name)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ten_steps(tmp_path, device, name, ranks, stage):
    """Of AdamW, as PyTorch takes them; then the checkpoint is transformers' again."""
    model, config = golden_model(tmp_path / "model", name), ABOUT["configs"][name]
    step_B, golden = ABOUT["step_B"], json.loads((GOLDEN / "families_steps.json").read_text())[name]
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(10 * step_B * T + 1, 61, ABOUT["seed"]), 61)
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-z", stage, "-b", step_B // ranks, "-t", T, "-n", 10, "-l",
                    ABOUT["lr"], *QUIET, ranks=ranks, device=device, out=tmp_path / "run", OMP_NUM_THREADS="1")
    assert run.series("loss") == pytest.approx(golden["loss"], rel=1e-5)
    assert run.series("norm") == pytest.approx(golden["norm"], rel=1e-5)
    saved = safetensors_read(run.checkpoint(10) / "model.safetensors")
    assert {key: x.shape for key, x in saved.items()} == init.llama_shapes(config)


@pytest.mark.parametrize("change,complaint", [
    ({"model_type": "gemma"}, "gemma"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"num_key_value_heads": 2}, "3 query heads"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"), ({"head_dim": 7}, "head size 7"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ({"hidden_size": 25}, "25"), ({"hidden_size": None}, "hidden_size")])
def test_refused_by_name(tmp_path, change, complaint):
    config, tensors = golden_tensors("mha")
    model = model_write(tmp_path / "model", {**config, **change}, tensors)
    run = train_gpt("-m", model, "--export", tmp_path / "export", ok=False)
    assert run.code == 1 and complaint in run.err and "config.json" in run.err


@pytest.mark.parametrize("change", [{"rope_theta": 500000.0}, {"rms_norm_eps": 1e-3}, {"hidden_act": "silu"},
                                    {"rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": {}},
                                    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}])
def test_setting_counts(tmp_path, change):
    """Each setting reaches the numbers (hidden_act silu is what it is already), in both spellings."""
    config, tensors = golden_tensors("mha")
    data = golden_data(tmp_path / "data", 61)
    losses = []
    for settings in (config, {**config, **change}):
        folder = tmp_path / f"model{len(losses)}"
        run = train_gpt("-m", model_write(folder, settings, tensors), "-d", data, "-t", T, "-b", 2, "-n", 1, "-l", 0,
                        *QUIET, out=tmp_path / f"run{len(losses)}")
        losses.append(run.series("loss")[0])
    assert (losses[0] == losses[1]) == ("hidden_act" in change)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks,stage,micro_batch", [(1, 0, 2), (1, 0, 3), (3, 2, 1), (2, 3, 1)])
def test_eval(tmp_path, device, name, ranks, stage, micro_batch):
    """Loss and perplexity per token, and per word and byte if the shard has their number."""
    losses = safetensors_read(GOLDEN / f"families_{name}.safetensors")["losses"].astype(np.float64)
    data, tokens = golden_data(tmp_path / "data", 61), B * T + 1
    shard = bytearray((data / "train_000000.bin").read_bytes())
    shard[20:36] = (200).to_bytes(8, "little") + (37).to_bytes(8, "little")           # bytes and words of its text
    (data / "val_000000.bin").write_bytes(shard)
    run = train_gpt("-m", golden_model(tmp_path / "model", name), "-d", data, "--eval", "-t", T, "-b", micro_batch,
                    "-z", stage, ranks=ranks, device=device)
    said = re.search(r"val \| loss (\S+) \| perplexity (\S+) per token, (\d+) tokens \| (\S+) bits per byte"
                     r" \| perplexity (\S+) per word", run.out)
    loss = losses.mean()
    assert int(said[3]) == B * T
    assert [float(said[k]) for k in (1, 2, 4, 5)] == pytest.approx(
        [loss, np.exp(loss), loss / np.log(2) * tokens / 200, np.exp(loss * tokens / 37)], rel=1e-4)


PARAMETERS = {"gpt2": 124.44, "llama-60m": 58.07, "llama-1b": 1100.05, "llama2-7b": 6738.42, "llama3-8b": 8030.26,
              "qwen2.5-0.5b": 494.03, "qwen2.5-1.5b": 1543.71, "qwen3-0.6b": 596.05, "qwen3-1.7b": 1720.57,
              "qwen3-4b": 4022.47, "qwen3-8b": 8190.74, "qwen3-14b": 14768.31, "qwen3-32b": 32762.12}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets(preset):
    """The published numbers of parameters; `--plan` needs no memory for them."""
    run = train_gpt("--plan", "-m", preset, "-b", 1, "-t", 64, "-d", "nowhere")   # no data that sets a vocabulary
    assert f"| {PARAMETERS[preset]:.2f}M parameters" in run.out


@pytest.mark.parametrize("ranks,stage,family", [(1, 0, "llama"), (4, 2, "llama"), (1, 0, "gpt2"), (2, 1, "gpt2")])
def test_overfit(tmp_path, ranks, stage, family):
    """Overfits one batch of 4 x 64 tokens, in LLaMA with grouped keys and values."""
    config = llama_config(97, 64, 64, L=2, NH=4, F=128, num_key_value_heads=1, tie_word_embeddings=False)
    if family == "gpt2":
        config = gpt2_config(97, 64, 64, L=2, NH=4)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(4 * 64 + 1, 97, 1), 97)
    run = train_gpt("-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 4 // ranks, "-t", 64,
                    "-z", stage, "-n", 150, "-l", 1e-2, "--weight-decay", 0, *QUIET, ranks=ranks, out=tmp_path / "run",
                    OMP_NUM_THREADS="1")
    assert run.series("loss")[-1] < 0.05


@pytest.mark.parametrize("device", [d for d in built_devices() if d != "cpu"] or ["cpu"])
@pytest.mark.parametrize("precision,family", [("bf16", "llama"), ("fp16", "llama"), ("bf16", "gpt2")])
def test_overfit_16_bit(tmp_path, device, precision, family):
    config = llama_config(61, 32, 16, L=1, NH=2, F=48, num_key_value_heads=1)
    if family == "gpt2":
        config = gpt2_config(61, 32, 16, L=1, NH=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(2 * 16 + 1, 61, 1), 61)
    run = train_gpt("-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 2, "-t", 16, "-p",
                    precision, "-n", 80, "-l", 3e-2, "--weight-decay", 0, *QUIET, device=device, out=tmp_path / "run")
    assert run.series("loss")[-1] < 0.05


def test_resume_and_stages(tmp_path, device):
    """Joined tensors are cut by ranks like any other: stages and rank counts agree, a resumed run has equal bits."""
    model, data = golden_model(tmp_path / "model", "gqa"), golden_data(tmp_path / "data", 61, 8)
    flags = ["-m", model, "-d", data, "-t", T, "-n", 6, "-l", 1e-3, *QUIET]
    one = train_gpt(*flags, "-b", 6, "--save-every", 3, device=device, out=tmp_path / "one")
    rest = train_gpt(*flags[2:], "-b", 6, "--resume", tmp_path / "one" / "step_00000003", device=device,
                     out=tmp_path / "rest")
    assert rest.series("loss") == one.series("loss")[3:]
    many = train_gpt(*flags, "-b", 2, "-z", 2, ranks=3, device=device, out=tmp_path / "many")
    assert many.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    after, again = weights(one.checkpoint(6)), weights(rest.checkpoint(6))
    assert all(after[name].tobytes() == again[name].tobytes() for name in after)


# ---- generation -----------------------------------------------------------------------------------------------------
TEXT = json.loads((GOLDEN / "families_text.json").read_text())


def continue_prompts(model, folder, requests, *args, device="cpu", **kw):
    """The lines that --prompts answers, in the order of the requests."""
    folder.mkdir(exist_ok=True)
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(request) for request in requests) + "\n")
    run = train_gpt("-m", model, "--prompts", path, "--temperature", 0, "--sample-tokens", 64, *args, device=device,
                    **kw)
    lines = [json.loads(line) for line in run.out.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(len(requests)))
    assert "tok/s" in run.err
    return sorted(lines, key=lambda line: line["index"])


def texts(lines):
    return [line["ids"] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_greedy(tmp_path, device, name):
    """64 tokens after five prompts of different lengths as transformers continues them: together, two at a time (so
    that later prompts join running ones), and without the cache."""
    model = golden_model(tmp_path / "model", name)
    requests = [{"ids": prompt} for prompt in TEXT["prompts"]]
    together = continue_prompts(model, tmp_path, requests, "-b", 8, device=device)
    assert texts(together) == TEXT["texts"][name]
    assert [line["finish"] for line in together] == ["length"] * 5
    if device == "emu":
        return
    assert texts(continue_prompts(model, tmp_path, requests, "-b", 2)) == TEXT["texts"][name]
    assert texts(continue_prompts(model, tmp_path, requests[:2], "--no-kv-cache")) == TEXT["texts"][name][:2]


@pytest.mark.pairwise
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", [[], ["--no-kv-cache"]])
def test_logits(tmp_path, device, name, cache):
    """After every token of the golden batch; after every eighth where the emulator would take long."""
    golden = safetensors_read(GOLDEN / f"families_{name}.safetensors")["logits"].astype(np.float64)
    places = [(b, t) for b in range(B) for t in range(0, T, 8 if device == "emu" and cache else 1)]
    ours = logits_at(golden_model(tmp_path / "model", name), tmp_path, places, *cache, "-b", 64, device=device)
    for (b, t), logits in zip(places, ours):
        off = np.linalg.norm(logits - golden[b, t])
        assert off <= 2e-5 * np.linalg.norm(golden[b, t]), (b, t)


def logits_at(model, folder, places, *args, tokens=None, **kw):
    """After place t of row b of the golden batch, or of other rows of tokens."""
    rows = init.tokens(B * T + 1, 61, ABOUT["seed"])[:-1].reshape(B, T) if tokens is None else tokens
    requests = [{"ids": [int(id) for id in rows[b][:t + 1]], "max_tokens": 0, "logits": True} for b, t in places]
    return [np.array(line["logits"]) for line in continue_prompts(model, folder, requests, *args, **kw)]


def assert_as_good(ours, name):
    """The rule for 16 bits: at most twice as far from the truth as transformers in bf16 is, and a rounding step; the
    largest difference, and the root of the mean square."""
    golden = safetensors_read(GOLDEN / "families_bf16.safetensors")
    truth, plain = (golden[f"{name}.{kind}"].reshape(-1, 61).astype(np.float64) for kind in ("truth", "plain"))
    for size in (lambda x: abs(x).max(), lambda x: np.sqrt((x**2).mean())):
        assert size(ours - truth) <= 2 * size(plain - truth) + 2.0**-8 * size(truth)


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_bf16(tmp_path, device, name):
    """The model as a whole, its weights rounded to bf16."""
    places = [(b, t) for b in range(B) for t in range(T)]
    model = golden_model(tmp_path / "model", name)
    assert_as_good(np.array(logits_at(model, tmp_path, places, "-p", "bf16", "-b", 64, device=device)), name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_far_positions(tmp_path, device, precision):
    """Rotary embedding at positions that bf16 does not have: 257 and 2047 would be 256 and 2048."""
    config, positions = ABOUT["far"], ABOUT["far_positions"]
    weights = init.random_weights(init.llama_shapes(config), ABOUT["seed"], ABOUT["std"])
    for name, tensor in weights.items():
        bits = tensor.view(np.uint32)
        weights[name] = ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).view(np.float32)
    model = model_write(tmp_path / "model", config, weights)
    tokens = init.tokens(2048, 61, ABOUT["seed"])[None]
    places = [(0, t) for t in positions if t < 2047 or device != "emu"]
    ours = np.array(logits_at(model, tmp_path, places, "-p", precision, "-t", 2048, tokens=tokens, device=device))
    golden = safetensors_read(GOLDEN / "families_bf16.safetensors")
    truth, plain = (golden[f"far.{kind}"][0, :len(places)].astype(np.float64) for kind in ("truth", "plain"))
    off, allowed = (np.linalg.norm(x - truth, axis=1) for x in (ours, plain))
    size = np.linalg.norm(truth, axis=1)
    assert np.all(off <= (2e-5 * size if precision == "fp32" else 2 * allowed + 2.0**-8 * size)), (off, allowed, size)


@pytest.mark.parametrize("stage,ranks", [(2, 2), (3, 2), (3, 3)])
def test_greedy_at_any_stage(tmp_path, stage, ranks):
    model = golden_model(tmp_path / "model", "gqa")
    requests = [{"ids": prompt} for prompt in TEXT["prompts"]]
    lines = continue_prompts(model, tmp_path, requests, "-b", 3, "-z", stage, ranks=ranks)
    assert texts(lines) == TEXT["texts"]["gqa"]


@pytest.mark.parametrize("stage,ranks", [(0, 1), (1, 2), (2, 3), (3, 2)])
def test_greedy_from_a_checkpoint(tmp_path, stage, ranks):
    """Of any stage and number of ranks; a step at learning rate 0 changes no weight."""
    model, data = golden_model(tmp_path / "model", "qwen2"), golden_data(tmp_path / "data", 61, 2)
    run = train_gpt("-m", model, "-d", data, "-z", stage, "-b", 1, "-t", T, "-n", 1, "-l", 0, *QUIET, ranks=ranks,
                    out=tmp_path / "run")
    requests = [{"ids": prompt} for prompt in TEXT["prompts"]]
    assert texts(continue_prompts(run.checkpoint(1), tmp_path, requests, "-b", 5)) == TEXT["texts"]["qwen2"]


def test_sampling(tmp_path):
    """A text depends on its prompt, seed and settings alone."""
    model = golden_model(tmp_path / "model", "mha")
    sampled = [{"ids": prompt, "temperature": 1.5, "seed": k} for k, prompt in enumerate(TEXT["prompts"])]
    together, alone = (texts(continue_prompts(model, tmp_path, sampled, "-b", b)) for b in (5, 1))
    assert together == alone != texts(continue_prompts(model, tmp_path, [{**r, "seed": 9} for r in sampled]))
    greedy = TEXT["texts"]["mha"]
    for settings in ({"top_k": 1}, {"top_p": 0}, {"temperature": 0}):
        assert texts(continue_prompts(model, tmp_path, [{**r, **settings} for r in sampled])) == greedy
    once = texts(continue_prompts(model, tmp_path, [{"ids": [1], "repetition_penalty": 1000, "max_tokens": 40}]))[0]
    assert len(set(once)) == 40 and 1 not in once


def test_top_p_leaves_the_likeliest(tmp_path):
    """Among many samples of one place only tokens of the smallest set that reaches top_p, and all of them."""
    model = golden_model(tmp_path / "model", "mha")
    request = {"ids": [1, 2], "max_tokens": 0, "logits": True}
    logits = np.array(continue_prompts(model, tmp_path, [request])[0]["logits"])
    p = np.exp((logits - logits.max()) / 2)
    p /= p.sum()
    order = np.argsort(-p)
    kept = set(order[:np.searchsorted(np.cumsum(p[order]), 0.6) + 1].tolist())
    settings = {"ids": [1, 2], "max_tokens": 1, "temperature": 2, "top_k": 0, "top_p": 0.6}
    requests = [{**settings, "seed": seed} for seed in range(600)]
    chosen = [line["ids"][0] for line in continue_prompts(model, tmp_path, requests, "-b", 64)]
    assert 1 < len(kept) < 30 and set(chosen) == kept
    top = order[0]
    assert chosen.count(top) / 600 == pytest.approx(p[top] / p[list(kept)].sum(), abs=0.08)


def test_stop(tmp_path):
    config, tensors = golden_tensors("mha")
    first = TEXT["texts"]["mha"][0]
    end = first[5]
    stopped = first[:first.index(end) + 1]
    requests = [{"ids": TEXT["prompts"][0]}]
    plain = model_write(tmp_path / "plain", config, tensors)
    eos = model_write(tmp_path / "eos", {**config, "eos_token_id": [60, end]}, tensors)
    for line in (continue_prompts(plain, tmp_path, requests, "--stop", f"60,{end}")[0],
                 continue_prompts(eos, tmp_path, requests)[0]):
        assert line["ids"] == stopped[:len(line["ids"])] and line["finish"] == "stop" and line["ids"][-1] in (60, end)
    assert continue_prompts(eos, tmp_path, requests, "--stop", "")[0]["ids"] == first
    run = train_gpt("-m", plain, "--prompts", tmp_path / "prompts.jsonl", "--stop", "61", ok=False)
    assert "--stop" in run.err


@pytest.mark.parametrize("line,complaint", [
    ("{", "prompt 1"), ('{"ids": []}', "at least one"), ('{"ids": [61]}', "ids"), ('{"prompt": "x"}', "tokenizer"),
    ("{}", "prompt"), ('{"ids": [1], "top_p": 2}', "top_p")])
def test_bad_prompts(tmp_path, line, complaint):
    """What came before is answered; the bad line is named."""
    model = golden_model(tmp_path / "model", "mha")
    (tmp_path / "prompts.jsonl").write_text('{"ids": [1, 2], "max_tokens": 2}\n' + line + "\n")
    run = train_gpt("-m", model, "--prompts", tmp_path / "prompts.jsonl", "-b", 1, ok=False)
    assert run.code == 1 and complaint in run.err and "prompts.jsonl" in run.err
    assert json.loads(run.out.splitlines()[0])["index"] == 0


def test_past_the_context(tmp_path):
    """A full context continues from its second half; nothing ends, nothing is read past it."""
    model = golden_model(tmp_path / "model", "gqa")
    lines = continue_prompts(model, tmp_path, [{"ids": list(range(1, 61))}, {"ids": [3]}], "-t", 32)
    assert [len(line["ids"]) for line in lines] == [64, 64]
    short = continue_prompts(model, tmp_path, [{"ids": [3]}], "-t", 65)[0]["ids"]
    assert lines[1]["ids"][:32] == short[:32]


@pytest.mark.parametrize("stage,ranks", [(0, 1), (1, 3)])
def test_prompts_of_stdin(tmp_path, stage, ranks):
    """Whoever types sees an answer before the next line, and may take longer than --timeout for it; so may a text take.
    Ranks that have nothing to do wait as long."""
    model = golden_model(tmp_path / "model", "gqa")
    flags = ["-m", model, "--prompts", "-", "--temperature", 0, "-z", stage, "-b", 3, "--timeout", 2]
    process = subprocess.Popen(command(flags, ranks, "cpu"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.PIPE, env=environment(OMP_NUM_THREADS="1"), cwd=ROOT)

    def ask(**request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()

    ask(ids=TEXT["prompts"][0], max_tokens=64)
    assert json.loads(process.stdout.readline())["ids"] == TEXT["texts"]["gqa"][0]
    time.sleep(3.5)
    ask(ids=TEXT["prompts"][1], max_tokens=100000)
    ask(ids=TEXT["prompts"][2], max_tokens=64)
    process.stdin.close()
    lines = {line["index"]: line for line in map(json.loads, process.stdout)}
    assert process.wait(timeout=60) == 0, process.stderr.read()
    assert lines[2]["ids"] == TEXT["texts"]["gqa"][2] and len(lines[1]["ids"]) == 100000
    assert lines[1]["ids"][:64] == TEXT["texts"]["gqa"][1]
    assert 100000 / lines[1]["tok_per_s"] > 2, "too short to show anything"


# ---- transformers itself, where it is installed ---------------------------------------------------------------------
def transformers_model(folder):
    """Opens the folder as any user would; the logits (B,T,V) of the golden batch, in fp32."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(init.tokens(B * T + 1, 61, ABOUT["seed"]))
    with torch.no_grad():
        return model, model(tokens[:-1].view(B, T)).logits.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_export_opens(tmp_path, name):
    train_gpt("-m", golden_model(tmp_path / "model", name), "--export", tmp_path / "export")
    _, logits = transformers_model(tmp_path / "export")
    golden = safetensors_read(GOLDEN / f"families_{name}.safetensors")["logits"]
    assert logits == pytest.approx(golden, rel=2e-5, abs=2e-5 * float(abs(golden).max()))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_opens(tmp_path, name):
    """Folder, training, checkpoint: transformers has the logits of --prompts."""
    model, data = golden_model(tmp_path / "model", name), golden_data(tmp_path / "data", 61, 2)
    run = train_gpt("-m", model, "-d", data, "-z", 2, "-b", 1, "-t", T, "-n", 2, "-l", 1e-2, *QUIET, ranks=2,
                    out=tmp_path / "run")
    _, logits = transformers_model(run.checkpoint(2))
    ours = logits_at(run.checkpoint(2), tmp_path, [(b, t) for b in range(B) for t in range(T)], "-b", 64)
    assert np.array(ours).reshape(logits.shape) == pytest.approx(logits, rel=2e-5, abs=2e-5 * float(abs(logits).max()))


@pytest.mark.parametrize("preset", ["llama-60m", "d2"])
def test_preset_opens(tmp_path, preset):
    """A config.json that was made here, not read."""
    train_gpt("-m", preset, "--export", tmp_path / "export", "-d", "nowhere")
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_saved_by_transformers(tmp_path, name, dtype):
    """Whole or in several files with an index, in any of three types."""
    torch = pytest.importorskip("torch")
    model, _ = transformers_model(golden_model(tmp_path / "model", name))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    train_gpt("-m", tmp_path / "saved", "--export", tmp_path / "export")
    after, before = weights(tmp_path / "export"), dict(model.float().named_parameters())
    assert set(after) == set(before)
    for key, tensor in before.items():
        assert after[key].tobytes() == tensor.detach().numpy().tobytes(), key
