"""--config: DeepSpeed's JSON becomes flags; --print-config shows how each key is used."""
import itertools
import json
import math
import re

import init
import pytest
from util import ROOT, gpt2_config, model_write, shard_write, train_gpt

V, C, T = 61, 16, 16

ZERO2_FP16 = """{
    // ZeRO-2 in fp16 with dynamic loss scaling, as in DeepSpeed's tutorials
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 10}},
    "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
             "min_loss_scale": 2},
    "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
                          "reduce_scatter": true, "reduce_bucket_size": 200000000, "contiguous_gradients": true},
    "gradient_clipping": 0.5, /* a block
    comment */ "steps_per_print": 5, "wall_clock_breakdown": false
}"""

BF16_ZERO2_OFFLOAD = """{
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": true},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                          "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": "auto"}
}"""

ZERO3_OFFLOAD = """{
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true}, "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_min_lr": "auto",
                  "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "train_micro_batch_size_per_gpu": 1
}"""

# ---- other programs' spellings: data/flag_aliases.h ------------------------------------------------------------
def alias_rows():
    """([(spelling, [(flag, value or None), ...])], [(spelling, sentence)]) of the header."""
    text = (ROOT / "data" / "flag_aliases.h").read_text()
    not_yet = re.search(r'#define FLAG_NOT_YET "(.*)"', text)[1]
    aliases = {}
    for spelling, field, value in re.findall(r'^    (?:ALIAS|DEFAULT)\("(\S+)", +(\w+), +(\S+)\) \\$', text, re.M):
        flag = "--" + field.rstrip("_").replace("_", "-")
        aliases.setdefault(spelling, []).append((flag, None if value == "nullptr" else value.strip('"')))
    refused = re.findall(r'^    REFUSED\("(\S+)", +(?:"(.*)"|FLAG_NOT_YET)\)(?: \\)?$', text, re.M)
    num_rows = len(re.findall(r' (?:ALIAS|DEFAULT)\("', text))
    assert sum(map(len, aliases.values())) == num_rows and len(refused) == text.count(" REFUSED(\"")
    return list(aliases.items()), [(spelling, why or not_yet) for spelling, why in refused]


ALIASES, REFUSED = alias_rows()


def settings(*words):
    out = train_gpt(*words, "--print-config", ok=None).out       # printed, though flags may be missing for a run
    return {name: (value, source) for name, value, source in re.findall(r"^  (--\S+) +(?:(\S+) +)?(\S.*)$", out, re.M)}


@pytest.mark.parametrize("spelling,sets", ALIASES, ids=lambda x: x if isinstance(x, str) else "")
def test_alias(folder, spelling, sets):
    """An alias sets its flags, and messages use its spelling; with _ for - too."""
    (folder / "empty.json").write_text("{}")
    name, _, word = spelling.partition("=")
    typed = ["--" + name[2:].replace("-", "_") if name[1] == "-" else name]
    reals = ("--lr", "--beta1", "--beta2", "--eps", "--clip", "--weight-decay", "--attn-dropout")
    value = word or {"--model": "a/b", "--data": "a", "--val": "a", "--out": "a", "--resume": "a",
                     "--config": folder / "empty.json", **dict.fromkeys(reals, 0.5)}.get(sets[0][0], 7)
    value = {"--zero-stage": 3}.get(spelling, value)
    takes_value = word or sets[0][1] is None
    found = settings(*typed, *([value] if takes_value else []))
    for flag, wanted in sets:
        assert found[flag] == (str(wanted or value), f"command line, as {name}")
    if not takes_value:
        assert settings(*typed, "True") == found
        assert settings(*typed, "False") == settings()
        assert settings(typed[0] + "=true") == found


@pytest.mark.parametrize("spelling,why", REFUSED, ids=lambda x: x if x[0] == "-" else "")
def test_refused_spelling(spelling, why):
    run = train_gpt(*filter(None, spelling.split("=")), ok=False)
    assert run.code == 2 and run.complaint == [f"train_gpt: {spelling.replace('=', ' ').strip()} {why}"]


