"""Model folders in and out: the small files beside the weights, the tokenizer, config.json, the tokens that end a text.

Where transformers is installed too, instruct Qwen2 and Qwen3, Llama-3 and GPT-2 folders are trained and opened again.
"""
import json
import os
import shutil
import subprocess
import sys
import warnings

import init
import numpy as np
import pytest
from test_modes import byte_tokenizer
from test_prepare import make_text, run_prepare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from util import gpt2_config, llama_config, model_write, shard_write, train_gpt, weights

V, T = 300, 16
STEP = ("-t", T, "-b", 1, "--sample-tokens", 0)
FAST = {"OMP_NUM_THREADS": "1"}
KEPT = {"tokenizer_config.json": '{"eos_token": "!", "chat_template": "{{ messages[0].content }}"}',
        "chat_template.jinja": "{{ messages[0].content }}", "generation_config.json": '{"eos_token_id": [0, 1]}',
        "special_tokens_map.json": "{}", "added_tokens.json": "{}", "vocab.json": '{"a": 0}', "merges.txt": "",
        "tokenizer.model": "\0\1", "LICENSE": "free", "NOTICE.txt": "of", "USE_POLICY.md": "no harm"}
NOT_KEPT = ["README.md", "modeling_own.py", "pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin"]


def model(folder, **more):
    config = llama_config(V, 16, 32, NH=2, **more)
    return model_write(folder, config, init.random_weights(init.llama_shapes(config), 1, 0.05))


def gpt2(folder, **more):
    config = gpt2_config(V, 16, 32, NH=2, **more)
    return model_write(folder, config, init.random_weights(init.gpt2_shapes(config), 1, 0.05))


def data(folder):
    shard_write(folder / "train_000000.bin", init.tokens(400, 200, 1), V)
    return folder


def tokenizer_train(vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(make_text(200).splitlines(keepends=True), trainer)
    return tokenizer


def export(folder, out, *args, **more):
    train_gpt("-m", folder, "--export", out, *args, **more)
    return json.loads((out / "config.json").read_text())


# ---- the small files --------------------------------------------------------------------------------------------
def test_small_files_are_kept(tmp_path):
    """By a checkpoint, by a run that is resumed when the source is gone, by an export of it; nothing else is."""
    source = model(tmp_path / "source")
    byte_tokenizer(source / "tokenizer.json")
    for name, text in KEPT.items():
        (source / name).write_text(text)
    for name in NOT_KEPT:
        (source / name).write_text("not for a checkpoint")
    kept = {name: (source / name).read_bytes() for name in [*KEPT, "tokenizer.json"]}
    flags = ("-d", data(tmp_path / "data"), *STEP, "--keep", 1)
    run = train_gpt("-m", source, *flags, "-n", 1, out=tmp_path / "run", **FAST)
    shutil.rmtree(source)
    run = train_gpt("--resume", run.checkpoint(1), *flags, "-n", 2, "--save-every", 1, out=tmp_path / "run", **FAST)
    export(run.checkpoint(2), tmp_path / "export")
    for folder in (run.folder, run.checkpoint(2), tmp_path / "export"):
        have = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert {name: have.get(name) for name in kept} == kept, folder
        assert not set(NOT_KEPT) & set(have)
    assert not run.checkpoint(1).exists()


def test_another_tokenizer_comes_with_its_own_files(tmp_path):
    """What the model's folder says of its vocabulary is not laid beside the vocabulary of --tokenizer."""
    source, other = model(tmp_path / "source"), tmp_path / "other"
    other.mkdir()
    for name, text in KEPT.items():
        (source / name).write_text(text)
    for folder in (source, other):
        byte_tokenizer(folder / "tokenizer.json")
    (other / "tokenizer_config.json").write_text('{"eos_token": "?"}')
    export(source, tmp_path / "export", "--tokenizer", other)
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE",
                     "NOTICE.txt", "USE_POLICY.md", "generation_config.json"}
    assert json.loads((tmp_path / "export" / "tokenizer_config.json").read_text()) == {"eos_token": "?"}


# ---- the tokenizer ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given,preset,largest,why", [
    (True, False, V - 1, None), (True, False, V, "has ids up to 300, the model has 300"),
    (False, False, V - 1, "-d was not given"), (False, True, V - 1, None)])
