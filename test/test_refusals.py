"""A table of bad inputs: the whole message and the exit code, on one rank and on two.

Each row breaks one thing of a run that works. {d} is the folder of the files, {n} a number of MiB. Rows run several at
a time; none may hang, change a file or start to train. A message with the number of ranks has two forms.
"""
import json
import re
import struct

import init
import numpy as np
import pytest
from util import (FULL, ROOT, gpt2_config, llama_config, model_write, safetensors_read, safetensors_write, shard_write,
                  train_gpt)

V, C, T = 31, 8, 8
SHARD, WEIGHTS, CONFIG = "data/train_000000.bin", "model/model.safetensors", "model/config.json"
TOKENIZER = "model/tokenizer.json"
GPUS = re.findall(r'^    {"(.+?)", ', (ROOT / "kernels" / "gpus.h").read_text(), re.M)


class Row:
    def __init__(self, code, sentence, words, spoil=None):
        self.code, self.sentence, self.words, self.spoil = code, sentence, words, spoil


def usage(sentence, *words):
    return Row(2, sentence, words)


def refuse(sentence, spoil, *words):
    return Row(1, sentence, words, spoil)


# ---- changes to the folder ----------------------------------------------------------------------------------------
def put(name, content):
    def spoil(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return spoil


def patch(name, offset, content):
    def spoil(folder):
        data = bytearray((folder / name).read_bytes())
        data[offset:offset + len(content)] = content
        (folder / name).write_bytes(data)
    return spoil


def cut(name, keep):
    def spoil(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:keep])
    return spoil


def remove(name):
    def spoil(folder):
        (folder / name).unlink()
    return spoil


def add(name, content):
    def spoil(folder):
        with open(folder / name, "ab") as file:
            file.write(content)
    return spoil


def config(**changed):
    def spoil(folder):
        values = {**gpt2_config(V, C, T, L=2, NH=2), **changed}
        (folder / CONFIG).write_text(json.dumps(values))
    return spoil


def llama(**changed):
    def spoil(folder):
        (folder / CONFIG).write_text(json.dumps({**llama_config(V, C, T, NH=4), **changed}))
    return spoil


def tensors(change):
    def spoil(folder):
        values = safetensors_read(folder / WEIGHTS)
        safetensors_write(folder / WEIGHTS, change(values))
    return spoil


def header(text, data=b""):
    return put(WEIGHTS, struct.pack("<Q", len(text)) + text.encode() + data)


def index(weight_map):
    """The weights in one.safetensors, and an index for them."""
    def spoil(folder):
        (folder / WEIGHTS).rename(folder / "model" / "one.safetensors")
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return spoil


def shards(*toks, vocab_size=0):
    return lambda folder: shard_write(folder / SHARD, toks, vocab_size)