def test_spellings_are_documented():
    """docs/coming-from.md: the tables of the header, and defaults that are the program's."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    said = dict(re.findall(r"^\| `(-\S*(?: \w+)?)` \| (.*?) \| \S+ \|$", page, re.M))
    wanted = {spelling.replace("=", " "): "`" + " ".join(" ".join(filter(None, pair)) for pair in sets) + "`"
              for spelling, sets in ALIASES}
    assert {spelling: text for spelling, text in said.items() if spelling in wanted} == wanted
    known = dict(re.findall(r"^\| `(-\S*(?: \w+)?)` \| ([^|`]*?) \|$", page, re.M))
    assert known == {spelling.replace("=", " ").strip(): why for spelling, why in REFUSED}
    found, defaults = settings(), re.findall(r"^\| `(--\S+)` \| ([^ |,]+)[^|]*\|[^|]*\|[^|]*\|$", page, re.M)
    assert len(defaults) > 10
    for flag, value in defaults:
        assert found[flag] == (value, "default"), flag


def test_what_yields(folder):
    """An alias's DEFAULT rows: another word on the flag counts instead, before or after, and so does the file."""
    pairs = ("--lr-decay-style", "cosine"), ("--min-lr", "6e-6"), ("--lr_warmup_iters", 9)
    for words in itertools.permutations(pairs):
        found = settings(*itertools.chain(*words))
        assert found["--min-lr"] == ("6e-06", "command line") and found["--schedule"][0] == "cosine"
        assert found["--warmup"] == ("9", "command line, as --lr-warmup-iters")
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 30, "warmup_type": "linear"}}
    (folder / "scheduler.json").write_text(json.dumps({"scheduler": scheduler}))
    found = settings("--deepspeed", folder / "scheduler.json", "--lr-scheduler-type", "constant_with_warmup")
    assert found["--warmup"] == ("30", "scheduler.params.warmup_num_steps")


def test_deepspeeds_switch(folder):
    """DeepSpeed's own programs say --deepspeed --deepspeed_config FILE."""
    run = train_gpt("--deepspeed", "--deepspeed_config=x.json", ok=False)
    assert run.code == 2 and run.complaint == ["train_gpt: --deepspeed " + dict(REFUSED)["--deepspeed="]]


def test_file_and_spellings(folder):
    """As Hugging Face's users start it: the file leaves open what the command line says, which overrides the rest."""
    (folder / "auto.json").write_text(BF16_ZERO2_OFFLOAD)
    found = settings("--deepspeed", folder / "auto.json", "--per_device_train_batch_size", 2, "--bf16", "True",
                     "--gradient_checkpointing", "False", "--learning_rate", "5e-5", "--zero_stage", 3)
    for flag, value in {"--micro-batch": "2", "--precision": "bf16", "--recompute": "none", "--lr": "5e-05",
                        "--zero": "3", "--offload": "optimizer"}.items():
        assert found[flag][0] == value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    config = gpt2_config(V, C, T, L=2, NH=2)
    model_write(folder / "model", config, init.gpt2_weights(config, 1))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(2000, V, 1), V)
    return folder