def test_tokenizer_of_the_data(tmp_path, given, preset, largest, why):
    """A folder without one gets that of -d if -d is given and its ids fit, else none, as reported. A preset that
    trains on the default data gets theirs."""
    folder = data(tmp_path / "data" / "sets" / "kjv")                    # the default of -d, from tmp_path
    byte_tokenizer(folder / "tokenizer.json")
    file = json.loads((folder / "tokenizer.json").read_text())
    file["added_tokens"].append({"id": largest, "content": "<|last|>", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(file))
    where = ("-d", folder) if given else ()
    name = "d2" if preset else model(tmp_path / "model")
    run = train_gpt("-m", name, *where, *STEP, "-n", 1, out=tmp_path / "run", cwd=tmp_path, **FAST)
    assert (run.checkpoint(1) / "tokenizer.json").exists() == (why is None)
    assert ("no tokenizer.json is written" in run.out) == (why is not None)
    if why is not None:
        asked = train_gpt("-m", name, *where, "--generate", "a", ok=False, cwd=tmp_path)
        assert why in run.out and why in asked.err


def test_vocab_and_merges(tmp_path):
    """vocab.json and merges.txt are a model's tokenizer (test_prepare.py has their ids): a checkpoint has them, and not
    that of -d. A pair of another class is refused by its name."""
    folder = gpt2(tmp_path / "model")
    tokenizer_train(V).model.save(str(folder))
    byte_tokenizer(data(tmp_path / "data") / "tokenizer.json")
    run = train_gpt("-m", folder, "-d", tmp_path / "data", *STEP, "-n", 1, out=tmp_path / "run", **FAST)
    names = {path.name for path in run.checkpoint(1).iterdir()}
    assert {"vocab.json", "merges.txt"} < names and "tokenizer.json" not in names
    said = train_gpt("-m", run.checkpoint(1), "--generate", "the word", "--sample-tokens", 2)
    assert said.out.startswith("the word")
    for idx, (name, text) in enumerate([("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}'),
                                        ("config.json", '{"model_type": "qwen3"}')]):
        other = tmp_path / f"other{idx}"
        other.mkdir()
        tokenizer_train(V).model.save(str(other))
        (other / name).write_text(text)
        run = train_gpt("-m", folder, "--tokenizer", other / "vocab.json", "--generate", "a", ok=False)
        assert "only GPT2Tokenizer is read" in run.err


# ---- config.json --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ends", [None, ("<|first|>", "<|last|>")])
def test_preset_ends_with_its_tokenizer(tmp_path, ends):
    """bos and eos of a preset are ids of the tokenizer that is written beside it, named by tokenizer_config.json or
    <|endoftext|>; transformers would take GPT-2's 50256 for what is missing."""
    folder = data(tmp_path / "data")
    tokenizer = tokenizer_train(V - 2)
    tokenizer.add_special_tokens(["<|first|>", "<|last|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if ends:
        names = {"bos_token": ends[0], "eos_token": {"content": ends[1], "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    run = train_gpt("-m", "d2", "-d", folder, *STEP, "-n", 1, out=tmp_path / "run", **FAST)
    config = json.loads((run.checkpoint(1) / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == ((V - 2, V - 1) if ends else (0, 0))
    assert config["n_ctx"] == config["n_positions"] == T and config["vocab_size"] == V
    shutil.rmtree(folder)
    config = export("d2", tmp_path / "export", "-t", 8, "-d", folder)
    assert config["vocab_size"] == 50257 and config["bos_token_id"] == config["eos_token_id"] == 50256
    assert config["n_ctx"] == config["n_positions"] == 8 == len(weights(tmp_path / "export")["transformer.wpe.weight"])
    assert config["layer_norm_epsilon"] == 1e-5


def test_stops_of_the_generation_config(tmp_path):
    """--prompts ends at any token of config.json or generation_config.json, numbers or lists."""
    folder = model(tmp_path / "model", eos_token_id=V - 1)
    (tmp_path / "prompts.jsonl").write_text('{"ids": [1, 2, 3], "max_tokens": 8}\n')

    def ask():
        run = train_gpt("-m", folder, "--prompts", tmp_path / "prompts.jsonl", "--temperature", 0, **FAST)
        return json.loads(run.out)

    free = ask()
    assert free["finish"] == "length" and len(free["ids"]) == 8
    for eos in (free["ids"][2], [V - 2, free["ids"][2]]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        cut = ask()
        assert cut["finish"] == "stop" and cut["ids"] == free["ids"][:free["ids"].index(free["ids"][2]) + 1]


def test_config_is_true_of_the_weights(tmp_path):
    """Their type at the top level alone, in both spellings; no quantization and no code that is not there; everything
    else as it was, number for number and in its order."""
    own = {"dtype": "float16", "own": {"dtype": "int8", "torch_dtype": ["x"], "n": 1.0}, "torch_dtype": "float16",
           "quantization_config": {"dtype": "int4", "bits": [4, {"}": "]"}]}, "auto_map": {"AutoModel": "own.Own"},
           "large": 2**60 + 1, "tiny": 1e-05, "text": 'a "dtype": "b" \\'}
    folder = model(tmp_path / "model", **own)
    want = json.loads((folder / "config.json").read_text())
    want.update(dtype="bfloat16", torch_dtype="bfloat16")
    del want["quantization_config"], want["auto_map"]
    for indent in (None, 4):
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()), indent=indent))
        export(folder, tmp_path / f"export{indent}", "--export-dtype", "bf16")
        assert (tmp_path / f"export{indent}" / "config.json").read_text() == json.dumps(want, indent=indent)


@pytest.mark.parametrize("names", [["quantization_config"], ["quantization_config", "auto_map"]])
@pytest.mark.parametrize("first", [True, False])
def test_config_members_at_the_ends(tmp_path, names, first):
    """What is taken out may be the first or the last."""
    config = json.loads((model(tmp_path / "model") / "config.json").read_text())
    taken = {name: {"a": 1} for name in names}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**taken, **config} if first else {**config, **taken}))
    export(tmp_path / "model", tmp_path / "export")
    assert (tmp_path / "export" / "config.json").read_text() == json.dumps(config)


def test_gpt2_folder_for_llama_cpp(tmp_path):
    """convert_hf_to_gguf.py reads n_ctx and the class of the model; transformers writes no n_ctx since version 5."""
    config = export(gpt2(tmp_path / "model", architectures=["GPT2Model"]), tmp_path / "export")
    assert config["n_ctx"] == config["n_positions"] == 32 and config["architectures"] == ["GPT2LMHeadModel"]
    config = export(gpt2(tmp_path / "other", n_ctx=32, architectures=["GPT2LMHeadModel"]), tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "other" / "config.json").read_bytes()


# ---- numbers that are too large -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype,value,fits", [
    ("fp16", 65519.996, True), ("fp16", -65520.0, False), ("fp16", 1e6, False),
    ("bf16", 3.3895e38, True), ("bf16", 3.4e38, False), ("fp32", 3.4e38, True)])
def test_export_of_large_values(tmp_path, dtype, value, fits):
    """A finite weight that would be infinite in the type of the export is refused by name, place and value, before
    anything is written."""
    folder = model(tmp_path / "model")
    tensors = {name: tensor.copy() for name, tensor in weights(folder).items()}
    tensors["model.layers.0.mlp.down_proj.weight"][7, 9] = value
    model_write(folder, json.loads((folder / "config.json").read_text()), tensors)
    ranks, stage = (2, 3) if dtype == "bf16" else (1, 0)
    run = train_gpt("-m", folder, "--export", tmp_path / "export", "--export-dtype", dtype, "-z", stage, ranks=ranks,
                    ok=None, **FAST)
    assert (run.code == 0) == fits == (tmp_path / "export").exists(), run.err
    if not fits:
        assert "model.layers.0.mlp.down_proj.weight" in run.err and "[7, 9]" in run.err and "--export-dtype" in run.err
        assert f"{np.float32(value):.9g}" in run.err


# ---- transformers itself, where it is installed ---------------------------------------------------------------------
CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SIZES = dict(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=32)


def qwen2_instruct(transformers, folder, family="Qwen2", **more):
    """As Qwen2.5-Instruct: a turn ends with <|im_end|>, generation also at <|endoftext|>, which is the padding."""
    tokenizer = tokenizer_train(V - 2)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    parts = json.loads(tokenizer.to_str())["model"]
    own = transformers.Qwen2Tokenizer(vocab=parts["vocab"], merges=[tuple(m) for m in parts["merges"]],
                                      eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None,
                                      extra_special_tokens=["<|im_start|>"], chat_template=CHAT)
    end = own.convert_tokens_to_ids("<|im_end|>")
    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=True, bos_token_id=0,
                                                     eos_token_id=end, **more)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    made.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=[end, 0], pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.8, top_k=20,
        repetition_penalty=1.1)
    return own, made


