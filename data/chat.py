"""chat.py: conversations for prepare.py: the formats of records, the chat template of a model's folder, what counts.

    format_of(record)                        the row of FORMATS that a JSON object is, or None
    conversation_of(record, where)           a Conversation: messages as chat templates take them
    template = Template(text, tokens, date)  a Jinja2 template with the functions that transformers gives to it
    template.render(conversation)            (text, [(begin, end) of what counts, in characters], last answer only?)
    flags_of(offsets, spans)                 of each token: does it count as a target?

What counts is what the template writes for an answer after the generation prompt, to the end of the turn. Where the
template marks it ({% generation %} ... {% endgeneration %}), the marks say so. Else it is found by rendering the
messages up to the answer, with the generation prompt, and those up to and with it: the first text must begin the
second, and the second the whole. A template that writes earlier answers in another way than the last (Qwen 3
drops their thinking) breaks the latter: then the last answer alone counts.
"""
import json
import os
import re
import time
from dataclasses import dataclass

from sources import JSON_KINDS, Refused, checked_text, decode, read_whole
from vocabulary import json_beside

BEGIN, END = "\ufdd0", "\ufdd1"          # marks in the rendered text: noncharacters, which no text should have


# ---------------------------------------------------------------- the formats of records

@dataclass
class Conversation:
    where: str                           # file and line, for messages
    messages: list
    tools: object                        # as the template takes them, or None
    counts: list                         # of each message: is it an answer that counts?
    size_bytes: int = 0


def messages_format(record, where):
    return texts_of(record["messages"], where, "messages")


def sharegpt_format(record, where):
    turns = texts_of(record["conversations"], where, "conversations")
    if any("role" in turn for turn in turns):
        return turns
    messages = []
    for turn in turns:
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise Refused(f'{where}: a turn is from {turn.get("from")!r}, with the value {turn.get("value")!r:.40}; '
                          f"known are {', '.join(SHAREGPT_ROLES)}, with a text")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": role, "content": turn["value"], **rest})
    return messages


def prompt_format(record, where):
    sides = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        text = record[key]
        side = [{"role": role, "content": text}] if isinstance(text, str) else texts_of(text, where, key)
        if role == "user":               # answers in a prompt are given, not learned
            side = [{**turn, "weight": 0} if turn.get("role") == "assistant" else turn for turn in side]
        sides += side
    return sides


def alpaca_format(record, where):
    texts = [record.get(key) or "" for key in ("instruction", "input", "output")]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}: instruction, input and output must be texts")
    return [{"role": "user", "content": "\n".join(text for text in texts[:2] if text)},
            {"role": "assistant", "content": texts[2]}]


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
                  "model": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
FORMATS = [({"messages"}, messages_format), ({"conversations"}, sharegpt_format),
           ({"prompt", "completion"}, prompt_format), ({"instruction", "output"}, alpaca_format)]


def format_of(record):
    return next((row for row in FORMATS if row[0] <= record.keys()), None) if isinstance(record, dict) else None


def texts_of(turns, where, field):
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise Refused(f'{where}: "{field}" must be a list of messages, which are objects')
    return turns


