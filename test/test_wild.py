"""Model folders as other programs leave them: keys that config.json lacks or has twice, windows, heads, files."""
import json
import re

import pytest

import init
from util import (ROOT, gpt2_config, llama_config, model_write, safetensors_read, safetensors_write, shard_write,
                  train_gpt)

CLASSES = json.loads((ROOT / "test" / "golden" / "class_defaults.json").read_text())["classes"]
V, C, T = 61, 16, 8
SIZES = {"n_embd": C, "n_layer": 2, "n_head": 2, "n_positions": 64, "hidden_size": C, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
         "max_position_embeddings": 64, "vocab_size": V, "sliding_window": 64}


def folder(path, config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def losses(tmp_path, model, *flags, **more):
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(400, V, 5), V)
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-b", 2, "-n", 2, "--sample-tokens", 0, "-t", T, *flags,
                    out=tmp_path / f"run_{model.name}", **more)
    return run, (run.series("loss"), run.series("norm"))


@pytest.mark.parametrize("family", CLASSES)
def test_sizes_of_the_class(tmp_path, family):
    """A config.json of model_type alone is the model that transformers makes of it."""
    d = CLASSES[family]
    model = folder(tmp_path / "model", {"model_type": family})
    run = train_gpt("-m", model, "--plan", "-t", 16, "-b", 1, "--gpu", "h100")
    ours = dict(re.findall(r"\b(L|C|NH|NKV|HS|F|V|context) (\d+)", run.out.split("\nmodel ")[1].split("\n")[0]))
    of = lambda *keys: next((d[key] for key in keys if d.get(key)), None)
    heads, width = of("n_head", "num_attention_heads"), of("n_embd", "hidden_size")
    context = of("n_positions", "max_position_embeddings")
    if family == "mistral":
        context = min(context, d["sliding_window"])
    assert {key: int(x) for key, x in ours.items()} == {
        "L": of("n_layer", "num_hidden_layers"), "C": width, "NH": heads, "NKV": of("num_key_value_heads") or heads,
        "HS": of("head_dim") or width // heads, "F": of("n_inner", "intermediate_size") or 4 * width,
        "V": d["vocab_size"], "context": context}


@pytest.mark.parametrize("family", CLASSES)
def test_settings_of_the_class(tmp_path, family):
    """A key that is missing and the same key with the class's default: the same bits."""
    sizes = {key: SIZES[key] for key in CLASSES[family] if key in SIZES}
    settings = {key: x for key, x in CLASSES[family].items() if key not in SIZES and x is not None}
    settings.update({key: 0.0 for key in settings if key.endswith("_pdrop")})
    config = {"model_type": family, **sizes}
    _, missing = losses(tmp_path, folder(tmp_path / "missing", config), "--from-scratch")
    _, given = losses(tmp_path, folder(tmp_path / "given", {**config, **settings}), "--from-scratch")
    assert missing == given and len(settings) >= 4


@pytest.mark.parametrize("config,window", [
    ({"model_type": "mistral", "sliding_window": 8}, 8),
    ({"model_type": "mistral", "sliding_window": None}, None),
    ({"model_type": "mistral"}, 4096),
    ({"model_type": "llama", "sliding_window": 8}, None),
    ({"model_type": "llama", "layer_types": ["sliding_attention"]}, None),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, None),      # from layer 28 on
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
    ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, 4096),
    ({"model_type": "qwen3", "sliding_window": 8, "max_window_layers": 0}, None),
    ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
      "layer_types": ["full_attention"]}, None),
    ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8,
      "layer_types": ["sliding_attention"]}, 8)])
def test_window(tmp_path, config, window):
    """Up to the window attention is full; longer sequences are refused. transformers' LLaMA has none."""
    model = folder(tmp_path / "model", {**llama_config(V, C, 8192), **config})
    fits, longer = (8192, None) if window is None else (window, window + 8)
    run = train_gpt("-m", model, "--plan", "-b", 1, "-t", fits, "--gpu", "h100")
    assert (("is ignored" in run.out) == (config["model_type"] == "llama"))
    if longer:
        run = train_gpt("-m", model, "--plan", "-b", 1, "-t", longer, "--gpu", "h100", ok=False)
        assert run.code == 1 and f"attention window of {window} (sliding_window" in run.err


