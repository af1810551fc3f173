"""BPE with byte fallback (Llama-2, Mistral) against the tokenizers library: tokenizers are trained on the spot in every
form that tokenizer.json files have; ids and decoded text are equal on random strings and on made-up text."""
import json
import random

import init
import numpy as np
import pytest
from test_prepare import encode_by_c, make_text, random_char, test_data  # noqa: F401  (test_data is a fixture)
from util import FULL, gpt2_config, llama_config, model_write, shard_write, train_gpt

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import (AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,  # noqa: E402
                        trainers)

MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECODER = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
FORMS = {"normalizer": (normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]), None),
         "first": (None, pre_tokenizers.Metaspace(MARK, "first", split=False)),
         "always": (None, pre_tokenizers.Metaspace(MARK, "always", split=True)),
         "never": (None, pre_tokenizers.Metaspace(MARK, "never", split=False))}


def trained(form, with_bytes=True, **options):
    """As Llama-2's: unknown, begin and end, the bytes, then what is learnt."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", **options))
    normalizer, pre_tokenizer = FORMS[form]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", split=True)     # merges stay inside words
    special = ["<unk>", "<s>", "</s>"] + (BYTES if with_bytes else [])
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(make_text(2000).splitlines(keepends=True), trainer)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] not in BYTES]
    for token in file["added_tokens"]:
        token["normalized"] = options.get("fuse_unk", False)       # older files of Llama-2 have it so
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(DECODER if form != "never" else DECODER[:-1])
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<|y|>", normalized=True), AddedToken("to the", normalized=True)])
    return tokenizer


SPECIALS = ["<s>", "</s>", "<|x|>", "<unk>", "<0x41>", MARK, "  ", " <s> ", "<|y|>", " <|y|>", "to the",
            " to the <|y|> ", MARK + "<|y|>", "<|x|><|y|>"]


def random_texts(count, seed):
    r = random.Random(seed)
    for i in range(count):
        text = "".join(random_char(r) for _ in range(r.choice([0, 1, 2, 5, 20, 60])))
        if i % 4 == 0:
            at = r.randint(0, len(text))
            text = text[:at] + r.choice(SPECIALS) + text[at:]
        yield text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"fuse_unk": True}, {"fuse_unk": False, "ignore_merges": True}],
                         ids=["fused", "whole"])
@pytest.mark.parametrize("with_bytes", [True, False], ids=["bytes", "unknown"])
def test_same_ids(form, options, with_bytes, tmp_path, test_data):  # noqa: F811
    tokenizer = trained(form, with_bytes, **options)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [*random_texts(10000 if FULL else 1500, 1), *make_text(200, seed=5).split("\n"), make_text(300, seed=6)]
    ours = encode_by_c(test_data, tmp_path / "tokenizer.json", texts)
    for text, (ids, decoded) in zip(texts, ours):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected, repr(text)
        if with_bytes:
            assert decoded.decode() == tokenizer.decode(expected, skip_special_tokens=False), repr(text)


def small_model(folder, family="llama", V=1000):
    if family == "gpt2":
        config = gpt2_config(V, 32, 64, L=1, NH=2, n_inner=64)
        return model_write(folder, config, init.random_weights(init.gpt2_shapes(config), 1, 0.3))
    config = llama_config(V, 32, 64, L=1, NH=2)
    return model_write(folder, config, init.random_weights(init.llama_shapes(config), 1, 0.3))


def test_prompts(tmp_path):
    """What the post_processor puts before a text goes before a prompt; prompt and answer join without a lost space."""
    tokenizer, model = trained("normalizer"), small_model(tmp_path / "model")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(model / "tokenizer.json"))
    prompts = ["a b", "tree", "", " two  spaces", "東京 naïve"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "max_tokens": 9}) + "\n" for p in prompts))
    run = train_gpt("-m", model, "--prompts", tmp_path / "prompts.jsonl", "--temperature", 0, "-b", 2, "--stop", "")
    for line in map(json.loads, run.out.splitlines()):
        ids = tokenizer.encode(prompts[line["index"]]).ids
        assert line["prompt_tokens"] == len(ids) and ids[0] == 1
        whole, begin = (tokenizer.decode(x, skip_special_tokens=False) for x in (ids + line["ids"], ids))
        assert whole.startswith(begin) and line["text"] == whole[len(begin):]
    run = train_gpt("-m", model, "--generate", "a b", "--sample-tokens", 0)
    assert run.out == "a b\n"


def test_begins_once(tmp_path):
    """A prompt that has <s> gets no second one, unless it is asked for."""
    tokenizer, model = trained("normalizer"), small_model(tmp_path / "model")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(model / "tokenizer.json"))
    n = len(tokenizer.encode("a b", add_special_tokens=False).ids)
    asked = [({"prompt": "a b"}, n + 1), ({"prompt": "<s>a b"}, n + 1), ({"prompt": "<s><s>a b"}, n + 2),
             ({"prompt": "<s>a b", "add_special_tokens": True}, n + 2),
             ({"prompt": "a b", "add_special_tokens": False}, n)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({**line, "max_tokens": 1}) + "\n" for line, _ in asked))
    run = train_gpt("-m", model, "--prompts", tmp_path / "p.jsonl", "-b", 4)
    answers = {line["index"]: line["prompt_tokens"] for line in map(json.loads, run.out.splitlines())}
    assert answers == {i: want for i, (_, want) in enumerate(asked)}


@pytest.mark.parametrize("ranks,layout", [(1, []), (2, ["-z", 3]), (2, ["--tp", 2])])
def test_training_needs_no_tokenizer(tmp_path, ranks, layout):
    """One that is not supported: said at the start; the run is saved with it, without a sample, and exits 0."""
    model = small_model(tmp_path / "model")
    file = json.loads(trained("first").to_str())
    (model / "tokenizer.json").write_text(json.dumps({**file, "pre_tokenizer": {"type": "Whitespace"}}))
    for part in ("train", "val"):
        shard_write(tmp_path / "data" / f"{part}_000000.bin", init.tokens(400, 1000, 1), 1000)
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-t", 8, "-b", 2, "-n", 2, *layout, "--sample-tokens", 4,
                    out=tmp_path / "run", ranks=ranks)
    said = [line for line in run.out.splitlines() if line.startswith("sample ")]
    assert len(said) == 1 and "none: " in said[0] and 'the pre_tokenizer "Whitespace" is not supported' in said[0]
    assert (run.checkpoint(2) / "tokenizer.json").exists()
    (model / "tokenizer.json").write_text(json.dumps(file))
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-t", 8, "-b", 2, "-n", 2, *layout, "--sample-tokens", 4,
                    out=tmp_path / "again", ranks=ranks)
    assert "sample  after the first 8 tokens" in run.out
    run = train_gpt("-m", model, "--generate", "a b", "-t", 8, *layout, "--sample-tokens", 0, ranks=ranks)
    assert run.out == "a b\n"


@pytest.mark.parametrize("ranks,stage,micro_batch,family", [(1, 0, 4, "llama"), (1, 0, 3, "gpt2"), (2, 1, 4, "gpt2"),
                                                            (2, 3, 2, "llama")])
def test_choices(tmp_path, ranks, stage, micro_batch, family):
    """Answers worked out from the logits that --prompts gives."""
    tokenizer, model = trained("first"), small_model(tmp_path / "model", family)
    tokenizer.save(str(model / "tokenizer.json"))
    r, items, requests = random.Random(1), [], []
    words = make_text(60).split()
    for _ in range(7):
        context = " ".join(r.choices(words, k=6))
        endings = [" ".join(r.choices(words, k=r.randint(1, 4))) for _ in range(4)]
        items.append({"ctx": context, "endings": endings, "label": r.randrange(4)})
        for ending in endings:
            first, ids = len(tokenizer.encode(context).ids), tokenizer.encode(context + " " + ending).ids
            requests += [(ids[:at], ids[at]) for at in range(first, len(ids))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"ids": ids, "max_tokens": 0, "logits": True}) + "\n"
                                              for ids, _ in requests))
    answer = train_gpt("-m", model, "--prompts", tmp_path / "p.jsonl", "-b", 8).out
    lines = [json.loads(line) for line in answer.splitlines()]
    logits = iter([np.array(line["logits"]) for line in sorted(lines, key=lambda line: line["index"])])
    targets = iter([target for _, target in requests])
    right, right_per_byte = 0, 0
    for item in items:
        scores = []
        for ending in item["endings"]:
            first = len(tokenizer.encode(item["ctx"]).ids)
            count = len(tokenizer.encode(item["ctx"] + " " + ending).ids) - first
            scores.append(sum(x[t] - np.log(np.exp(x).sum()) for x, t in ((next(logits), next(targets))
                                                                          for _ in range(count))))
        right += int(np.argmax(scores)) == item["label"]
        sizes = np.array([len(ending.encode()) for ending in item["endings"]])
        right_per_byte += int(np.argmax(scores / sizes)) == item["label"]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    out = train_gpt("-m", model, "--choices", tmp_path / "items.jsonl", "-z", stage, "-b", micro_batch, "-t", 48,
                    ranks=ranks).out
    assert f"7 lines | accuracy {right / 7:.4f} by likelihood, {right_per_byte / 7:.4f} by likelihood per byte" in out


@pytest.mark.parametrize("change,complaint", [
    ({"normalizer": {"type": "Lowercase"}}, "Lowercase"), ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}}, "U+2581")])
def test_refused(change, complaint, tmp_path):
    model = small_model(tmp_path / "model")
    file = json.loads(trained("first").to_str())
    (model / "tokenizer.json").write_text(json.dumps({**file, **change}))
    run = train_gpt("-m", model, "--generate", "x", ok=False)
    assert complaint in run.err and "tokenizer.json" in run.err