def content_of(message, where):
    """A list of parts becomes their text; parts that are no text are refused."""
    content = message.get("content")
    if isinstance(content, list):
        other = next((part for part in content if not isinstance(part, dict) or part.get("type") != "text"
                      or not isinstance(part.get("text"), str)), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, dict) else JSON_KINDS.get(type(other), "a text")
            raise Refused(f"{where}: a message has a part of the type {kind!r}; only parts with \"type\": \"text\" are "
                          f"read: leave the line out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise Refused(f"{where}: a message's content is {JSON_KINDS.get(type(content), 'missing')}, a text is needed")
    checked_text(content or "", where)
    if content and (BEGIN in content or END in content):
        raise Refused(f"{where}: a message has the noncharacter U+FDD0 or U+FDD1; leave it out")
    return content


def counts_of(message, where):
    """weight (OpenAI) and train (Axolotl): 0 or false leaves an answer out of the loss."""
    given = {key: message[key] for key in ("weight", "train", "training") if message.get(key) is not None}
    bad = next((f'"{key}": {value!r}' for key, value in given.items() if value not in (0, 1)), None)
    if bad:
        raise Refused(f"{where}: a message has {bad}; 0 and 1, false and true are taken: an answer counts or does not")
    if message["role"] != "assistant" and any(given.values()):
        raise Refused(f'{where}: a message of the role {message["role"]!r} is to be trained on; only answers of the '
                      f"assistant are: leave {', '.join(given)} out")
    return message["role"] == "assistant" and all(given.values())


def conversation_of(record, where):
    row = format_of(record)
    if row is None:
        known = "; ".join(", ".join(sorted(keys)) for keys, _ in FORMATS)
        have = ", ".join(map(str, list(record)[:8])) or "none"
        raise Refused(f"{where}: is no conversation (it has: {have}); it must have the fields of one of: {known}")
    messages, counts = [], []
    for turn in row[1](record, where):
        if not isinstance(turn.get("role"), str):
            raise Refused(f'{where}: a message has no "role"')
        if turn.get("function_call"):
            raise Refused(f'{where}: a message has "function_call", OpenAI\'s former format; write it as "tool_calls"')
        counts.append(counts_of(turn, where))
        rest = {key: value for key, value in turn.items() if key not in ("weight", "train", "training")}
        messages.append({**rest, "content": content_of(turn, where)})
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
        counts.insert(0, False)
    if messages[0]["role"] == "assistant":
        raise Refused(f"{where}: begins with an answer; give the message that it answers, or leave the line out")
    if not any(message["role"] == "assistant" for message in messages):
        raise Refused(f"{where}: has no message of the assistant: nothing is to be learned from it; leave it out")
    size = sum(len((message["content"] or "").encode()) for message in messages)
    return Conversation(where, messages, tools_of(record.get("tools"), where), counts, size)


def tools_of(tools, where):
    """The functions that an answer may call; as text (LlamaFactory's sharegpt) they are JSON."""
    parsed = tools
    try:
        parsed = json.loads(tools) if isinstance(tools, str) and tools else tools
    except ValueError:
        pass
    if parsed and not (isinstance(parsed, list) and all(isinstance(tool, dict) for tool in parsed)):
        raise Refused(f'{where}: "tools" must be a list of objects, as in OpenAI\'s format')
    return parsed or None


# ---------------------------------------------------------------- the template

def template_of(path, file):
    """(text of the chat template, {name: special token}) of a tokenizer's folder; `file` is used instead if given."""
    folder = path if path is None or os.path.isdir(path) else os.path.dirname(path)
    config = json_beside(folder, "tokenizer_config.json") if folder is not None else {}
    own = os.path.join(folder or "", "chat_template.jinja")
    text = config.get("chat_template")
    if isinstance(text, list):           # several, by name
        text = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}.get("default")
    if file is not None or folder is not None and os.path.isfile(own):
        text = decode([read_whole(file or own)], file or own)
    if not isinstance(text, str):
        raise Refused(f"{path}: has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                      f"give the folder of a chat model, or a template with --chat-template FILE")
    names = json_beside(folder, "special_tokens_map.json") if folder is not None else {}
    tokens = {}
    for key, value in {**names, **config}.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return text, tokens


def environment(date):
    """Jinja2 as transformers sets it up for chat templates: sandboxed, since a template is a stranger's program."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise Refused("chat templates are read by the Python package jinja2, which is missing; run: "
                      ".venv/bin/pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller):
            return BEGIN + caller() + END

    def refuse(message):
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(value, ensure_ascii=ensure_ascii, **how)
    env.globals.update(raise_exception=refuse, strftime_now=lambda form: time.strftime(form, time.gmtime(date)))
    return env


class Template:
    """date: seconds since 1970, for templates that write the day: the same for all conversations."""

    def __init__(self, text, tokens, name, date):
        self.source, self.tokens, self.name, self.date = text, tokens, name, date
        self.eos = tokens.get("eos_token", "")
        try:
            self.template = environment(date).from_string(text)
        except Exception as error:       # of the parser, which is the stranger's text
            raise Refused(f"{name}: is no Jinja2 template: {error}") from None

    def text(self, c, end, prompt=False):
        """Of the first `end` messages, marks in it; with the generation prompt behind them."""
        try:
            text = self.template.render(messages=c.messages[:end], tools=c.tools, documents=None,
                                        add_generation_prompt=prompt, **self.tokens)
        except Exception as error:       # the template's own words, or its mistake in handling this conversation
            raise Refused(f"{c.where}: the chat template {self.name} refuses the conversation: {error}") from None
        if re.fullmatch(f"[^{BEGIN}{END}]*({BEGIN}[^{BEGIN}{END}]*{END}[^{BEGIN}{END}]*)*", text) is None:
            raise Refused(f"{c.where}: the chat template {self.name} cuts what is between {{% generation %}} and "
                          f"{{% endgeneration %}}, or has one within the other: give another with --chat-template FILE")
        return checked_text(text, c.where)

    def render(self, c):
        whole, marks = cut_marks(self.text(c, len(c.messages)))
        answers = [k for k, message in enumerate(c.messages) if message["role"] == "assistant"]
        if marks and all(c.counts[k] for k in answers):
            return whole, marks, False
        spans = {k: self.answer(c, k, whole) for k in answers}
        only_last = None in spans.values()
        if only_last and spans[answers[-1]] is None:
            raise Refused(f"{c.where}: the chat template {self.name} writes the last answer in another way than its "
                          f"generation prompt: mark what counts in it with {{% generation %}} ... "
                          f"{{% endgeneration %}}, and give it with --chat-template FILE")
        chosen = [spans[k] for k in (answers[-1:] if only_last else answers) if c.counts[k]]
        if marks:
            chosen = [(max(a, x), min(b, y)) for a, b in marks for x, y in chosen if max(a, x) < min(b, y)]
        return whole, chosen, only_last

    def answer(self, c, k, whole):
        """(begin, end) of answer k in the whole text; None if it is not written there as when it was the last."""
        prompt, _ = cut_marks(self.text(c, k, prompt=True))
        until, _ = cut_marks(self.text(c, k + 1))
        if not whole.startswith(until):                        # an EOS token may end the conversation, not the answer
            until = until.removesuffix(self.eos)
        begin = len(prompt)
        if not until.startswith(prompt):                       # a prompt that begins the answer, with <think>
            before, _ = cut_marks(self.text(c, k))
            before = before if until.startswith(before) else before.removesuffix(self.eos)
            begin = len(os.path.commonprefix([prompt, until]))
            if not prompt.startswith(before) or begin <= len(before):
                return None
        return (begin, len(until)) if whole.startswith(until) else None


def cut_marks(text):
    """(text without marks, [(begin, end), ...])"""
    if BEGIN not in text:
        return text, []
    parts, spans, at = text.split(BEGIN), [], 0
    at = len(parts[0])
    for part in parts[1:]:
        size = part.index(END)
        if size:
            spans.append((at, at + size))
        at += len(part) - 1
    return text.replace(BEGIN, "").replace(END, ""), spans


def flags_of(offsets, spans):
    """1 for each token that has characters of a span, else 0. Both are in order. Some tokenizers (trim_offsets) give a
    token of spaces alone an empty place at their end: its characters are those behind the token before."""
    flags, at, before = bytearray(len(offsets)), 0, 0
    for i, (begin, end) in enumerate(offsets):
        begin = min(begin, before) if begin == end else begin
        before = end
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        flags[i] = at < len(spans) and begin < end and spans[at][0] < end
    return flags
