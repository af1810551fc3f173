"""Model folders as other programs leave them: keys that config.json lacks or has twice, windows, heads, files."""
import json
import re

import numpy as np
import pytest

import init
from util import (ROOT, gpt2_config, llama_config, model_write, safetensors_read, safetensors_write, shard_write,
                  train_gpt)

GOLDEN = json.loads((ROOT / "test" / "golden" / "class_defaults.json").read_text())
CLASSES, OTHERS = GOLDEN["classes"], GOLDEN["others"]
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


@pytest.mark.parametrize("family,more,generation,ends", [
    *[(family, {}, None, d["eos_token_id"]) for family, d in CLASSES.items() if family != "arcee"],
    ("llama", {"eos_token_id": None}, None, None), ("llama", {"eos_token_id": 7}, None, 7),
    ("llama", {}, {}, None), ("llama", {}, {"eos_token_id": 9}, 9)])
def test_end_of_the_class(tmp_path, family, more, generation, ends):
    """The token that ends a text where no file names one: that of transformers' class. The model says `token` alone."""
    token = ends or 2
    config = (gpt2_config if family == "gpt2" else llama_config)(50257 if family == "gpt2" else V, C, 64, L=1, NH=2)
    config = {**config, "model_type": family, "head_dim": 8, "tie_word_embeddings": False}
    config.pop("eos_token_id", None)
    shapes = (init.gpt2_shapes if family == "gpt2" else init.llama_shapes)(config)
    shapes["lm_head.weight"] = (config["vocab_size"], C)
    ones = ("norm", "embed_tokens", "ln_f.bias")
    tensors = {name: np.full(shape, any(word in name for word in ones), np.float32) for name, shape in shapes.items()}
    tensors["lm_head.weight"][token] = 1
    model = model_write(tmp_path / "model", {**config, **more}, tensors)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "p.jsonl").write_text('{"ids": [5], "max_tokens": 3, "temperature": 0}\n')
    answer = json.loads(train_gpt("-m", model, "--prompts", tmp_path / "p.jsonl").out)
    assert answer["ids"][0] == token and answer["finish"] == ("length" if ends is None else "stop")


def test_dropout_of_the_class(tmp_path):
    config = gpt2_config(V, C, T)
    none = {key: 0.0 for key in CLASSES["gpt2"] if "pdrop" in key}
    for name, more, said in (("with", {}, True), ("none", none, False)):
        model = folder(tmp_path / name, {**config, **more})
        assert ("dropout none: transformers takes 0.1" in losses(tmp_path, model, "--from-scratch")[0].out) == said


@pytest.mark.parametrize("key,meant", [("num_key_value_head", "num_key_value_heads"), ("rope_tetha", "rope_theta"),
                                       ("tie_words_embeddings", "tie_word_embeddings"), ("hidden_size ", "hidden_size"),
                                       ("rms_norm_epsi", "rms_norm_eps")])
def test_mistyped_key(tmp_path, key, meant):
    config = llama_config(V, C, T)
    config[key] = config.pop(meant, 1)
    out = train_gpt("-m", folder(tmp_path / "model", config), "--plan", "-t", 8, "-b", 1, "--gpu", "h100").out
    assert f'the key "{key}" is not read: did you mean {meant}, which is missing?' in out


@pytest.mark.parametrize("family", CLASSES)
def test_no_key_is_mistyped(tmp_path, family):
    """What transformers itself writes, beside what is read or without it."""
    others = {key: None for key in OTHERS[family]}
    sizes = {key: SIZES[key] for key in CLASSES[family] if key in SIZES}
    for name, more in (("all", {**CLASSES[family], **sizes}), ("others", {})):
        model = folder(tmp_path / name, {**others, **more, "model_type": family})
        out = train_gpt("-m", model, "--plan", "-t", 8, "-b", 1, "--gpu", "h100").out
        assert "did you mean" not in out


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
      "layer_types": ["sliding_attention"]}, 8),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 3,
      "max_window_layers": 2}, (None, None, 512)),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 3,
      "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (None, 512, None))])
def test_window(tmp_path, config, window, T=8192):
    """The window of each layer: the pairs of a query and a key that attention costs. transformers' LLaMA has none."""
    model = folder(tmp_path / "model", {**llama_config(V, C, T), "num_attention_heads": 2, **config})
    run = train_gpt("-m", model, "--plan", "-b", 1, "-t", T, "--gpu", "h100")
    assert (("is ignored" in run.out) == (config["model_type"] == "llama"))
    windows = window if isinstance(window, tuple) else (window,)
    pairs = sum(sum(min(t, w or T) for t in range(1, T + 1)) for w in windows)
    width = config.get("head_dim", 128 if config["model_type"] == "qwen3" else C // 2) * 2
    gflop = float(re.search(r"attention_forward +\d+ calls +(\S+) Gflop", run.out)[1])
    assert gflop == pytest.approx(4 * width * pairs * 1e-9, rel=2e-3)
    assert ("keys that a query sees" in run.out) == any(w and w < T for w in windows)


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embedding_under_the_name_of_the_head(tmp_path, family):
    """Tied, with lm_head.weight alone in the file: as transformers reads it. Not tied it is missing."""
    config = (gpt2_config if family == "gpt2" else llama_config)(V, C, T, tie_word_embeddings=True)
    tensors = init.random_weights((init.gpt2_shapes if family == "gpt2" else init.llama_shapes)(config), 1, 0.1)
    tied = losses(tmp_path, model_write(tmp_path / "tied", config, tensors))[1]
    embedding = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors.pop(embedding)
    assert losses(tmp_path, model_write(tmp_path / "head", config, tensors))[1] == tied
    config["tie_word_embeddings"] = False
    run = train_gpt("-m", model_write(tmp_path / "untied", config, tensors), "--export", tmp_path / "x", ok=False)
    assert run.code == 1 and f"has no tensor {embedding}" in run.err


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
