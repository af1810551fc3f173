"""BPE with byte fallback (Llama-2, Mistral) against the tokenizers library: tokenizers are trained on the spot in every
form that tokenizer.json files have; ids and decoded text are equal on random strings and on made-up text."""
import json
import random

import pytest
from test_prepare import encode_by_c, make_text, random_char, test_data  # noqa: F401  (test_data is a fixture)
from util import FULL

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

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
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(DECODER if form != "never" else DECODER[:-1])
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True, normalized=False)])
    return tokenizer


def random_texts(count, seed):
    r = random.Random(seed)
    for i in range(count):
        text = "".join(random_char(r) for _ in range(r.choice([0, 1, 2, 5, 20, 60])))
        if i % 4 == 0:
            at = r.randint(0, len(text))
            text = text[:at] + r.choice(["<s>", "</s>", "<|x|>", "<unk>", "<0x41>", MARK, "  ", " <s> "]) + text[at:]
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


@pytest.mark.parametrize("change,complaint", [
    ({"normalizer": {"type": "NFKC"}}, "NFKC"), ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False}}, "U+2581")])
def test_refused(change, complaint, tmp_path):
    from util import gpt2_config, model_write, train_gpt
    import init
    import numpy as np
    config = gpt2_config(1000, 8, 16)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in init.gpt2_shapes(config).items()}
    model = model_write(tmp_path / "model", config, tensors)
    file = json.loads(trained("first").to_str())
    (model / "tokenizer.json").write_text(json.dumps({**file, **change}))
    run = train_gpt("-m", model, "--generate", "x", ok=False)
    assert complaint in run.err and "tokenizer.json" in run.err