def read(folder, config, *more, ok=True, **kw):
    """The run, and what --print-config says: {flag: (value, where from)}, {key: what became of it}."""
    (folder / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    run = train_gpt("--config", folder / "ds.json", "--print-config", *more, ok=ok, **kw)
    flags = {name: (value, source) for name, value, source in
             re.findall(r"^  --(\S+) +(?:(\S+) +)?(\S.*)$", run.out, re.M)}
    keys = dict(re.findall(r"^  ([a-z]\w+(?:\.\w+)*) {2,}(\S.*)$", run.out, re.M))
    return run, flags, keys


def test_zero2_fp16(folder):
    _, flags, keys = read(folder, ZERO2_FP16, "--eps", "1e-7", "--out", "x")
    want = {"batch": 16, "micro-batch": 4, "grad-accum": 2, "lr": 3e-5, "beta1": 0.9, "beta2": 0.98,
            "weight-decay": 0.01, "warmup": 10, "precision": "fp16", "loss-scale": 0, "initial-scale-power": 12,
            "loss-scale-window": 500, "hysteresis": 3, "min-loss-scale": 2, "zero": 2, "gather-bucket": 2e8,
            "overlap": 1, "reduce-bucket": 2e8, "clip": 0.5, "log-every": 5, "optimizer": "adamw",
            "schedule": "constant", "warmup-type": "log", "schedule-as": "deepspeed"}
    for name, value in want.items():
        got, source = flags[name]
        assert (got if isinstance(value, str) else float(got)) == value, name
        assert source not in ("default", "command line"), name
    assert flags["eps"] == ("1e-07", "command line") and flags["seed"] == ("42", "default")
    assert "overridden by --eps 1e-07 on the command line" in keys["optimizer.params.eps"]
    assert "the log has the time of each phase" in keys["wall_clock_breakdown"]
    assert flags["lr"][1] == "scheduler.params.warmup_max_lr"      # the scheduler's, as in DeepSpeed


def test_zero2_fp16_runs(folder):
    """The file of a user trains as it is: its global batch on two ranks, its loss scale, the first step at the lowest
    learning rate. In a binary without fp16 its fp16 block is switched off."""
    config, fp16 = ZERO2_FP16, "fp16" in re.search(r"^precisions .*$", train_gpt("--report").out, re.M)[0]
    if not fp16:
        config = config.replace('"fp16": {"enabled": true', '"fp16": {"enabled": false')
    (folder / "run.json").write_text(config)
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "--config", folder / "run.json", "-n", 3,
                    "--log-every", 1, "--sample-tokens", 0, ranks=2)
    assert "batch   16 sequences = 4 per micro-step x 2 micro-steps x 2 ranks" in run.out
    assert "ZeRO    stage 2" in run.out and f"config  {folder}/run.json" in run.out
    assert ("scale 4096" in run.out) == fp16
    lrs = [float(lr) for lr in re.findall(r"norm \S+ \| lr (\S+)", run.out)]
    assert lrs == pytest.approx([3e-5 * math.log(max(1, s)) / math.log(10) for s in range(3)], rel=2e-3)


def test_scale_power_of_older_files(folder):
    """2^32 was DeepSpeed's default, and 2^127 is the largest that a float holds."""
    for power in (32, 127):
        (folder / "scale.json").write_text(json.dumps({"train_batch_size": 1, "fp16": {"enabled": True,
                                                       "initial_scale_power": power}}))
        run = train_gpt("--print-config", "--config", folder / "scale.json", ok=None)
        assert run.code == 0, run.err
        assert re.search(rf"--initial-scale-power\s+{power}\b", run.out), run.out


def test_bf16_zero2_offload(folder):
    run, flags, keys = read(folder, BF16_ZERO2_OFFLOAD.replace('"cpu"', '"nvme"'), ok=False)
    assert run.code == 2 and "zero_optimization.offload_optimizer.device: nvme: have cpu, or none" in run.complaint[0]
    assert keys["zero_optimization.offload_optimizer.device"].startswith("refused")
    assert read(folder, BF16_ZERO2_OFFLOAD.replace('"cpu"', '"none"'))[1]["offload"] == ("none", "default")
    _, flags, keys = read(folder, BF16_ZERO2_OFFLOAD)
    assert flags["offload"] == ("optimizer", "zero_optimization.offload_optimizer.device")
    assert flags["precision"][0] == "bf16" and flags["zero"][0] == "2" and flags["overlap"][0] == "1"
    assert flags["batch"] == ("0", "default") and keys["train_batch_size"].startswith("auto")