LINEAR, BASE = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("wild,plain,said", [
    ({"rope_theta": 5e5, "rope_parameters": BASE, "rope_scaling": LINEAR},
     {"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, "rope_scaling wins"),
    ({"rope_parameters": BASE, "rope_scaling": LINEAR}, {"rope_parameters": {**LINEAR, "rope_theta": 1e4}},
     "base 10000"),
    ({"rope_parameters": BASE, "rope_scaling": {}}, {"rope_theta": 1e6}, None),
    ({"rope_theta": 5e5, "rope_parameters": BASE}, {"rope_theta": 1e6}, None),
    ({"rope_scaling": LLAMA3}, {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": T}}, None),
    ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is ignored"),
    ({"rope_parameters": {**BASE, "partial_rotary_factor": 0.5}}, {"rope_theta": 1e6}, "partial_rotary_factor")])
def test_rope_of_transformers(tmp_path, wild, plain, said):
    """Which of two spellings transformers 5.24 takes (read from its inv_freq): the same bits as the one alone."""
    config = llama_config(V, C, T)
    del config["rope_theta"]
    out, ours = losses(tmp_path, folder(tmp_path / "wild", {**config, **wild}), "--from-scratch")
    _, theirs = losses(tmp_path, folder(tmp_path / "plain", {**config, **plain}), "--from-scratch")
    assert ours == theirs and ("\nconfig " in out.out) == (said is not None) and (said or "") in out.out


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("head", ["other", "same"])
def test_head_of_its_own(tmp_path, family, head):
    """tie_word_embeddings true with another head in the file: kept apart and said; a copy is left out, in silence."""
    config = (gpt2_config if family == "gpt2" else llama_config)(V, C, T, tie_word_embeddings=True)
    shapes = (init.gpt2_shapes if family == "gpt2" else init.llama_shapes)({**config, "tie_word_embeddings": True})
    tensors = init.random_weights(shapes, 1, 0.1)
    embedding = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    tied = losses(tmp_path, model_write(tmp_path / "tied", config, tensors))[1]
    tensors["lm_head.weight"] = tensors[embedding] * (2 if head == "other" else 1)
    untied = losses(tmp_path, model_write(tmp_path / "untied", {**config, "tie_word_embeddings": False}, tensors))[1]
    model = model_write(tmp_path / "model", config, tensors)
    run, ours = losses(tmp_path, model)
    assert ours == (untied if head == "other" else tied) and ours != (tied if head == "other" else untied)
    assert ("kept apart" in run.out) == (head == "other")
    saved = run.checkpoint(2)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] == (head == "same")
    assert ("lm_head.weight" in safetensors_read(saved / "model.safetensors")) == (head == "other")


def tiny(tmp_path, **more):
    config = llama_config(V, C, T, **more)
    return config, init.random_weights(init.llama_shapes(config), 1, 0.1)


def test_index_is_the_authority(tmp_path):
    """A stale copy in another shard is left out; a tensor that is not where the index says is refused."""
    config, tensors = tiny(tmp_path)
    plain = losses(tmp_path, model_write(tmp_path / "plain", config, tensors))[1]
    model = folder(tmp_path / "overlay", config)
    first, overlay = "model-00001-of-00002.safetensors", "model-overlay.safetensors"
    safetensors_write(model / first, {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 7})
    safetensors_write(model / overlay, {"lm_head.weight": tensors["lm_head.weight"]})
    weight_map = {**{name: first for name in tensors}, "lm_head.weight": overlay}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert losses(tmp_path, model)[1] == plain
    weight_map["model.norm.weight"] = overlay
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    run = train_gpt("-m", model, "--export", tmp_path / "x", ok=False)
    assert run.code == 1 and "the files belong to different models" in run.err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_prefix(tmp_path, prefix):
    """Of all names it is stripped; of some it is refused by the name."""
    config, tensors = tiny(tmp_path)
    plain = losses(tmp_path, model_write(tmp_path / "plain", config, tensors))[1]
    wrapped = {prefix + name: x for name, x in tensors.items()}
    assert losses(tmp_path, model_write(tmp_path / "wrapped", config, wrapped))[1] == plain
    some = {(prefix if name == "model.norm.weight" else "") + name: x for name, x in tensors.items()}
    run = train_gpt("-m", model_write(tmp_path / "some", config, some), "--export", tmp_path / "x", ok=False)
    assert run.code == 1 and "has no tensor model.norm.weight" in run.err


@pytest.mark.parametrize("name,advice", [
    ("pytorch_model.bin", "save_pretrained"), ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
    ("model.Q4_K_M.gguf", "gguf_file"), ("adapter_config.json", "merge_and_unload"),
    ("model-00001-of-00002.safetensors", "without model.safetensors.index.json"),
    ("global_step100", "zero_to_fp32.py"), ("mp_rank_00_model_states.pt", "zero_to_fp32.py"),
    ("__0_0.distcp", "Megatron Bridge"), ("latest_checkpointed_iteration.txt", "Megatron Bridge")])
@pytest.mark.parametrize("has_config", [True, False])
def test_what_is_there_is_named(tmp_path, name, advice, has_config):
    model = folder(tmp_path / "model", llama_config(V, C, T))
    (model / name).write_bytes(b"?")
    if not has_config:
        (model / "config.json").unlink()
    run = train_gpt("-m", model, "--export", tmp_path / "x", ok=False)
    assert run.code == 1 and advice in run.err and str(model) in run.err and len(run.err.splitlines()) == 1


def test_hub_id(tmp_path):
    """Of what `hf download` has fetched, links included; else the command."""
    config, tensors = tiny(tmp_path)
    repo = tmp_path / "hub" / "models--org--name"
    blobs = model_write(repo / "blobs", config, tensors)
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abcd")
    train_gpt("-m", "org/name", "--export", tmp_path / "x", HF_HOME=str(tmp_path))
    ours = safetensors_read(tmp_path / "x" / "model.safetensors")
    assert all((ours[name] == x).all() for name, x in tensors.items())
    run = train_gpt("-m", "org/other", "--export", tmp_path / "y", HF_HOME=str(tmp_path), ok=False)
    assert run.code == 1 and "hf download org/other" in run.err and len(run.err.splitlines()) == 1