def qwen3(transformers, folder):
    """With the tokenizer of Qwen2.5-Instruct."""
    return qwen2_instruct(transformers, folder, "Qwen3", head_dim=10)


def llama3(transformers, folder):
    """As Llama-3-Instruct: <|begin_of_text|> before each text, several tokens that end one, no padding."""
    tokenizer = tokenizer_train(V - 3)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    ids = [tokenizer.token_to_id(t) for t in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", ids[0])])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>",
                                               eos_token="<|eot_id|>", chat_template=CHAT)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, bos_token_id=ids[0], eos_token_id=ids[1:],
                                      rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                                                       "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                       "original_max_position_embeddings": 16})
    return own, transformers.LlamaForCausalLM(config)


def gpt2_base(transformers, folder):
    parts = json.loads(tokenizer_train(V).to_str())["model"]
    own = transformers.GPT2Tokenizer(vocab=parts["vocab"], merges=[tuple(m) for m in parts["merges"]])
    config = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
                                     eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return own, transformers.GPT2LMHeadModel(config)


def gpt2_pair(transformers, folder):
    """As GPT-2 was published at first: vocab.json and merges.txt."""
    own, made = gpt2_base(transformers, folder)
    folder.mkdir()
    tokenizer_train(V).model.save(str(folder))
    return None, made