def test_optimizer_of_the_command_line(folder):
    """DeepSpeed's default momentum is that of its own optimizer."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    assert read(folder, sgd)[1]["momentum"] == ("0", "DeepSpeed's default")
    assert read(folder, sgd, "--optimizer", "adamw")[1]["momentum"] == ("-1", "default")


def test_zero3_offload(folder):
    run, _, _ = read(folder, ZERO3_OFFLOAD.replace('"cpu"', '"nvme"'), ok=False)
    assert "offload_optimizer.device" in run.complaint[0] and "offload_param.device" in run.complaint[0]
    assert "2 of its keys" in run.complaint[0]
    _, flags, keys = read(folder, ZERO3_OFFLOAD, "-p", "fp16")
    assert flags["offload"][0] == "optimizer,parameters"
    assert flags["zero"][0] == "3" and flags["persist-below"][0] == "100000" and flags["steps"][0] == "100"
    assert flags["schedule"][0] == "linear" and flags["warmup"] == ("-1", "default")      # "auto"
    assert flags["hysteresis"] == ("2", "fp16.hysteresis")         # the block counts for -p fp16 of the command line
    assert flags["beta2"] == ("0.95", "default") and flags["weight-decay"] == ("0.1", "default")


@pytest.mark.parametrize("change,word", [
    ({"zero_optimization": {"stage": 5}}, "out of range"),
    ({"zero_optimization": {"stagee": 2}}, "did you mean zero_optimization.stage?"),
    ({"zero_optimization": {"xyz": 2}}, "that is known here: leave it out"),
    ({"zero_optimization": 2}, "must be an object"),
    ({"bf16": {"enabled": "yes"}}, "true or false"),
    ({"gradient_clipping": "much"}, "needs a number"),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "low"}}}, "must be a number"),
    ({"optimizer": {"type": "OneBitAdam"}}, "have Adam AdamW"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "a list of two"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
    ({"scheduler": {"type": "Cosine"}}, "have WarmupLR"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "only false is"),
    ({"sparse_attention": {"mode": "fixed"}}, "attention is dense"),
    ({"elasticity": {"enabled": True}}, "--elastic"),
    ({"zero_optimization": {"cpu_offload": 2}}, "have true, or false"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": "yes"}}, "true or false"),
    ({"communication_data_type": "int8"}, "not one of grad|fp32|bf16|fp16"),
    ({"data_efficiency": {"enabled": True}}, "random-LTD"),
    ({"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "schedule_type": "fixed_root"}},
     "schedule_type fixed_linear"),
    ({"compression_training": {"weight_quantization": {}}}, "quantised"),
])
def test_refused_by_name(folder, change, word):
    run, _, _ = read(folder, change, ok=False)
    assert run.code == 2 and len(run.complaint) == 1
    assert list(change)[0] in run.complaint[0] and word in run.complaint[0]


@pytest.mark.parametrize("text,word", [("{", "cut short"), ('{"fp16": {}, "fp16": {}}', "twice"),
                                       ("[]", "must be a JSON object"),
                                       ('{\n  "bf16": {},,\n}', "line 2, column 13: a comma")])
def test_a_file_that_is_no_config(folder, text, word):
    run, _, _ = read(folder, text, ok=False)
    assert run.code in (1, 2) and word in run.complaint[0]
    run = train_gpt("--config", folder / "none.json", ok=False)
    assert run.code == 1 and "none.json" in run.complaint[0]


@pytest.mark.parametrize("optimizer,want", [
    ({"type": "Adam"}, {"optimizer": "adamw", "lr": 1e-3, "beta2": 0.999, "weight-decay": 0}),
    ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
     {"optimizer": "adam", "weight-decay": 0.1}),
    ({"type": "sgd", "params": {"lr": 0.1, "nesterov": True}}, {"optimizer": "sgd", "momentum": 0, "nesterov": "true"}),
    ({"type": "Lamb", "params": {"max_coeff": 10}}, {"optimizer": "lamb", "eps": 1e-8}),
    ({"type": "Lion"}, {"optimizer": "lion", "beta2": 0.99}),
    ({"type": "Adagrad"}, {"optimizer": "adagrad", "lr": 1e-2, "eps": 1e-10}),
    ({"type": "Muon", "params": {"lr": 0.03, "adam_lr": 1e-4, "momentum": 0.9}},
     {"optimizer": "muon", "muon-lr": 0.03, "lr": 1e-4, "momentum": 0.9, "beta2": 0.95}),
    ({"type": "Muon", "params": {"muon_lr": 0.05}}, {"muon-lr": 0.05, "lr": 3e-4}),
])
def test_optimizers(folder, optimizer, want):
    """DeepSpeed's names and defaults."""
    _, flags, _ = read(folder, {"optimizer": optimizer})
    for name, value in want.items():
        assert (flags[name][0] if isinstance(value, str) else float(flags[name][0])) == value, name
    assert flags["schedule"][0] == "constant" and flags["warmup"][0] == "0"      # the file has no scheduler


