"""--config against DeepSpeed itself: its keys, its learning rates step by step, its losses, and files as people have
them. dev/golden_deepspeed*.py made test/golden/deepspeed*.json with DeepSpeed's own code."""
import json
import math
import re

import init
import pytest
from deepspeed_configs import CONFIGS
from util import ROOT, model_write, shard_write, train_gpt

GOLDEN = json.loads((ROOT / "test" / "golden" / "deepspeed.json").read_text())
HYPER, MODEL = GOLDEN["hyper"], GOLDEN["model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    model_write(folder / "model", {"architectures": ["GPT2LMHeadModel"], **MODEL},
                init.gpt2_weights(MODEL, HYPER["seed"]))
    num_tokens = HYPER["steps"] * HYPER["B"] * HYPER["T"] + 1
    shard_write(folder / "data" / "train_000000.bin", init.tokens(num_tokens, MODEL["vocab_size"], HYPER["data_seed"]),
                MODEL["vocab_size"])
    return folder


def case_name(case):
    scheduler = case["config"]["scheduler"]
    return "-".join([scheduler["type"], *(f"{k}={v}" for k, v in list(scheduler["params"].items())[-2:])])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_name)
def test_losses_of_deepspeed(folder, tmp_path, case):
    """20 steps under --config: rates to the 9 digits of the log, losses to 1e-5."""
    (tmp_path / "ds.json").write_text(json.dumps(case["config"]))
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "--config", tmp_path / "ds.json", "--no-shuffle",
                    "-n", HYPER["steps"], "-t", HYPER["T"], "--sample-tokens", 0, out=tmp_path / "run")
    assert run.series("lr") == pytest.approx(case["lrs"], rel=5e-9, abs=0)
    assert run.series("loss") == pytest.approx(case["losses"], rel=0, abs=1e-5)


# ---- every key ---------------------------------------------------------------------------------------------------
KEYS = json.loads((ROOT / "test" / "golden" / "deepspeed_keys.json").read_text())["keys"]
ROWS = re.findall(r'^    ([A-Z_]+)\("([^"]+)"(?:, *"([^"]*)")?', (ROOT / "data" / "ds_keys.h").read_text(), re.M)
ALIASES = {key: other for kind, key, other in ROWS if kind == "ALIAS"}
# Read where DeepSpeedConfig is not looking: with several ranks, by the pipeline's engine, within quantize_training.
READ_ELSEWHERE = {"sequence_parallel_size", "pipeline.use_reentrant", "eigenvalue", "quantize_training"}


def test_every_key_has_a_row():
    """Of what DeepSpeed's configuration classes read; and there is no row for anything else."""
    rows = [key for _, key, _ in ROWS]
    assert len(rows) == len(set(rows)) and len(KEYS) > 400
    blocks = [key for key in KEYS if any(other.startswith(key + ".") for other in KEYS)]
    missing = [key for key in KEYS if key not in blocks
               and not any(key == row or key.startswith(row + ".") for row in rows)]
    assert missing == []
    assert set(rows) - set(KEYS) == READ_ELSEWHERE


def nested(keys):
    config = {}
    for path, value in keys.items():
        *blocks, last = path.split(".")
        at = config
        for block in blocks:
            at = at.setdefault(block, {})
        at[last] = value
    return config


def said(run):
    return dict(re.findall(r"^  ([a-z]\w*(?:\.\w+)*) {2,}(\S.*)$", run.out.split("\nwhat differs")[0], re.M))


def print_config(tmp_path, config, *flags, ok=True):
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return train_gpt("--config", path, "--print-config", *flags, ok=ok)


OLD_NAMES = {"zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param", "bfloat16", *ALIASES}


def test_every_key_at_its_default(tmp_path):
    """A file with every key that has a default, at that: taken, and each is reported."""
    keys = {key: value for key, value in KEYS.items() if value is not None and key not in OLD_NAMES
            and not key.startswith(("scheduler.params.", "bfloat16.", "zero_optimization.zenflow.",
                                    "sparse_attention.", "optimizer.params."))}
    run = print_config(tmp_path, nested({**keys, "optimizer.type": "AdamW"}))
    lines = said(run)
    for key in keys:
        assert any(key == line or key.startswith(line + ".") for line in lines), key


@pytest.mark.parametrize("alias", ALIASES)
def test_another_name(tmp_path, alias):
    """It does what the name itself does; both together are refused, but for bf16, which counts."""
    other, value = ALIASES[alias], KEYS[alias]
    block = {"zero_optimization.stage": 3} if alias.startswith("zero") else {"fp16.enabled": False}
    value = {"zero_optimization.param_persistence_threshold": 7, "bfloat16.enabled": True}.get(alias, value)
    by_alias, by_name = (said(print_config(tmp_path, nested({**block, key: value})))[key] for key in (alias, other))
    assert by_alias == by_name
    both = print_config(tmp_path, nested({**block, alias: value, other: value}), ok=None)
    if alias.startswith("bfloat16"):
        assert both.code == 0 and said(both)[alias] == "bf16 counts"
    else:
        assert both.code == 2 and f"{alias}: is another name of {other}" in both.complaint[0]


