#!/usr/bin/env python3
"""golden_chat.py: which tokens of a conversation count, by TRL: test/golden/chat.json, for test/test_chat.py.

    python3 dev/golden_chat.py        needs trl, transformers, jinja2

For each family the tokens of its own template's text, and which of them TRL's training template marks
({% generation %}), as transformers counts them. Where the training template writes another text (Qwen 3, whose own one
drops old thinking), the last answer's. Before it writes, it compares data/chat.py with both: with the own template,
which has no marks, and with the training template, which has."""
import json
import pathlib
import sys

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))
from chat import Template, conversation_of, flags_of       # noqa: E402

TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"
# Of these the first four are stored. Left out: Qwen 2.5 and GLM, whose training templates count the line end of the
# generation prompt too, which no answer writes.
FAMILIES = {
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "phi3": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "phi3_5": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "cohere": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "lfm2": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
    "qwen3_instruct_2507": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
STORED = list(FAMILIES)[:4]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<s>",
           "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|system|>",
           "<|user|>", "<|assistant|>", "<|end|>"]


def say(*turns, tools=None):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": roles[turn[0]], "content": turn[1:]} if isinstance(turn, str) else turn for turn in turns]
    return {"messages": messages, **({"tools": tools} if tools else {})}


CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}]}
ADD = {"type": "function", "function": {"name": "add", "description": "adds <two> numbers", "parameters": {}}}
CONVERSATIONS = [
    say("uHi", "aHello there!"),
    say("sBe short.", "uWhat is 1 + 1?", "a2", "uAnd 2 + 2?", "aThat is 4.\n\nAnything else?", "uNo.",
        "aBye \u6771\u4eac."),
    say("u  What now? \n", "a\n\n  Nothing at all. \n\n"),
    say("uthink", "a<think>\nthe user asks\n</think>\n\nThe answer."),
    say("uthink", "a<think>\none\n</think>\n\nFirst.", "uonce more", "a<think>\ntwo\n</think>\n\nSecond."),
    say("uAdd.", CALL, {"role": "tool", "content": "3"}, "aIt is 3.", tools=[ADD]),
    say("uempty", "a"),
]


def tokenizer():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = ["the user asks and the assistant answers\n\nwith words, numbers 1 2 3 and <think>\n</think>\n\n! ?\n"] * 50
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    t.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return t


def by_trl(fast, template, c):
    """(ids, mask), or None where the template refuses the conversation."""
    try:
        out = fast.apply_chat_template(c["messages"], tools=c.get("tools"), chat_template=template, tokenize=True,
                                       return_dict=True, return_assistant_tokens_mask=True)
    except Exception:
        return None
    return out["input_ids"], out["assistant_masks"]


def by_us(t, template, c, tokens):
    text, spans, only_last = Template(template, tokens, "it", 0).render(conversation_of(c, "it"))
    encoding = t.encode(text, add_special_tokens=False)
    return text, encoding.ids, list(flags_of(encoding.offsets, spans)), only_last


def last_answer(own, training):
    """The mask of TRL's last answer on the own template's ids, which end in the same tokens."""
    (ids, _), (other, mask) = own, training
    last = len(mask) - 1 - mask[::-1].index(1)
    first = last
    while first > 0 and mask[first - 1]:
        first -= 1
    size = len(mask) - first
    assert other[first:] == ids[-size:]
    return [0] * (len(ids) - size) + mask[first:]


def golden(t, family, c):
    tokens = FAMILIES[family]
    fast = PreTrainedTokenizerFast(tokenizer_object=t, **tokens)
    own, training = ((TEMPLATES / f"{family}{kind}.jinja").read_text() for kind in ("", "_training"))
    plain, marked = by_trl(fast, own, c), by_trl(fast, training, c)
    if plain is None:
        return None
    text, ids, mask, only_last = by_us(t, own, c, tokens)
    assert text == fast.apply_chat_template(c["messages"], tools=c.get("tools"), chat_template=own, tokenize=False)
    assert ids == plain[0], (family, c)
    want = marked[1] if marked[0] == ids and not only_last else last_answer(plain, marked)
    assert mask == want, (family, c, mask, want)
    assert by_us(t, training, c, tokens)[1:3] == marked, (family, c)
    return {"text": text, "mask": "".join(map(str, want)), "only_last": only_last}


def main():
    t = tokenizer()
    found = {family: [golden(t, family, c) for c in CONVERSATIONS] for family in FAMILIES}
    record = {"trl": trl.__version__, "conversations": CONVERSATIONS, "tokenizer": json.loads(t.to_str()),
              "families": {family: {"tokens": FAMILIES[family], "found": found[family]} for family in STORED}}
    path = ROOT / "test/golden/chat.json"
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    entries = [entry for family in found.values() for entry in family if entry]
    print(f"equal to TRL {trl.__version__}: {len(found)} families, {len(entries)} conversations, "
          f"{sum(len(entry['mask']) for entry in entries)} tokens; written: {path.name}, {len(STORED)} families")


if __name__ == "__main__":
    main()
