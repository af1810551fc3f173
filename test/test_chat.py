"""Tests of conversations in data/prepare.py: formats, chat templates, which tokens count. Masks and texts that TRL and
transformers give are in test/golden/chat.json (dev/golden_chat.py); the templates here write the same texts."""
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PREPARE = os.path.join(ROOT, "data", "prepare.py")

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
spec = importlib.util.spec_from_file_location("prepare", PREPARE)
prepare = sys.modules.setdefault("prepare", importlib.util.module_from_spec(spec))
if not hasattr(prepare, "main"):
    spec.loader.exec_module(prepare)
chat = sys.modules["chat"]

GOLDEN = json.load(open(os.path.join(ROOT, "test/golden/chat.json")))
TEMPLATES = {
    # Thinking of answers before the last question is dropped; what follows it has a think block.
    "qwen3": r"""
        {%- set ns = namespace(question=0) %}
        {%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
        {%- for m in messages %}
            {{- '<|im_start|>' + m.role + '\n' }}
            {%- if m.role == 'assistant' %}GENERATION
                {%- set parts = m.content.split('</think>') %}
                {%- if loop.index0 > ns.question %}
                    {%- set thought = parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 else '' %}
                    {{- '<think>\n' + thought + '\n</think>\n\n' }}
                {%- endif %}
                {{- parts[-1].lstrip('\n') + '<|im_end|>\n' }}
            ENDGENERATION{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": r"""
        {{- bos_token }}
        {%- for m in messages %}
            {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
            {%- if m.role == 'assistant' %}GENERATION{{ m.content | trim + '<|eot_id|>' }}ENDGENERATION
            {%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "gemma": r"""
        {{- bos_token }}
        {%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
        {%- for m in messages %}
            {%- if m.role == 'assistant' %}
                {{- '<start_of_turn>model\n' }}GENERATION{{ m.content | trim + '<end_of_turn>\n' }}ENDGENERATION
            {%- else %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    # An end-of-text token ends the conversation, so that no shorter one's text begins it.
    "phi3": r"""
        {%- for m in messages %}
            {{- '<|' + m.role + '|>\n' }}
            {%- if m.role == 'assistant' %}GENERATION{{ m.content + '<|end|>\n' }}
                {%- if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}ENDGENERATION
            {%- else %}{{ m.content + '<|end|>\n' }}{% endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""}
MARKS = {False: ("", ""), True: ("{%- generation %}", "{%- endgeneration %}")}


def template_text(family, marked):
    text = TEMPLATES[family]
    for word, mark in zip(("ENDGENERATION", "GENERATION"), MARKS[marked][::-1]):
        text = text.replace(word, mark)
    return text


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_str(json.dumps(GOLDEN["tokenizer"]))


def render(template, record, tokenizer):
    text, spans, only_last = template.render(chat.conversation_of(record, "line"))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return text, "".join(map(str, chat.flags_of(encoding.offsets, spans))), only_last


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_masks_of_trl(family, marked, tokenizer):
    """Token by token. With marks all answers count, whatever the text of a shorter conversation."""
    known = GOLDEN["families"][family]
    template = chat.Template(template_text(family, marked), known["tokens"], family, 0)
    compared = 0
    for record, want in zip(GOLDEN["conversations"], known["found"]):
        if "tools" in record or (marked and want and want["only_last"]):
            continue
        if want is None:
            with pytest.raises(prepare.Refused, match="line: the chat template .* refuses .*no system role"):
                render(template, record, tokenizer)
            continue
        assert render(template, record, tokenizer) == (want["text"], want["mask"], want["only_last"] and not marked)
        compared += want["mask"].count("1")
    assert compared > 40


def test_marks_are_followed(tokenizer):
    template = chat.Template("{% for m in messages %}{{ m.content[:1] }}{% generation %}{{ m.content[1:3] }}"
                             "{% endgeneration %}{{ m.content[3:] }};{% endfor %}", {}, "it", 0)
    text, spans, _ = template.render(chat.conversation_of({"prompt": "question", "completion": "answer"}, "line"))
    assert text == "question;answer;" and spans == [(1, 3), (10, 12)]


def test_date_is_one():
    template = chat.Template("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", {}, "it", 86400 * 365)
    assert template.text(chat.conversation_of({"prompt": "a", "completion": "b"}, "line"), 2) == "01 Jan 1971a"


def test_spaces_without_a_place():
    """With trim_offsets a token of spaces alone has an empty place; it counts as its neighbours do."""
    offsets = [(0, 1), (2, 2), (2, 4), (5, 5), (6, 6), (6, 8)]                   # "a bc  de", a token for each space
    assert list(chat.flags_of(offsets, [(2, 8)])) == [0, 0, 1, 1, 1, 1]
    assert list(chat.flags_of(offsets, [(0, 4)])) == [1, 1, 1, 0, 0, 0]


QUESTION, ANSWER = {"role": "user", "content": "Why?\nBecause"}, {"role": "assistant", "content": "Of it."}


@pytest.mark.parametrize("record", [
    {"messages": [QUESTION, ANSWER]},
    {"messages": [{**QUESTION, "content": [{"type": "text", "text": "Why?\n"}, {"type": "text", "text": "Because"}]},
                  {**ANSWER, "weight": 1, "train": True}]},
    {"prompt": "Why?\nBecause", "completion": "Of it."}, {"prompt": [QUESTION], "completion": [ANSWER]},
    {"instruction": "Why?", "input": "Because", "output": "Of it.", "text": "the whole"},
    {"conversations": [{"from": "human", "value": "Why?\nBecause"}, {"from": "gpt", "value": "Of it."}]},
    {"conversations": [QUESTION, ANSWER]}])
def test_formats(record):
    c = chat.conversation_of(record, "line")
    assert c.messages == [QUESTION, ANSWER] and c.counts == [False, True] and c.tools is None


@pytest.mark.parametrize("key, value", [("weight", 0), ("train", False), ("training", 0)])
def test_answers_left_out(key, value, tokenizer):
    turns = [QUESTION, {**ANSWER, key: value}, QUESTION, ANSWER]
    template = chat.Template(template_text("llama3", key == "train"), {"bos_token": "<s>"}, "it", 0)
    _, mask, _ = render(template, {"messages": turns}, tokenizer)
    _, both, _ = render(template, {"messages": [QUESTION, ANSWER] * 2}, tokenizer)
    half = both.rindex("01") + 1
    assert "1" in both[:half] and mask == "0" * half + both[half:]


REFUSED = [
    ({"messages": []}, "list of messages"), ({"messages": [{"content": "a"}]}, "no \"role\""),
    ({"messages": [ANSWER]}, "begins with an answer"), ({"messages": [QUESTION]}, "no message of the assistant"),
    ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "\"weight\": 0.5"),
    ({"messages": [{**QUESTION, "train": True}, ANSWER]}, "role 'user' is to be trained on"),
    ({"messages": [{**QUESTION, "content": [{"type": "image_url"}]}, ANSWER]}, "type 'image_url'"),
    ({"messages": [QUESTION, {**ANSWER, "content": None}]}, "content is null"),
    ({"messages": [QUESTION, {**ANSWER, "function_call": {}, "content": 3}]}, "content is a number"),
    ({"messages": [QUESTION, {**ANSWER, "function_call": {"name": "f"}}]}, "function_call"),
    ({"messages": [QUESTION, ANSWER], "tools": "no"}, "\"tools\" must be a list"),
    ({"conversations": [{"from": "nobody", "value": "a"}]}, "from 'nobody'"),
    ({"instruction": 3, "output": "a"}, "must be texts"), ({"question": "a"}, "it has: question"),
    ({"messages": [QUESTION, {**ANSWER, "content": "\ufdd0"}]}, "noncharacter"),
    ({"conversations": [{"from": ["human"], "value": "a"}]}, "from ['human']"),
    ({"messages": [QUESTION, {**ANSWER, "content": "\ud800"}]}, "half of a surrogate pair")]


@pytest.mark.parametrize("record, words", REFUSED, ids=[words for _, words in REFUSED])
def test_refused(record, words):
    with pytest.raises(prepare.Refused, match="^file: line 3: ") as refused:
        chat.conversation_of(record, "file: line 3")
    assert words in str(refused.value)


def test_template_that_cannot_be_split():
    text = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}now{% endif %}"
    template = chat.Template(text, {}, "it", 0)
    with pytest.raises(prepare.Refused, match="line: the chat template it writes the last answer .*generation %}"):
        template.render(chat.conversation_of({"prompt": "a", "completion": "b"}, "line"))


@pytest.mark.parametrize("text", ["{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
                                  "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x[:2] }}"])
def test_broken_marks(text):
    with pytest.raises(prepare.Refused, match="line: the chat template it cuts what is between .*generation %}"):
        chat.Template(text, {}, "it", 0).render(chat.conversation_of({"prompt": "a", "completion": "b"}, "line"))


def run_prepare(*arguments, code=0):
    done = subprocess.run([sys.executable, PREPARE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def read_docs(path):
    head = np.fromfile(path, "<u8", 8)
    flags = np.fromfile(path, "u1", offset=64)
    assert head[0] == 0x1_7363_6F64 and head[1] == len(flags) and not head[4:].any()
    assert [head[2], head[3]] == [(flags >> 1 & 1).sum(), (flags & 1).sum()] and flags.max() <= 3
    return flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder with tokenizer and template, and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "model").mkdir()
    (folder / "model/tokenizer.json").write_text(json.dumps(GOLDEN["tokenizer"]))
    config = {"chat_template": template_text("qwen3", False), "eos_token": {"content": "<|im_end|>"}}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(config))
    records = [GOLDEN["conversations"][i % 5] for i in range(40)]
    records.insert(7, {"messages": [QUESTION, {**ANSWER, "weight": 0}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_and_flags(folder, workers, tokenizer):
    out = folder / f"out{workers}"
    said = run_prepare(folder / "chats.jsonl", "--tokenizer", folder / "model", "--out", out, "--shard-tokens", 300,
                       "--workers", workers, "--val-share", 0.25)
    assert "trained on the last answer only" in said and "1 left out, since no answer counts" in said
    known = [entry for entry in GOLDEN["families"]["qwen3"]["found"][:5]]
    ids = {entry["text"]: tokenizer.encode(entry["text"], add_special_tokens=False).ids for entry in known}
    want = [(ids[known[i % 5]["text"]], known[i % 5]["mask"]) for i in range(40)]
    tokens, flags, num_shards = [], [], 0
    for part in ("train", "val"):
        for path in sorted(out.glob(f"{part}_*.bin")):
            tokens += np.fromfile(path, "<u2", offset=1024).tolist()
            flags.append(read_docs(path.with_suffix(".docs")))
            assert len(flags[-1]) == (path.stat().st_size - 1024) // 2 and flags[-1][0] & 2
            assert np.fromfile(path, "<u4", 9)[5:].tolist() == [0, 0, 0, 0]      # neither bytes nor words
            num_shards += 1
    flags = np.concatenate(flags)
    assert num_shards > 5 and tokens == sum((ids for ids, _ in want), [])
    assert "".join(map(str, flags & 1)) == "".join(mask for _, mask in want)
    assert np.flatnonzero(flags & 2).tolist() == np.cumsum([0] + [len(ids) for ids, _ in want])[:-1].tolist()
    assert (out / "chat_template.jinja").read_text() == template_text("qwen3", False)
    meta = json.loads((out / "meta.json").read_text())
    assert sum(meta[part]["answers"]["tokens that count"] for part in ("train", "val")) == (flags & 1).sum()


def test_said_and_refused(folder, tmp_path):
    chats, model = folder / "chats.jsonl", folder / "model"
    assert "give its folder with --tokenizer" in run_prepare(chats, "--out", tmp_path / "a", code=1)
    assert "has no field \"text\"" in run_prepare(chats, "--out", tmp_path / "a", "--field", "text", code=1)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/tokenizer.json").write_text(json.dumps(GOLDEN["tokenizer"]))
    said = run_prepare(chats, "--tokenizer", tmp_path / "bare", "--out", tmp_path / "a", code=1)
    assert "has no chat template" in said and "--chat-template FILE" in said
    (tmp_path / "broken.jinja").write_text("{% for %}")
    said = run_prepare(chats, "--tokenizer", model, "--chat-template", tmp_path / "broken.jinja", "--out",
                       tmp_path / "a", code=1)
    assert "is no Jinja2 template" in said
    (tmp_path / "mixed.jsonl").write_text(chats.read_text() + '{"text": "a text"}\n')
    said = run_prepare(tmp_path / "mixed.jsonl", "--tokenizer", model, "--out", tmp_path / "a", code=1)
    assert "mixed.jsonl: line 42: is no conversation (it has: text)" in said
    (tmp_path / "none.jsonl").write_text((json.dumps({"messages": [QUESTION, {**ANSWER, "weight": 0}]}) + "\n") * 2)
    said = run_prepare(tmp_path / "none.jsonl", "--tokenizer", model, "--out", tmp_path / "none", "--val-share", 0.5,
                       code=1)
    assert "no answer of the train part counts" in said
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    said = run_prepare(tmp_path / "text.jsonl", "--tokenizer", model, "--chat-template", "x", "--out", tmp_path / "a",
                       code=1)
    assert "--chat-template is for conversations" in said
    run_prepare(chats, "--tokenizer", model, "--out", tmp_path / "b")
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    run_prepare(tmp_path / "text.txt", "--out", tmp_path / "b", "--tokenizer", model, "--force")
    assert not list((tmp_path / "b").glob("*.docs")) and not (tmp_path / "b/chat_template.jinja").exists()