def tokenizer(**changed):
    """A byte-level tokenizer of two letters, with something else in it."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], **changed.pop("model", {})}
    values = {"pre_tokenizer": {"type": "ByteLevel"}, "model": model, **changed}
    return put(TOKENIZER, json.dumps({k: v for k, v in values.items() if v is not None}))


def state(**changed):
    """A checkpoint whose state.json has something else in it."""
    def spoil(folder):
        values = {"format": 1, "step": 1, "position_windows": 2, "num_applied": 1, "num_skipped": 0, "seed": 42,
                  "seq_len": T, "global_batch": 2, **changed}
        put("model/state.json", json.dumps({k: v for k, v in values.items() if v is not None}))(folder)
    return spoil


NAME = "transformer.h.1.mlp.c_fc.weight"
ASK, CHOOSE = ("--generate", "ab"), ("--choices", "{d}/choices.jsonl")
PROMPTS = ("--prompts", "{d}/prompts.jsonl")

PRESETS = ("gpt2 gpt2-medium gpt2-large gpt2-xl llama-60m llama-1b llama2-7b llama3-8b qwen2.5-0.5b qwen2.5-1.5b "
           "qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b d2..d48")
ROWS = [
    # the command line
    usage("unknown option '--mikro-batch': did you mean --micro-batch? --help lists all", "--mikro-batch", 4),
    usage("--zero 5 is out of range: 0 to 3", "--zero=5"),
    usage("--zero -1 is out of range: 0 to 3", "-z", -1),
    usage("--micro-batch 0 is out of range: 1 to 1048576", "-b", 0),
    usage("--micro-batch needs a number, not 'four'", "-b", "four"),
    usage("--micro-batch needs a whole number, not '2.5'", "-b", "2.5"),
    usage("--micro-batch needs a number, not ''", "-b", ""),
    usage("--micro-batch needs a value", "-b"),
    usage("--lr -0.1 is out of range: 0 to 1000", "-l", "-0.1"),
    usage("--lr needs a number, not 'nan'", "-l", "nan"),
    usage("--lr inf is out of range: 0 to 1000", "-l", "inf"),
    usage("--seed is given twice", "-s", 1, "--seed", 2),
    usage("--steps 99999999999999999999 is out of range: 0 to 9223372036854775807", "-n", "99999999999999999999"),
    usage("--steps 9223372036854775808.0 is out of range: 0 to 9223372036854775807", "-n", "9223372036854775808.0"),
    usage("--steps needs a whole number, not '9223372036854775807.5'", "-n", "9223372036854775807.5"),
    usage("--seed 1e19 is out of range: 0 to 9223372036854775807", "-s", "1e19"),
    usage("--device-mb 8796093022208 is out of range: 0 to 8796093022207", "--device-mb", 1 << 43),
    usage(f"a batch of {1 << 30} sequences = {1 << 30} per micro-step x 1 micro-steps x 1 ranks: --micro-batch is at "
          f"most {1 << 20}: give others of -b, -g and --batch", "--plan", "-m", "d2", "--ranks", 1, "--batch", 1 << 30),
    usage(f"a batch of {1 << 30} sequences = 1 per micro-step x {1 << 30} micro-steps x 1 ranks: --grad-accum is at "
          f"most {1 << 20}: give others of -b, -g and --batch", "--plan", "-m", "d2", "--ranks", 1, "--batch", 1 << 30,
          "-b", 1),
    usage(f"a batch of {1 << 60} sequences = {1 << 20} per micro-step x {1 << 20} micro-steps x {1 << 20} ranks: "
          f"--batch is at most {1 << 30}: give others of -b, -g and --batch", "--plan", "-m", "d2", "-b", 1 << 20, "-g",
          1 << 20, "--ranks", 1 << 20),
    usage(f"-b {1 << 20} x -t 2048 = {1 << 31} tokens in a micro-step, at most 2147483647: lower -b and raise -g",
          "--plan", "-m", "llama-1b", "-b", 1 << 20, "-t", 2048, "-d", "{d}/data"),
    usage("--batch-ramp 4:2000000000000: the ramp takes at most 1099511627776 steps", "--plan", "-m", "d2",
          "--batch-ramp", "4:2000000000000", "-d", "{d}/data"),
    usage("--no-shuffle takes no value, not '1'", "--no-shuffle=1"),
    usage("unknown option '-q': --help lists the letters", "-q"),
    usage("'extra' is not an option; options start with '-': did you forget the one before it? --help lists them",
          "extra"),
    usage("unknown option '-': --help lists the letters", "-"),
    usage("unknown option '--': it has no name; --help lists all", "--"),
    usage("'' is not an option; options start with '-': did you forget the one before it? --help lists them", ""),
    usage("--pp is not there yet in this version (CHANGELOG.md says what is): leave it out", "--pp", 2),
    usage("--precision fp8: not one of fp32|bf16|fp16", "-p", "fp8"),
    usage("--precision bf61: not one of fp32|bf16|fp16; did you mean bf16?", "-p", "bf61"),
    usage("--reduce mico: not one of micro|step; did you mean micro?", "--reduce", "mico"),
    usage("--recompute needs a value", "--recompute"),
    usage("--top-p 2 is out of range: 0 to 1", "--top-p", 2),
    usage("--beta1 1 is out of range: 0 to 0.999999", "--beta1", 1),
    usage("--seq-len 0 is out of range: 1 to 16777216", "-t", 0),
    usage("--temperature -1 is out of range: 0 to 100", "--temperature", "-1"),
    usage("--timeout 1e99 is out of range: 0 to 1000000000", "--timeout", "1e99"),
    usage("--spike-window 1 is out of range: 2 to 1073741824", "--spike-window", 1),
    usage("--hysteresis is for -p fp16: leave it out", "--hysteresis", 3),
    usage("--gpu goes with --plan; a run takes the GPU that is here", "--gpu", "h100"),
    usage("--ranks goes with --plan; a run takes its ranks from mpirun -np", "--ranks", 4),
    usage("--steps and --epochs both set where the run ends: give one", "-n", 2, "--epochs", 1),
    usage("--plan, --bench, --eval, --choices, --generate, --prompts and --export are different modes: give one",
          "--plan", "--eval"),
    usage("--elastic goes with --resume: it keeps a checkpoint's batch", "--elastic"),
    usage("--save-every needs -o FOLDER to save to", "--save-every", 2),
    usage("--min-lr 0.1 is above the peak --lr 0.0006: lower it", "--min-lr", "0.1"),
    usage("--min-lr -0.5 is out of range: 0 to 1000, or -1", "--min-lr", "-0.5"),
    usage("--attn-dropout -0.2 is out of range: 0 to 0.99, or -1", "--attn-dropout", "-0.2"),
    usage("-t 65537 with dropout of attention probabilities: its masks reach to 65536 tokens: give --attn-dropout 0",
          "--plan", "-m", "qwen2.5-1.5b", "-t", 65537, "--dropout", 0.1, "-d", "{d}/data"),
    usage("--offload activations moves the inputs that -r block or -r K keeps: give one of them",
          "-m", "{d}/model", "-d", "{d}/data", "--offload", "activations", "-r", "none"),
    usage("--offload activations moves the inputs that -r block or -r K keeps: give one of them",
          "-m", "{d}/model", "-d", "{d}/data", "--auto", "--offload", "activations", "-r", "none"),
    usage("--offload gradients moves the slices of stages 2 and 3: give -z 2 or -z 3, without --reduce step",
          "-m", "{d}/model", "-d", "{d}/data", "--offload", "optimizer,gradients", "-z", 1),
    usage("--offload gradients moves the slices of stages 2 and 3: give -z 2 or -z 3, without --reduce step",
          "-m", "{d}/model", "-d", "{d}/data", "--offload", "gradients", "-z", 2, "--reduce", "step"),
    usage("--offload gradients with --optimizer muon: its matrices go from device to device: leave gradients there",
          "-m", "{d}/model", "-d", "{d}/data", "--offload", "gradients", "-z", 2, "--optimizer", "muon"),
    usage("--offload parameters moves the slices of stage 3: give -z 3",
          "-m", "{d}/model", "-d", "{d}/data", "--offload", "parameters", "-z", 2),
    *[usage(f"--offload '{words}': have none, or activations, optimizer, gradients, parameters, comma-separated",
            "-m", "{d}/model", "-d", "{d}/data", "--offload", words) for words in ("optimizer,params", ",")],
    usage("--resume auto looks into the folder of -o: give -o", "--resume", "auto"),
    usage("-r everything: have none, cheap, mlp, attention, block, or a number K: every K-th block's input is kept",
          "-m", "{d}/model", "-d", "{d}/data", "-r", "everything"),
    usage("-r 0: have none, cheap, mlp, attention, block, or a number K: every K-th block's input is kept",
          "-m", "{d}/model", "-d", "{d}/data", "-r", 0),
    usage(("--batch 7 cannot be shared out: 2 micro-batch x 1 ranks = 2 sequences: make it a multiple",
           "--batch 7 cannot be shared out: 2 micro-batch x 2 ranks = 4 sequences: make it a multiple"),
          "-m", "{d}/model", "-d", "{d}/data", "--batch", 7, "-b", 2),
    usage(("--batch 7 is not 2 micro-batch x 3 micro-steps x 1 ranks = 6 sequences: change one of them",
           "--batch 7 is not 2 micro-batch x 3 micro-steps x 2 ranks = 12 sequences: change one of them"),
          "-m", "{d}/model", "-d", "{d}/data", "--batch", 7, "-b", 2, "-g", 3),
    usage(("--batch 7 cannot be shared out: 2 micro-steps x 1 ranks = 2 sequences: make it a multiple",
           "--batch 7 cannot be shared out: 2 micro-steps x 2 ranks = 4 sequences: make it a multiple"),
          "-m", "{d}/model", "-d", "{d}/data", "--batch", 7, "-g", 2),
    usage("--keep-every needs -o FOLDER to save to", "--keep-every", 2),
    usage("--offload-share is of the optimizer's states: give --offload optimizer", "-z", 2, "--offload", "gradients",
          "--offload-share", 0.5),
    usage("--spike-skip with --spike-deviations 0: no step is a spike; leave one of them out", "--spike-skip",
          "--spike-deviations", 0),
    usage("--initial-scale-power 4 starts the loss scale at 16, below --min-loss-scale 1000: raise it, or lower that",
          "-p", "fp16", "--initial-scale-power", 4, "--min-loss-scale", 1000),
    usage("--loss-scale 8 stays as it is, so that --hysteresis means nothing: leave one of them out",
          "-p", "fp16", "--loss-scale", 8, "--hysteresis", 3),
    usage("unknown option '--learning-rat': did you mean --learning-rate? --help lists all", "--learning-rat", 1),
    usage("unknown option '--zero_stag': did you mean --zero-stage? --help lists all", "--zero_stag", 1),
    usage("unknown option '--xyzzy': --help lists all", "--xyzzy", 1),
    usage("--micro-batch needs a value, and --plan is an option: write --micro-batch=--plan if it is meant", "-b",
          "--plan"),
    # other programs' spellings
    usage("--learning-rate 0.001 and --lr 0.002 contradict each other: give one", "--learning_rate", "1e-3", "-l",
          "2e-3"),
    usage("--lr 0.002 and --learning-rate 0.001 contradict each other: give one", "--lr", "2e-3", "--learning-rate",
          "1e-3"),
    usage("--learning-rate is given twice", "--learning-rate", "1e-3", "--learning_rate", "1e-3"),
    usage("--bf16 (--precision bf16) and --fp16 (--precision fp16) contradict each other: give one", "--bf16",
          "--fp16"),
    usage("--precision fp16 and --bf16 (--precision bf16) contradict each other: give one", "-p", "fp16", "--bf16",
          "True"),
    usage("--bf16 takes no value, not '7'", "--bf16=7"),
    usage("--gradient-checkpointing false, but --recompute is block: leave one of them out", "--gradient_checkpointing",
          "False", "-r", "block"),
    usage("--lr-scheduler-type constant (--warmup 0) and --warmup 5 contradict each other: give one",
          "--lr_scheduler_type", "constant", "--warmup", 5),
    usage("--lr-scheduler-type polynomial: not one of linear|cosine|constant|constant_with_warmup",
          "--lr_scheduler_type", "polynomial"),
    usage("--optim needs one of adamw_torch|adamw_torch_fused, not ''", "--optim="),
    usage("--dtype half: not one of float32|bfloat16|float16", "--dtype", "half"),
    usage("--max-steps and --num-train-epochs both set where the run ends: give one", "--max_steps", 3,
          "--num_train_epochs", 2),
    usage("--repeat takes all flags from the run folder but -o: leave --learning-rate out", "--repeat", "{d}",
          "--learning_rate", "1e-3"),
    usage("'\u2013\u2013lr' begins with another dash than '-', as word processors write it: type '-'",
          "\u2013\u2013lr", 1),
    usage("--lr-scheduler-type cosine_with_min_lr is --schedule cosine --min-lr X here", "--lr_scheduler_type",
          "cosine_with_min_lr"),
    usage("--load is --resume FOLDER here, or --resume auto: the newest checkpoint of -o, or a new run where there is "
          "none", "--load", "x"),
    usage("--resume-from-checkpoint True is --resume auto here: the newest checkpoint of -o, or a new run where there "
          "is none", "--resume_from_checkpoint", "True"),
    usage("--model-name-or-path gpt2: weights are read from a folder, write ./gpt2 for one; the preset, with new "
          "weights, is -m gpt2", "--model_name_or_path", "gpt2"),
    usage("--save-steps needs -o FOLDER to save to", "--save_steps", 2),
    usage("--max-steps -1 is out of range: 0 to 9223372036854775807", "--max_steps", -1),
    usage("--pipeline-model-parallel-size is not there yet in this version (CHANGELOG.md says what is): leave it out",
          "--pipeline-model-parallel-size", 2),
    usage("--param-group '*:lr=1,lr=2': lr is there twice", "-m", "{d}/model", "-d", "{d}/data", "--param-group",
          "*:lr=1,lr=2"),
    refuse("{d}/nowhere.json: cannot be opened: No such file or directory", None, "--config", "{d}/nowhere.json"),
    refuse(f"--gpu h1000 is not in the table: have {', '.join(GPUS)}", None, "--plan", "--gpu", "h1000"),
    # token shards
    refuse("{d}/data/train_000000.bin: begins with 0 (byte 0), a token shard begins with 20240520 or 20240801; "
           "make shards with data/prepare.py, or say --raw-tokens if it holds bare uint16 tokens",
           patch(SHARD, 0, b"\0\0\0\0")),
    refuse("{d}/data/train_000000.bin: format version 9 (byte 4) is not known, only 1 is; make the shard again "
           "with data/prepare.py", patch(SHARD, 4, b"\x09")),
    refuse("{d}/data/train_000000.bin: the header (byte 8) says 18446744073709551615 tokens of 2 bytes, the file "
           "has 400 bytes after its header, which is 200.0 tokens; it was cut short or written to twice: make it "
           "again", patch(SHARD, 8, b"\xff\xff\xff\xff\xff\xff\xff\xff")),
    refuse("{d}/data/train_000000.bin: the header (byte 8) says 200 tokens of 2 bytes, the file has 398 bytes "
           "after its header, which is 199.0 tokens; it was cut short or written to twice: make it again",
           cut(SHARD, -2)),
    refuse("{d}/data/train_000000.bin: has 500 bytes, a token shard's header alone has 1024; the file was cut "
           "short, or it is not a token shard", cut(SHARD, 500)),
    refuse("{d}/data/train_000000.bin: has 0 bytes, a token shard's header alone has 1024; the file was cut short, "
           "or it is not a token shard", put(SHARD, b"")),
    refuse("--data: {d}/data/train_000000.bin has 3 tokens, one window of --seq-len 8 needs 9 in one file; give "
           "more data, or a --seq-len of at most 2", shards(1, 2, 3)),
    refuse("{d}/data/train_000000.bin: was made with a vocabulary of 32 ids (byte 16), the model has 31 rows; make "
           "it again with the model's tokenizer, or choose the model to fit", shards(*range(20), vocab_size=V + 1)),
    refuse("{d}/data/train_000000.bin: token 3 (byte 1030) is 31, the model's vocabulary has 31 rows; the shard "
           "was made with another tokenizer: make it again with the model's, or train a model with more rows",
           patch(SHARD, 1024 + 2 * 3, V.to_bytes(2, "little")), "--no-shuffle"),
    refuse("{d}/data: the folder has no train_*.bin; make token shards with: python3 data/prepare.py kjv --out "
           "{d}/data", remove(SHARD)),
    refuse("{d}/nowhere: no file of this name, and none that matches it as a pattern; make token shards with "
           "data/prepare.py or name those that exist", None, "-d", "{d}/nowhere"),
    refuse("{d}/data/train_000000.bin: 1425 bytes is not a whole number of uint16 tokens, as a raw token file must "
           "be; the file was cut short, or it is not one", add(SHARD, b"x"), "--raw-tokens"),
    refuse("--eval needs validation shards: no val_*.bin in {d}/data; give --val", None, "--eval"),
    # config.json
    refuse("{d}/model/config.json: line 1, column 1: the JSON ends too early; the file was cut short",
           put(CONFIG, "")),
    refuse("{d}/model/config.json: line 1, column 2: the JSON ends too early; the file was cut short",
           put(CONFIG, "{")),
    refuse('{d}/model/config.json: must be a JSON object with the key "model_type", is a list', put(CONFIG, "[1, 2]")),
    refuse("{d}/model/config.json: line 1, column 22: a comma after the last item, JSON has none there; take it out",
           put(CONFIG, '{"model_type": "gpt2",}')),
    refuse("{d}/model/config.json: line 2, column 9: a comma after the last item, JSON has none there; take it out",
           put(CONFIG, '{"a":\n [[], [1,\n ]]}')),
    refuse("{d}/model/config.json: line 1, column 23: the JSON ends too early; the file was cut short",
           put(CONFIG, '{"model_type": "gpt2",')),
    refuse('{d}/model/config.json: line 1, column 24: not valid JSON at "x"; mend it there',
           put(CONFIG, '{"model_type": "gpt2"} x')),
    refuse("{d}/model/config.json: holds a zero byte at byte 0, JSON has none; the file is damaged",
           put(CONFIG, b"\0" * 100)),
    refuse('{d}/model/config.json: line 1, column 1001: not valid JSON at "[[[[[[[[[[[[[[[[[[[[[[[["; mend it there',
           put(CONFIG, "[" * 2000)),
    refuse(f"-m {{d}}/model is neither a preset ({PRESETS}) nor a folder with config.json", remove(CONFIG)),
    refuse('{d}/model/config.json: model_type is "gpt_neo", have gpt2, llama, mistral, qwen2, qwen3, arcee',
           config(model_type="gpt_neo")),
    refuse('{d}/model/config.json: "n_embd" must be a whole number, is null', config(n_embd=None)),
    refuse('{d}/model/config.json: "n_embd" must be a whole number, is a string', config(n_embd="8")),
    refuse("{d}/model/config.json: the width 9 is not divisible by 2 heads", config(n_embd=9)),
    refuse('{d}/model/config.json: "n_embd" is -8, must be 1 to 1048576', config(n_embd=-8)),
    refuse('{d}/model/config.json: "n_layer" is 0, must be 1 to 4096', config(n_layer=0)),
    refuse('{d}/model/config.json: "n_layer" is 1.5, must be a whole number of at most 2^53', config(n_layer=1.5)),
    refuse("{d}/model/config.json: the width 8 is not divisible by 3 heads", config(n_head=3)),
    refuse('{d}/model/config.json: "vocab_size" is 1000000000000, must be 1 to 16777216', config(vocab_size=1e12)),
    refuse("{d}/model/model.safetensors: tensor transformer.wte.weight has shape 31x8, config.json needs 32x8",
           config(vocab_size=V + 1)),
    refuse('{d}/model/config.json: "layer_norm_epsilon" is 2, must be 0 to 1', config(layer_norm_epsilon=2)),
    refuse('{d}/model/config.json: activation_function is "swish", have gelu_new, gelu_pytorch_tanh, gelu, silu, '
           "relu2", config(activation_function="swish")),
    refuse("{d}/model/config.json: scale_attn_by_inverse_layer_idx true is not there yet",
           config(scale_attn_by_inverse_layer_idx=True)),
    refuse("{d}/model/config.json: 4 query heads cannot be shared out among 3 key/value heads",
           llama(num_key_value_heads=3)),
    refuse('{d}/model/config.json: hidden_act is "gelu", have silu', llama(hidden_act="gelu")),
    refuse("{d}/model/config.json: layer_types has 1 items, num_hidden_layers is 2",
           llama(model_type="qwen2", num_hidden_layers=2, layer_types=["full_attention"])),
    refuse('{d}/model/config.json: rope_scaling is of type "yarn", have default, linear and llama3',
           llama(rope_scaling={"rope_type": "yarn", "factor": 2.0})),
    refuse('{d}/model/config.json: has no key "factor"', llama(rope_scaling={"rope_type": "linear"})),
    refuse("{d}/model/config.json: head size 3 is odd: rotary embedding rotates pairs", llama(head_dim=3)),
    refuse("-t 16 is longer than the model's context of 8 positions: lower it", None, "-t", 16),
    refuse(f"-m {{d}}/nowhere is neither a preset ({PRESETS}) nor a folder with config.json", None, "-m",
           "{d}/nowhere"),
    # weights
    refuse("{d}/model: has no tensor transformer.h.1.mlp.c_fc.weight, which config.json needs",
           tensors(lambda t: {k: v for k, v in t.items() if k != NAME})),
    refuse("{d}/model/model.safetensors: tensor transformer.h.1.mlp.c_fc.weight has shape 32x8, "
           "config.json needs 8x32",
           tensors(lambda t: {**t, NAME: t[NAME].T.copy()})),
    refuse('{d}/model/model.safetensors: tensor "transformer.h.1.mlp.c_fc.weight" is I64; weights are '
           'read as F32, F16 or BF16: '
           "convert the file", tensors(lambda t: {**t, NAME: t[NAME].astype(np.int64)})),
    refuse("{d}/model: holds tensor transformer.h.2.ln_1.weight, which the model of config.json does not have",
           tensors(lambda t: {**t, "transformer.h.2.ln_1.weight": np.ones(C, np.float32)})),
    refuse('{d}/model/model.safetensors: tensor "transformer.ln_f.bias": is at bytes 8256 to 8288 of the data, '
           "the file has 8284; it was cut short: copy it again", cut(WEIGHTS, -4)),
    refuse("{d}/model/model.safetensors: its tensors end at byte 8288 of the data, the file has 8292; bytes were "
           "added to it", add(WEIGHTS, b"1234")),
    refuse("{d}/model/model.safetensors: has 4 bytes, a safetensors file begins with 8 for the length of its "
           "header; it was cut short, or is not one", cut(WEIGHTS, 4)),
    refuse("{d}/model/model.safetensors: says at byte 0 that its header has 1152921504606846976 bytes, at most "
           "100000000 are allowed; it is not a safetensors file, or damaged",
           patch(WEIGHTS, 0, struct.pack("<Q", 2**60))),
    refuse('{d}/model/model.safetensors: line 1, column 1: not valid JSON at "x"__metadata__": {"forma"; mend it '
           "there", patch(WEIGHTS, 8, b"x")),
    refuse('{d}/model/model.safetensors: tensors "a" and "b" overlap at byte 2 of the data; the header is damaged',
           header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                      '"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}', b"123456")),
    refuse('{d}/model/model.safetensors: tensor "a": dtype "F99" is not known',
           header('{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234")),
    refuse("{d}/model: has no weights; weights are a .safetensors file, its .index.json, or a folder with "
           "model.safetensors or model.safetensors.index.json", remove(WEIGHTS)),
    refuse("{d}/model/gone.safetensors: cannot be opened: No such file or directory",
           index({"a": "gone.safetensors"})),
    refuse('{d}/model/model.safetensors.index.json: "weight_map" must give a file name in the same folder for "a"',
           index({"a": "../model.safetensors"})),
    refuse('{d}/model/model.safetensors.index.json: says that one.safetensors has the tensor "no.such.tensor", it '
           "does not; the files belong to different models", index({"no.such.tensor": "one.safetensors"})),
    # checkpoints and the run folder
    refuse("{d}/model/state.json: format 3, have 1 and 2: written by a later version of train_gpt",
           state(format=3), "-m", "", "--resume", "{d}/model"),
    refuse('{d}/model/state.json: has no key "step"', state(step=None), "-m", "", "--resume", "{d}/model"),
    refuse("{d}/model/state.json: line 1, column 2: the JSON ends too early; the file was cut short; --resume from the "
           "one before", put("model/state.json", "{"), "-m", "", "--resume", "{d}/model"),
    refuse("{d}/model/optimizer.safetensors: cannot be found; weights are a .safetensors file, its .index.json, or "
           "a folder with model.safetensors or model.safetensors.index.json",
           state(), "-m", "", "--resume", "{d}/model"),
    refuse("--resume {d}/nowhere: no complete checkpoint there (a folder with state.json, or step_* folders of "
           "that kind)", None, "--resume", "{d}/nowhere"),
    refuse("{d}/run/log.jsonl exists: -o names a run that was; take another folder, or --resume {d}/run to go on "
           "with it", put("run/log.jsonl", '{"run": {}}\n'), "-o", "{d}/run"),
    refuse("{d}/file/run: cannot be made: Not a directory", put("file", ""), "-o", "{d}/file/run"),
    # tokenizers, prompts, choices
    refuse("--generate needs a tokenizer.json: none in {d}/model or {d}/data; give --tokenizer FILE", None, *ASK),
    refuse('{d}/model/tokenizer.json: has no key "model"', put(TOKENIZER, "{}"), *ASK),
    refuse('{d}/model/tokenizer.json: its model is "Unigram" of SentencePiece; only BPE is supported: use another '
           "tokenizer, or train one with data/prepare.py",
           tokenizer(model={"type": "Unigram"}), *ASK),
    refuse('{d}/model/tokenizer.json: the pre_tokenizer "Whitespace" is not supported; have ByteLevel, Digits, '
           "Metaspace, Punctuation and Split: use another tokenizer, or train one with data/prepare.py",
           tokenizer(pre_tokenizer={"type": "Whitespace"}), *ASK),
    refuse('{d}/model/tokenizer.json: the pattern of its pre_tokenizer has "\\w", which is not supported: "\\w+"',
           tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Isolated"}), *ASK),
    refuse('{d}/model/tokenizer.json: the pattern of its pre_tokenizer has "[", which is not supported inside of '
           '[...]: "[a[bc]]"',
           tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "[a[bc]]"}, "behavior": "Isolated"}), *ASK),
    refuse('{d}/model/tokenizer.json: the behavior "Other" of a pre_tokenizer is not known',
           tokenizer(pre_tokenizer={"type": "Split", "pattern": {"String": "a"}, "behavior": "Other"}), *ASK),
    refuse('{d}/model/tokenizer.json: has the normalizer "Lowercase", which is not supported; have NFC, NFD, NFKC, '
           "NFKD, Prepend and Replace: use another tokenizer, or train one with data/prepare.py",
           tokenizer(normalizer={"type": "Lowercase"}), *ASK),
    refuse('{d}/model/tokenizer.json: has a normalizer "Replace" of a Regex or of an empty String, or by nothing; only '
           "that of a String by another is supported",
           tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}), *ASK),
    refuse('{d}/model/tokenizer.json: the post_processor "Other" is not supported',
           tokenizer(post_processor={"type": "Other"}), *ASK),
    refuse("{d}/model/tokenizer.json: its vocabulary is empty", tokenizer(model={"vocab": {}}), *ASK),
    refuse("{d}/model/tokenizer.json: merge 0 is not a pair of tokens", tokenizer(model={"merges": ["a"]}), *ASK),
    refuse('{d}/model/tokenizer.json: merge 0 joins "a" and "c", and not all of them and "ac" are in the vocabulary',
           tokenizer(model={"merges": ["a c"]}), *ASK),
    refuse('{d}/model/tokenizer.json: id 2 is both "ab" and "<s>"',
           tokenizer(added_tokens=[{"id": 2, "content": "<s>"}]), *ASK),
    refuse('{d}/model/tokenizer.json: has no token for "Ġ" of "Ġabc"; train a tokenizer whose alphabet '
           "has all 256 bytes", tokenizer(), "--generate", "abc"),
    refuse("--tokenizer {d}/nowhere: no such file", None, "--tokenizer", "{d}/nowhere", *ASK),
    refuse("{d}/prompts.jsonl, prompt 0: line 1, column 16: the JSON ends too early; the file was cut short",
           put("prompts.jsonl", '{"prompt": "ab"'), *PROMPTS),
    refuse('{d}/prompts.jsonl, prompt 0: has no key "prompt"', put("prompts.jsonl", '{"text": "ab"}\n'), *PROMPTS),
    refuse('{d}/prompts.jsonl, prompt 0: "ids" is 31, must be 0 to 30',
           put("prompts.jsonl", f'{{"ids": [1, {V}]}}\n'), *PROMPTS),
    refuse("{d}/prompts.jsonl, prompt 0: needs at least one token to continue",
           put("prompts.jsonl", '{"ids": []}\n'), *PROMPTS),
    refuse("{d}/prompts.jsonl: cannot be opened: No such file or directory", None, *PROMPTS),
    refuse("--stop: '97' is neither a token's id below 31 nor its spelling", tokenizer(), *ASK, "--stop", "97"),
    refuse("--choices needs a tokenizer.json: none in {d}/model or {d}/data; give --tokenizer FILE",
           put("choices.jsonl", '{"ctx": "a", "endings": ["b", "a"], "label": 2}\n'), *CHOOSE),
    refuse("--choices needs a tokenizer.json: none in {d}/model or {d}/data; give --tokenizer FILE",
           put("choices.jsonl", '{"ctx": "a", "endings": ["b"], "label": 0}\n'), *CHOOSE),
    # memory
    refuse("device memory: need {n} MiB (list above), have 1.0 MiB free of 1.0 MiB: lower -b or -t, raise -z or "
           "the number of ranks, or take a smaller model", None, "-b", 65536, "--device-mb", 1),
]


def words_of(row, folder):
    base = {} if row.code == 2 else {"-m": "{d}/model", "-d": "{d}/data", "-n": 2, "-b": 2, "--sample-tokens": 0}
    if any(word in row.words for word in ("--plan", "--eval")):
        base.pop("-n", None)
    given = [str(word) for word in row.words]
    kept = [str(word) for flag, value in base.items() if flag not in given for word in (flag, value)]
    if "" in given and "-m" in given:                                   # no model: that of the checkpoint
        at = given.index("-m")
        del given[at:at + 2]
    return [word.replace("{d}", str(folder)) for word in kept + given]


def said(row, folder, ranks):
    """Exit code and sentence of one row, in a folder of its own."""
    model = gpt2_config(V, C, T, L=2, NH=2)
    model_write(folder / "model", model, init.gpt2_weights(model, 1))
    shard_write(folder / SHARD, np.arange(200) % V, V)
    if row.spoil is not None:
        row.spoil(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    run = train_gpt(*words_of(row, folder), ranks=ranks, ok=False, timeout=90, OMP_NUM_THREADS="1")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert before == after, "a file was changed"
    assert "step 1/" not in run.out
    lines = {re.sub(r"^train_gpt: (rank \d+: )?", "", line) for line in run.complaint}
    assert len(lines) == 1, run.err
    return run.code, re.sub(r"need [\d.]+ MiB", "need {n} MiB", lines.pop().replace(str(folder), "{d}"))


def name_of(row):
    """The name of a row for `pytest -k`: the beginning of its message."""
    sentence = row.sentence if isinstance(row.sentence, str) else row.sentence[0]
    return "-".join(re.findall(r"[\w.]+", sentence.replace("{d}", "")))[:50]


# Usage errors are found before MPI starts: on two ranks only every fourth of those rows.
CASES = [(ranks, row) for ranks in (1, 2) for i, row in enumerate(ROWS)
         if FULL or ranks == 1 or row.code == 1 or i % 4 == 0]


def case_of(ranks, row):
    quick = ranks == 1 and row.code == 2 and "-p" not in row.words
    return pytest.param(ranks, row, id=f"{name_of(row)}-{ranks}", marks=[pytest.mark.quick] if quick else [])


@pytest.mark.parametrize("ranks, row", [case_of(*case) for case in CASES])
def test_refusals(tmp_path, ranks, row):
    expected = row.sentence if isinstance(row.sentence, str) else row.sentence[ranks - 1]
    assert said(row, tmp_path, ranks) == (row.code, expected), row.words


def test_the_table():
    assert len(ROWS) >= 80
