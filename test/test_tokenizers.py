"""tokenizer.json as published models have it (their normalizers, pre_tokenizers and kinds of added tokens, with a small
vocabulary that is trained here) against the tokenizers library: ids and decoded text of random strings."""
import json
import random

import pytest
from test_prepare import LLAMA3, QWEN2, encode_by_c, make_text, random_char, test_data  # noqa: F401
from test_sentencepiece import BYTES, MARK
from util import FULL

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402


def byte_level(regex=True, space=False):
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def digits(individual=True):
    return {"type": "Digits", "individual_digits": individual}


def replace(text, by):
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def metaspace(scheme, cuts):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": cuts}


GPT4 = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+")
DEEPSEEK3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
             r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA2 = [{"type": "Prepend", "prepend": MARK}, replace(" ", MARK)]
# normalizers, pre_tokenizers; LLAMA2's kind of model where no ByteLevel is among them.
FORMS = {
    "gpt2, phi-2, gpt-neo": ([], [byte_level()]),
    "smollm, starcoder2": ([], [digits(), byte_level()]),
    "llama3": ([], [split(LLAMA3), byte_level(False)]),
    "phi4, gpt-4": ([], [split(LLAMA3, "Removed", True), byte_level(False)]),
    "qwen2, qwen3": ([{"type": "NFC"}], [split(QWEN2), byte_level(False)]),
    "mistral-nemo, gpt-4o": ([], [split(GPT4), byte_level(False)]),
    "deepseek-coder": ([], [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"),
                            digits(), byte_level(False)]),
    "deepseek-llm, deepseek-v2": ([], [split("[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷ]+"),
                                       split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$".rstrip("$")),
                                       split("[一-龥ࠀ-一가-퟿]+"), digits(), byte_level(False)]),
    "deepseek-v3, deepseek-r1": ([], [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3),
                                      byte_level(False)]),
    "pythia, olmo": ([{"type": "NFC"}], [byte_level()]),
    "falcon": ([], [{"type": "Punctuation", "behavior": "Contiguous"}, byte_level(), digits(False),
                    split("[0-9][0-9][0-9]")]),
    "llama2, mistral, phi3, tinyllama": (LLAMA2, []),
    "mistral-v0.3": ([], [metaspace("first", False)]),
    "gemma": ([replace(" ", MARK)], [split(" ", "MergedWithPrevious", kind="String")]),
    # Every form of a step, in kinds that no model above has.
    "NFKC, metaspace, digits": ([{"type": "NFKC"}], [metaspace("always", True), digits()]),
    "NFD, string": ([{"type": "NFD"}, replace("th", "ht")], [split("e ", "MergedWithNext", kind="String"),
                                                             split(r"\p{L}+", "MergedWithPrevious"), byte_level()]),
    "NFKD, contiguous": ([{"type": "NFKD"}], [split("[aeiou]", "Contiguous"), split(" ", "Removed", kind="String"),
                                              {"type": "Punctuation", "behavior": "MergedWithNext"},
                                              byte_level(False, True)]),
    "inverted": ([], [split(r"\s", "MergedWithNext", True), split("[.,]", "MergedWithPrevious", True),
                      split("[0-9]", "Contiguous", True), byte_level(False)]),
}
# What added tokens may ask for, in the models' own: Phi-3's and Phi-4's take spaces, RoBERTa's <mask> those before it.
FLAGS = [("<|end|>", {"rstrip": True}), ("<mask>", {"lstrip": True}), ("<|both|>", {"lstrip": True, "rstrip": True}),
         ("the", {"single_word": True, "normalized": True}), ("e\u0301t\u00e9", {"normalized": True, "rstrip": True}),
         ("<|im|>", {"special": True}), ("  ", {"normalized": True}), ("\t\t", {"single_word": True}),
         ("in", {"single_word": True, "lstrip": True}), ("<|im|><|end|>", {"special": True, "rstrip": True}),
         ("\v\v", {"lstrip": True})]              # the library panics where another token takes more than it
SPACES = [" ", "  ", "   ", "\n", "\t\t", "\u00a0", "\u3000 ", "\u180e", "\u2028", ""]


def made(normal, steps, flags):
    """The tokenizer.json of a form."""
    spells = any(step["type"] == "ByteLevel" for step in steps)
    tokenizer = Tokenizer(models.BPE() if spells else models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = (pre_tokenizers.ByteLevel(add_prefix_space=False) if spells
                               else pre_tokenizers.Metaspace(MARK, "always", split=True))
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *([] if spells else BYTES)],
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if spells else [])
    tokenizer.train_from_iterator(make_text(1000).splitlines(keepends=True), trainer)
    file = json.loads(tokenizer.to_str())
    last = max(file["model"]["vocab"].values())
    file["added_tokens"] = [{"id": 0, "content": "<unk>", "single_word": False, "lstrip": False, "rstrip": False,
                             "normalized": False, "special": True}]
    for i, (content, more) in enumerate(FLAGS if flags else []):
        file["added_tokens"].append({**file["added_tokens"][0], "special": False, "id": last + 1 + i,
                                     "content": content, **more})
    file["normalizer"] = {"type": "Sequence", "normalizers": normal} if normal else None
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if steps else None
    of_characters = {"type": "Sequence", "decoders": [replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}
    file["decoder"] = byte_level() if spells else of_characters
    return json.dumps(file)


def texts(count, seed):
    r = random.Random(seed)
    yield from ["", " ", make_text(20, seed=3), "the", "the the", "in the in", "thein", " in  the",
                "a<|end|>\v\v", " \v\v<|end|> \nb", "the\u0301 in_"]
    for _ in range(count):
        parts = []
        for _ in range(r.choice([1, 2, 5, 20, 60])):
            kind = r.random()
            parts.append(random_char(r) if kind < 0.75 else r.choice(SPACES) if kind < 0.9
                         else r.choice(FLAGS[:-1])[0] if kind < 0.97 else str(r.randrange(100000)))
        yield "".join(parts)


@pytest.mark.parametrize("flags", [False, True], ids=["plain", "added"])
@pytest.mark.parametrize("form", FORMS)
def test_published(form, flags, tmp_path, test_data):  # noqa: F811
    (tmp_path / "tokenizer.json").write_text(made(*FORMS[form], flags))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    all_texts = [*texts(10000 if FULL else 250, f"{form} {flags}")]
    for text, (ids, decoded) in zip(all_texts, encode_by_c(test_data, tmp_path / "tokenizer.json", all_texts)):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected, repr(text)
        assert decoded.decode(errors="replace") == tokenizer.decode(expected, skip_special_tokens=False), repr(text)