class Opened:
    """What a user of transformers gets from a folder, and what transformers complains about on the way."""

    def __init__(self, transformers, folder, caplog):
        transformers.utils.logging.enable_propagation()
        caplog.clear()
        with caplog.at_level("WARNING"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self.model, self.info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            ids = self.tokenizer("It's the 12th  of <|endoftext|>\n naïve 東京", return_tensors="pt")
            self.generated = self.model.generate(**ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        self.complaints = [r.getMessage() for r in caplog.records] + [str(w.message) for w in caught]
        self.ids = ids.input_ids.tolist()

    def told(self):
        """All that has nothing to do with the values of weights."""
        t, talk = self.tokenizer, [{"role": "user", "content": "the word"}]
        config = self.model.config.to_dict()
        generation = self.model.generation_config.to_dict()
        for told in (config, generation):
            for key in ("_name_or_path", "transformers_version", "n_ctx", "dtype", "_commit_hash"):
                told.pop(key, None)
        return {"ids": self.ids, "class": type(t).__name__, "vocab": t.get_vocab(), "special": t.special_tokens_map,
                "talk": t.chat_template and t.apply_chat_template(talk, add_generation_prompt=True).input_ids,
                "config": config, "generation": generation}


@pytest.mark.parametrize("source", [qwen2_instruct, qwen3, llama3, gpt2_base, gpt2_pair])
def test_there_and_back(tmp_path, source, caplog):
    """A folder of transformers, trained two steps: checkpoint and export open with the same tokens, special tokens,
    chat template, config and generation config, and without a warning."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(1)
    tokenizer, made = source(transformers, tmp_path / "source")
    for part in (tokenizer, made):
        if part is not None:
            part.save_pretrained(tmp_path / "source")
    run = train_gpt("-m", tmp_path / "source", "-d", data(tmp_path / "data"), *STEP, "-n", 2, out=tmp_path / "run",
                    **FAST)
    export(run.checkpoint(2), tmp_path / "export", "--export-dtype", "bf16")
    before = Opened(transformers, tmp_path / "source", caplog)
    for folder, dtype in ((run.checkpoint(2), torch.float32), (tmp_path / "export", torch.bfloat16)):
        after = Opened(transformers, folder, caplog)
        assert after.told() == before.told() and not any(after.info.values())
        assert after.complaints == before.complaints == [] and after.model.dtype == dtype


@pytest.mark.parametrize("preset", ["d2", "llama-60m"])
def test_preset_without_a_warning(tmp_path, preset, caplog):
    """Trained with a vocabulary of its own: bos and eos are that vocabulary's, in model and tokenizer."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "book.txt").write_text(make_text(300))
    run_prepare(tmp_path / "book.txt", "--vocab-size", V, "--out", tmp_path / "data")
    run = train_gpt("-m", preset, "-d", tmp_path / "data", "-t", 32, "-b", 1, "-n", 1, "--sample-tokens", 0,
                    out=tmp_path / "run")
    opened = Opened(transformers, run.checkpoint(1), caplog)
    assert opened.complaints == [] and not any(opened.info.values())
    assert opened.model.config.eos_token_id == opened.tokenizer.eos_token_id == 0
    want = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json")).encode("It's the 12th  of")
    assert opened.tokenizer("It's the 12th  of").input_ids == want.ids


# Its check of the vocabulary knows published ones alone, so the test says which it is: GPT-2's.
CONVERT = """import sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()"""


@pytest.mark.parametrize("from_preset", [True, False], ids=["preset", "folder"])
def test_llama_cpp_converts_gpt2(tmp_path, from_preset):
    """convert_hf_to_gguf.py of the checkout that LLAMA_CPP names takes GPT-2, a preset and a folder without n_ctx."""
    pytest.importorskip("gguf")
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    folder = data(tmp_path / "data")
    tokenizer_train(V).save(str(folder / "tokenizer.json"))
    where = ("-m", "d2") if from_preset else ("-m", gpt2(tmp_path / "model"))
    run = train_gpt(*where, "-d", folder, *STEP, "-n", 1, out=tmp_path / "run", **FAST)
    out = tmp_path / "model.gguf"
    done = subprocess.run([sys.executable, "-c", CONVERT, os.environ["LLAMA_CPP"], run.checkpoint(1), "--outfile", out],
                          capture_output=True, text=True)
    assert done.returncode == 0 and out.stat().st_size > 0, done.stderr[-2000:]
    fields = __import__("gguf").GGUFReader(out).fields
    context = fields["gpt2.context_length"]
    assert context.parts[context.data[0]][0] == (T if from_preset else 32)
