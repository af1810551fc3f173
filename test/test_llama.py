"""GPT-2, LLaMA, Mistral and Qwen2 against transformers. dev/golden_llama.py made test/golden/families*.

Losses and logits agree to 2e-5 relative, and each tensor's gradient g to 2e-5 |g| + 1e-7 |all gradients|. Where
transformers itself is installed, folders go both ways.
"""
import json

import init
import numpy as np
import pytest
from util import (ROOT, built_devices, llama_config, model_write, moments, safetensors_read, shard_write, train_gpt,
                  weights)

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


@pytest.mark.parametrize("change,complaint", [
    ({"model_type": "gemma"}, "gemma"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"num_key_value_heads": 2}, "3 query heads"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"), ({"head_dim": 7}, "head size 7"),
    ({"model_type": "mistral", "sliding_window": 16}, "sliding_window"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"hidden_size": 25}, "25"), ({"hidden_size": None}, "hidden_size")])
def test_refused_by_name(tmp_path, change, complaint):
    config, tensors = golden_tensors("mha")
    model = model_write(tmp_path / "model", {**config, **change}, tensors)
    run = train_gpt("-m", model, "--export", tmp_path / "export", ok=False)
    assert run.code == 1 and complaint in run.err and "config.json" in run.err


@pytest.mark.parametrize("change", [{"rope_theta": 500000.0}, {"rms_norm_eps": 1e-3}, {"hidden_act": "silu"},
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


PARAMETERS = {"gpt2": 124.44, "llama-60m": 58.07, "llama-1b": 1100.05, "llama2-7b": 6738.42, "llama3-8b": 8030.26,
              "qwen2.5-0.5b": 494.03, "qwen2.5-1.5b": 1543.71}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets(preset):
    """The published numbers of parameters; `--plan` needs no memory for them."""
    run = train_gpt("--plan", "-m", preset, "-b", 1, "-t", 64)
    assert f"| {PARAMETERS[preset]:.2f}M parameters" in run.out


@pytest.mark.parametrize("ranks,stage", [(1, 0), (4, 2)])
def test_overfit(tmp_path, ranks, stage):
    """One batch of 4 x 64 tokens learnt by heart, grouped keys and values."""
    config = llama_config(97, 64, 64, L=2, NH=4, F=128, num_key_value_heads=1, tie_word_embeddings=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(4 * 64 + 1, 97, 1), 97)
    run = train_gpt("-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 4 // ranks, "-t", 64,
                    "-z", stage, "-n", 150, "-l", 1e-2, "--weight-decay", 0, *QUIET, ranks=ranks, out=tmp_path / "run",
                    OMP_NUM_THREADS="1")
    assert run.series("loss")[-1] < 0.05


def test_resume_and_stages(tmp_path, device):
    """Joined tensors are cut by ranks like any other: stages and rank counts agree, a stopped run goes on in bits."""
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
