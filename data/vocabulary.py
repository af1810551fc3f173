"""vocabulary.py: the tokenizer of prepare.py, read or trained; where a text may be cut for it; what marks documents.

    tokenizer_load(path)            a tokenizer.json, or a folder with it or with vocab.json and merges.txt
    tokenizer_train(texts, size)    byte-level BPE
    cut, drops = cutting(t)         where a text may be cut so that the pieces give the ids of the whole
    marks(t, path, name)            ids laid before and after each document
"""
import json
import os
import re

from sources import CUT, Refused, decode, pieces, read_whole

END_OF_TEXT = "<|endoftext|>"
# The end-of-text token of base models; the first that the vocabulary has. A chat model's <|eot_id|>, <|im_end|> or
# <end_of_turn> ends a turn, not a text.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOS_TOKEN>")


def tokenizer_train(texts, vocab_size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_of(text, name):
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:                                 # the library raises bare Exception
        raise Refused(f"{name}: is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()                                  # a file may carry both, and texts would be cut short
    tokenizer.no_padding()
    return tokenizer


def json_beside(folder, name):
    """The object of a JSON file; empty if there is none."""
    path = os.path.join(folder, name)
    try:
        value = json.loads(read_whole(path)) if os.path.isfile(path) else {}
    except ValueError as error:
        raise Refused(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"{path}: is no JSON object")
    return value


def tokenizer_load(path):
    """From tokenizer.json, or vocab.json and merges.txt as GPT-2 has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    if not os.path.isdir(path):
        return tokenizer_of(decode([read_whole(path)], path), path)
    file, vocab, merges = (os.path.join(path, name) for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if os.path.isfile(file):
        return tokenizer_of(decode([read_whole(file)], file), file)
    if not os.path.isfile(vocab) or not os.path.isfile(merges):
        raise Refused(f"{path}: has neither tokenizer.json nor vocab.json and merges.txt")
    config = json_beside(path, "tokenizer_config.json")
    model_type = json_beside(path, "config.json").get("model_type", "")
    name = config.get("tokenizer_class") or ("Qwen2Tokenizer" if model_type.startswith("qwen") else "GPT2Tokenizer")
    if not name.startswith("GPT2Tokenizer"):                   # data/tokenizer_files.h reads the same
        raise Refused(f"{path}: its vocab.json and merges.txt are those of a {name}; only GPT2Tokenizer's are read: "
                      "have transformers save it as tokenizer.json")
    try:
        tokenizer = Tokenizer(models.BPE.from_file(vocab, merges))
    except Exception as error:                                 # bare here too
        raise Refused(f"{path}: its vocab.json and merges.txt are no byte-level BPE: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = {int(i): token["content"] for i, token in config.get("added_tokens_decoder", {}).items()}
    added.update((i, token) for token, i in json_beside(path, "added_tokens.json").items())
    special = [config.get(f"{key}_token") or END_OF_TEXT for key in ("unk", "bos", "eos", "pad")]
    special = [token["content"] if isinstance(token, dict) else token for token in special]
    tokenizer.add_special_tokens([added[i] for i in sorted(added)] + special)
    return tokenizer


def vocab_size_of(tokenizer):
    return max(tokenizer.get_vocab().values()) + 1             # a vocabulary may have gaps


# ---------------------------------------------------------------- where a text may be cut

SPACE_CUT = re.compile("(?<=[^\\s\u2581])(?= [^\\s\u2581])")
PROBE = ("The quick brown fox jumps over the lazy dog. It's 1234 of the lot, in the\nend and to the west: na\u00efve "
         "\u6771\u4eac (x) {y} = f(a);\n'tis l'\u00e9t\u00e9\tof \"it\" \u2014 5 % of http://a.b/c?d=e&f\nI'm, 'as' "
         "one of e\u0301 a\u0308\n<b> # x_1\n")


def words_are_apart(tokenizer):
    """Does no token go from a word into the next? Either a pattern cuts the text into words, or it is SentencePiece's
    BPE over the whole text and no entry of its vocabulary has a space after a letter."""
    spec = json.loads(tokenizer.to_str())
    top = spec.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", [top])
    if any(step.get("use_regex") or "Regex" in (step.get("pattern") or {}) for step in steps):
        return True
    model = spec["model"]
    return (model.get("type") == "BPE" and not model.get("ignore_merges") and "\u2581" in model["vocab"]
            and not any(re.search("[^\u2581]\u2581", token) for token in model["vocab"]))


def cutting(tokenizer):
    """(places, drops): a pattern of the places where a text may be cut, None if nowhere; drops: the tokenizer puts a
    space before each piece, so the one at the cut is left out. Tried on a text that is cut at every such place."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not words_are_apart(tokenizer) or any(re.search(r"\S |\n\S", token.content) for token in added):
        return None, False
    after = "".join(f"(?<!{re.escape(token.content)})" for token in added if token.rstrip)   # it takes the space to it
    want = tokenizer.encode(PROBE, add_special_tokens=False).ids
    for places, drops in ((CUT, False), (SPACE_CUT, False), (SPACE_CUT, True)):
        places = re.compile(f"{after}(?:{places.pattern})") if after else places
        parts = list(pieces([PROBE], "", places, 1))
        ids = [tokenizer.encode(part[drops and i > 0:], add_special_tokens=False).ids for i, part in enumerate(parts)]
        if sum(ids, []) == want:
            return places, drops
    return None, False


# ---------------------------------------------------------------- what marks a document

def end_of_text_of(tokenizer, path, name):
    """The id of `name`, or the base model's end-of-text token; None if there is none."""
    if name is not None:
        if tokenizer.token_to_id(name) is None:
            raise Refused(f"--end-of-text is {name}, which is no token of the vocabulary")
        return tokenizer.token_to_id(name)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    have = [n for n in END_OF_TEXT_NAMES if tokenizer.token_to_id(n) is not None]
    found = next((n for n in have if n in special), have[0] if have else None)
    if found is None and path is not None:
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        found = json_beside(folder, "tokenizer_config.json").get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
    return tokenizer.token_to_id(found) if isinstance(found, str) else None


def marks(tokenizer, path=None, name=None):
    """(ids before each document, ids after it). Before: what the post-processor puts there (<|begin_of_text|>, <s>),
    for GPT-2, Qwen2 and what is trained here nothing. After: what it puts there, and the end-of-text token."""
    end = end_of_text_of(tokenizer, path, name)
    end = [] if end is None else [end]
    encoding = tokenizer.encode("x")
    text = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    before, after = encoding.ids[:text[0]], encoding.ids[text[-1] + 1:]
    return before, after if after[-1:] == end else after + end


def tokenizer_config(tokenizer, before, after):
    """What transformers reads beside tokenizer.json."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    begin, end = (tokenizer.id_to_token(ids[-1]) if ids else None for ids in (before or after, after))
    unknown = getattr(tokenizer.model, "unk_token", None) or (end if not before else None)      # as GPT-2's own
    names = {"bos_token": begin, "eos_token": end, "unk_token": unknown}
    config.update((key, name) for key, name in names.items() if name)
    return config