# ---- files as people have them -----------------------------------------------------------------------------------
@pytest.mark.parametrize("config,reasons", [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_found_in_public(folder, tmp_path, config, reasons):
    """Trained for a step; or refused, with every reason in one message, by the run and by --print-config alike."""
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    have = re.search(r"^precisions .*$", train_gpt("--report").out, re.M)[0]
    printed = train_gpt("--config", path, "--print-config", ok=None)
    precision = re.search(r"^  --precision +(\S+)", printed.out, re.M)[1]
    flags = ["-p", "fp32"] if precision not in have else []
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "--config", path, "-n", 1, "--log-every", 1,
                    "-t", 16, "--sample-tokens", 0, *flags, ok=None)
    if reasons:
        assert printed.code == run.code == 2 and printed.complaint == run.complaint and len(run.complaint) == 1
        assert f": {len(reasons)} of its keys cannot be done: " in run.complaint[0]
        assert [reason for reason in reasons if reason not in run.complaint[0]] == []
    else:
        assert printed.code == run.code == 0, run.err
        assert re.search(r"^step +1/1 ", run.out, re.M)


def test_as_many_as_asked():
    assert len(CONFIGS) == 34 and len({name for name, _, _ in CONFIGS}) == 34


# ---- sentence by sentence ----------------------------------------------------------------------------------------
def flags_of(run):
    return {name: (value, source) for name, value, source in
            re.findall(r"^  --(\S+) +(?:(\S+) +)?(\S.*)$", run.out, re.M)}


@pytest.mark.parametrize("config,want", [
    ({"zero_optimization": True}, {"zero": "1"}),
    ({"zero_optimization": False}, {"zero": "0"}),
    ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, {"offload": "parameters"}),
    ({"zero_optimization": {"stage": 3, "cpu_offload": True}}, {"offload": "optimizer"}),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {"offload": "none"}),
    ({"zero_optimization": {"stage": 2, "offload_param": None}}, {"offload": "none"}),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "torch.bfloat16", "param_dtype": "bfloat16"}},
     {"grad-dtype": "bf16"}),
    ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "half"}}, {"grad-dtype": "fp16"}),
    ({"communication_data_type": "float32"}, {"comm-dtype": "fp32"}),
    ({"fp16": {"enabled": True, "initial_scale_power": 64}}, {"initial-scale-power": "64"}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}},
     {"lr": "0.0006", "beta2": "0.95", "eps": "1e-08", "weight-decay": "0.1"}),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}}},
     {"lr": "0.0006", "min-lr": "-1", "warmup-min-lr": "0", "warmup": "-1", "steps": "0", "warmup-type": "log"}),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "auto"}}},
     {"warmup-type": "linear", "min-lr": "6e-08", "warmup": "1000"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_type": "linear"}}},
     {"warmup-min-lr": "0.0001", "warmup-type": "linear"}),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.5}}}, {"warmup-min-lr": "0.0003"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, {"warmup-type": "log"}),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {"weight-decay": "0.01"}),
    ({"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}}, {"zero": "0"}),
])
def test_means(tmp_path, config, want):
    """What a key means, as a flag: old names, words of PyTorch's types, "auto"."""
    found = flags_of(print_config(tmp_path, config))
    assert {name: found[name][0] for name in want} == want
    if config.get("scheduler"):
        assert found["schedule-as"][0] == "deepspeed"


@pytest.mark.parametrize("config,reason", [
    ({"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
     "cpu_offload: is the old name of offload_optimizer: DeepSpeed refuses the two together"),
    ({"zero_optimization": {"stage": 3, "_comment": "x"}}, "zero_optimization._comment: is no key"),
    ({"data_types": {"param_dtype": "fp16"}}, "fp16 is not -p fp32"),
    ({"communication_data_type": "int8"}, "int8 is not one of grad|fp32|bf16|fp16"),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": "yes"}}}, "must be true or false"),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "AdamW has no momentum"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "at least 1: DeepSpeed refuses it"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "OneCycle needs cycle_min_lr and"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_max_mom": 2}}},
     "--schedule-params cycle_max_mom=2: have a number from 0 to 0.999999"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_lr_rate": "x"}}},
     "must be a number, true or false"),
    ({"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}, "have WarmupLR WarmupDecayLR"),
    ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
     "16 is no multiple of train_micro_batch_size_per_gpu x gradient_accumulation_steps = 4 x 3"),
    ({"stage": 2}, "did you mean zero_optimization.stage?"),
    ({"qqq": 2}, "that is known here: leave it out"),
])
def test_refused_as_by_deepspeed(tmp_path, config, reason):
    run = print_config(tmp_path, config, ok=False)
    assert run.code == 2 and len(run.complaint) == 1 and reason in run.complaint[0]


def test_hjson(tmp_path):
    """Comments and commas after the last item; signs of comments within a string are none."""
    run = print_config(tmp_path, """{ # one
"train_batch_size": 2, // two
"_path": "http://x#y, }",
"bf16": {"enabled": false, /* three *//* four *//**/# five
},
"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9, ],},},
}""")
    found = flags_of(run)
    assert found["batch"][0] == "2" and found["beta1"][0] == "0.8" and said(run)["bf16.enabled"] == "off"
    assert "  _path                                                     ignored, as by DeepSpeed" in run.out