@pytest.mark.parametrize("scheduler,want", [
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 0.1}},
     {"schedule": "constant", "warmup-type": "log", "warmup": 7, "lr": 0.1, "warmup-min-lr": 0}),
    ({"type": "WarmupLR", "params": {"warmup_type": "linear"}},
     {"schedule": "constant", "warmup-type": "linear", "warmup": 1000}),
    ({"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
     {"schedule": "linear", "warmup-type": "log", "steps": 50, "warmup": 5, "lr": 1e-3, "min-lr": 0}),
    ({"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "cos_min_ratio": 0.1}},
     {"schedule": "cosine", "warmup-type": "log", "steps": 50, "min-lr": 6e-5}),
    ({"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 9,
                                     "cycle_second_step_size": 9, "cycle_momentum": False, "decay_lr_rate": 0}},
     {"schedule": "onecycle", "min-lr": 0.01, "lr": 0.1, "warmup": 9}),
    ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 10,
                                        "lr_range_test_step_rate": 2}},
     {"schedule": "lr-range-test", "min-lr": 0.001, "lr": 0.003, "warmup": 10}),
])
def test_schedulers(folder, scheduler, want):
    """DeepSpeed's names, its defaults, and its parameters as ours."""
    _, flags, _ = read(folder, {"scheduler": scheduler})
    assert flags["schedule-as"] == ("deepspeed", "DeepSpeed's default")
    for name, value in want.items():
        got = flags[name][0]
        assert got == value if isinstance(value, str) else float(got) == pytest.approx(value), name


def test_curriculum(folder):
    """A linear curriculum over the sequence length is --seq-ramp."""
    config = {"curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 16, "max_difficulty": 64,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8}}}
    _, flags, _ = read(folder, config)
    assert flags["seq-ramp"][0] == "16:100" and flags["seq-len"][0] == "64"


BF16 = {"enabled": True}


@pytest.mark.parametrize("config,want", [
    ({"bf16": {**BF16, "bf16_master_weights_and_grads": True}}, {"master": "none", "grad-dtype": "bf16"}),
    ({"bf16": {**BF16, "bf16_master_weights_and_grads": True}, "data_types": {"grad_accum_dtype": "fp32"}},
     {"master": "none", "grad-dtype": "fp32"}),
    ({"bf16": {**BF16, "bf16_optimizer_states": True}}, {"master": "fp32", "state-dtype": "bf16"}),
    ({"bf16": {"enabled": False, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
     {"master": "fp32", "state-dtype": "fp32", "grad-dtype": "fp32"}),
    ({"bf16": BF16, "data_types": {"grad_accum_dtype": "bf16"}}, {"grad-dtype": "bf16", "comm-dtype": "grad"}),
    ({"bf16": BF16, "communication_data_type": "bf16"}, {"grad-dtype": "fp32", "comm-dtype": "bf16"}),
    ({"fp16": {"enabled": True}, "communication_data_type": "fp32"}, {"comm-dtype": "fp32"}),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"offload": "activations"}),
    ({"activation_checkpointing": {"cpu_checkpointing": True}, "zero_optimization": {
        "stage": 3, "cpu_offload": True, "offload_param": {"device": "cpu"}}},
     {"offload": "activations,optimizer,parameters"}),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
     {"offload": "optimizer", "offload-share": "0.3"}),
])
def test_storage(folder, config, want):
    """Data types of states, gradients and communication, and offload."""
    _, flags, _ = read(folder, config)
    assert {name: flags[name][0] for name in want} == want