@pytest.mark.parametrize("flags,reason", [
    (["--schedule-as", "deepspeed", "--schedule", "wsd"], "DeepSpeed has no --schedule wsd; have constant, linear"),
    (["--schedule-params", "decay_lr_rate=1"], "goes with --schedule-as deepspeed"),
    (["--schedule-as", "deepspeed", "--schedule-params", "decay=1"], "have NAME=VALUE with one of the names total_num"),
    (["--schedule", "onecycle", "--warmup-type", "log"], "onecycle has one of its own, from --min-lr"),
    (["--warmup-min-lr", 1, "--lr", 0.5], "above the peak --lr 0.5"),
    (["--keep", 2], "needs -o FOLDER"),
])
def test_flags_refused(flags, reason):
    """By a run and by --print-config in the same words."""
    run, printed = train_gpt(*flags, ok=False), train_gpt(*flags, "--print-config", ok=False)
    assert run.code == printed.code == 2 and run.complaint == printed.complaint and reason in run.complaint[0]


def test_the_command_line_has_another_schedule(tmp_path):
    """What shapes the file's schedule does not count then; the length of the warm-up and the rate do."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-2, "warmup_num_steps": 7}}
    run = print_config(tmp_path, {"scheduler": scheduler}, "--schedule", "wsd")
    found = flags_of(run)
    assert found["schedule-as"] == ("own", "default") and found["warmup-type"] == ("linear", "default")
    assert found["warmup"][0] == "7" and found["lr"][0] == "0.01"
    assert said(run)["scheduler.params.warmup_min_lr"] == "counts with --schedule constant alone"


def test_ranks_of_the_file(tmp_path):
    """A run on another number of ranks refuses the batch: --print-config says the number."""
    run = print_config(tmp_path, {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
                                  "gradient_accumulation_steps": 2})
    assert re.search(r"^  train_batch_size +of 2 ranks, with --tp of as many replicas$", run.out, re.M)


def test_tensor_parallel(tmp_path):
    """autotp_size is --tp, of a binary that has it."""
    run = print_config(tmp_path, {"tensor_parallel": {"autotp_size": 2}}, ok=None)
    if re.search(r"^ +--tp ", train_gpt("--help").out, re.M):
        assert flags_of(run)["tp"] == ("2", "tensor_parallel.autotp_size")
    else:
        assert run.code == 2 and "tensor_parallel.autotp_size: 2 asks for --tp" in run.complaint[0]


def test_length_of_the_run(folder, tmp_path):
    """total_num_steps is the run's length, unless the command line has one; the rates follow total_num_steps."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 40, "warmup_num_steps": 30}}
    assert flags_of(print_config(tmp_path, {"scheduler": scheduler}))["steps"][0] == "40"
    for words in (["-n", 5], ["--epochs", 2]):
        found = flags_of(print_config(tmp_path, {"scheduler": scheduler}, *words))
        assert found["schedule-params"][0] == "total_num_steps=40"
        assert found["steps"][0] == ("5" if "-n" in words else "0")
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "--config", tmp_path / "ds.json", "-n", 3, "-t", 16,
                    "--sample-tokens", 0)
    assert " linear as DeepSpeed's WarmupDecayLR to 0.000204 at step 3, warm-up 30 steps" in run.out
    assert "warm-up 30 steps are more than the run has: the learning rate gets to 0.000204 of the peak 0.001" in run.out


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_of_our_own(folder, tmp_path, kind):
    """--warmup-min-lr and --warmup-type without DeepSpeed: the first step has its share."""
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "-n", 6, "-t", 16, "--warmup", 4, "-l", 1e-2,
                    "--warmup-min-lr", 1e-3, "--warmup-type", kind, "--sample-tokens", 0, out=tmp_path / "run")
    share = [math.log(s + 1) / math.log(4) if kind == "log" else (s + 1) / 4 for s in range(4)]
    assert run.series("lr")[:4] == pytest.approx([1e-3 + 9e-3 * x for x in share], rel=1e-8)


def test_resume_of_a_cycle(folder, tmp_path):
    """The position of rate and beta1 comes from the checkpoint, the shape from the flags."""
    case = next(c for c in GOLDEN["cases"] if "decay_mom_rate" in c["config"]["scheduler"]["params"])
    (tmp_path / "ds.json").write_text(json.dumps(case["config"]))
    flags = ["-m", folder / "model", "-d", folder / "data", "--config", tmp_path / "ds.json", "--no-shuffle", "-t", 16,
             "--sample-tokens", 0, "-n", 20, "--save-every", 11]
    whole = train_gpt(*flags, out=tmp_path / "run")
    (tmp_path / "rest").mkdir()
    rest = train_gpt(*flags, "--resume", tmp_path / "run" / "step_00000011", out=tmp_path / "rest")
    assert rest.series("loss") == whole.series("loss")[11:] and rest.series("lr") == whole.series("lr")[11:]
    assert ", beta 0.75 to 0.85, 0.99" in whole.out
