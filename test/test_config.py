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

# Every training key that DeepSpeed documents, with a value that is supported.
DOCUMENTED = {
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
    "managed_gradient_accumulation": True, "gradient_clipping": 1.0, "prescale_gradients": False,
    "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean", "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32", "sparse_gradients": False, "disable_allgather": False,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "sequence_parallel_size": 1,
    "use_data_before_expert_parallelism": False, "steps_per_print": 10, "wall_clock_breakdown": False,
    "memory_breakdown": False, "dump_state": True, "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "dataloader_drop_last": False, "graph_harvesting": False, "vocabulary_size": 61, "log_level": "info",
    "amp": {"enabled": False, "opt_level": "O1"}, "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "data_types": {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None},
    "optimizer": {"type": "Adam", "legacy_fusion": False, "params": {
        "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "torch_adam": False, "adam_w_mode": True,
        "bias_correction": True, "amsgrad": False, "max_coeff": 10, "min_coeff": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {
        "total_num_steps": 100, "warmup_min_ratio": 0, "warmup_num_steps": 10, "cos_min_ratio": 1e-4,
        "warmup_type": "linear", "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "last_batch_iteration": -1}},
    "fp16": {"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16,
             "loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
             "fp16_master_weights_and_grads": False},
    "bf16": {"enabled": False, "immediate_grad_update": True, "check_grad_overflow": True,
             "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
    "zero_optimization": {
        "stage": 1, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 5e8,
        "use_multi_rank_bucket_allreduce": True, "allgather_partitions": True, "allgather_bucket_size": 5e8,
        "overlap_comm": True, "round_robin_gradients": False, "load_from_fp32_weights": True,
        "elastic_checkpoint": False, "ignore_unused_parameters": True, "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5,
        "stage3_model_persistence_threshold": 9e15, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0, "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False, "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False, "zero_quantized_gradients": False, "zeropp_loco_param": None,
        "mics_shard_size": -1, "mics_hierarchical_params_gather": False, "memory_efficient_linear": True,
        "override_module_apply": True, "pipeline_loading_checkpoint": False, "log_trace_cache_warnings": False,
        "enable_sanity_checks": False, "save_muon_momentum_buffer_in_memory": False, "leaf_module": {},
        "cpu_offload": False, "cpu_offload_params": False, "cpu_offload_use_pin_memory": False,
        "legacy_stage1": False, "zenflow": None,
        "offload_param": {"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 1e8,
                          "max_in_cpu": 1e9, "pin_memory": True},
        "offload_optimizer": {"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True,
                              "pipeline_read": False, "pipeline_write": False, "fast_init": False, "ratio": 1.0,
                              "super_offload": False, "cpuadam_cores_perc": 0.8}},
    "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False,
                                 "contiguous_memory_optimization": False, "number_checkpoints": None,
                                 "synchronize_checkpoint_boundary": False, "profile": False},
    "tensor_parallel": {"autotp_size": 0, "preset_model": "llama", "tp_overlap_comm": False, "partition_config": {}},
    "pipeline": {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0,
                 "pipe_partitioned": True, "grad_partitioned": True},
    "expert_parallel": {"enabled": False, "autoep_size": 1}, "hybrid_engine": {"enabled": False},
    "compile": {"deepcompile": False, "free_activation": False, "free_activation_threshold": 10485760,
                "offload_activation": False, "offload_opt_states": False, "offload_parameters": False,
                "double_buffer": True, "symmetric_memory": False, "passes": ["z1"]},
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1},
    "autotuning": {"enabled": False, "fast": True, "metric": "throughput"},
    "comms_logger": {"enabled": True, "verbose": False}, "tensorboard": {"enabled": True, "output_path": "tb"},
    "csv_monitor": {"enabled": True, "output_path": "csv"}, "wandb": {"enabled": False, "project": "x"},
    "comet": {"enabled": False},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
                   "parallel_write": {"pipeline_stage": False}, "checkpoint_serialization": True, "writer": {}},
    "nebula": {"enabled": False}, "datastates_ckpt": {}, "elasticity": {"enabled": False}, "eigenvalue":
    {"enabled": False}, "progressive_layer_drop": {"enabled": False}, "curriculum_learning": {"enabled": False},
    "data_efficiency": {"enabled": False}, "sparse_attention": {}, "compression_training": {},
}


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
    out = train_gpt(*words, "--print-config").out
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
            "schedule": "warmup-log"}
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
    assert lrs == pytest.approx([3e-5 * math.log(s + 1) / math.log(10) for s in range(3)], rel=2e-3)


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
    assert flags["schedule"][0] == "linear" and flags["warmup"] == ("1000", "DeepSpeed's default")
    assert flags["hysteresis"] == ("2", "fp16.hysteresis")         # the block counts for -p fp16 of the command line
    assert flags["beta2"] == ("0.999", "DeepSpeed's default") and flags["weight-decay"][0] == "0"


def leaves(block, prefix=""):
    for key, value in block.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


def test_every_documented_key(folder):
    _, flags, keys = read(folder, DOCUMENTED)
    for key in leaves(DOCUMENTED):
        blocks = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        inner = [k for k in keys if k.startswith(key + ".")]
        assert inner or any(block in keys for block in blocks), f"nothing is said of {key}"
    assert flags["optimizer"][0] == "adamw" and flags["min-lr"][0] == "1e-07"


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
    ({"wandb": {"enabled": True}}, "log.jsonl"),
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
                                       ('{\n  "stage": 2,\n}', "line 2, column 13: a comma")])
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
     {"schedule": "warmup-log", "warmup": 7, "lr": 0.1, "min-lr": 0}),
    ({"type": "WarmupLR", "params": {"warmup_type": "linear"}}, {"schedule": "constant", "warmup": 1000}),
    ({"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
     {"schedule": "linear", "steps": 50, "warmup": 5, "min-lr": 0}),
    ({"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "cos_min_ratio": 0.1}},
     {"schedule": "cosine", "steps": 50, "min-lr": 6e-5}),
    ({"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 9,
                                     "cycle_second_step_size": 9, "cycle_momentum": False, "decay_lr_rate": 0}},
     {"schedule": "onecycle", "min-lr": 0.01, "lr": 0.1, "warmup": 9}),
    ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 10,
                                        "lr_range_test_step_rate": 2}},
     {"schedule": "lr-range-test", "min-lr": 0.001, "lr": 0.021}),
])
def test_schedulers(folder, scheduler, want):
    """DeepSpeed's names, its defaults, and its parameters as ours."""
    given = ["-n", 100] if scheduler["type"] == "LRRangeTest" else []
    _, flags, _ = read(folder, {"scheduler": scheduler}, *given)
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
        "stage": 3, "cpu_offload": True, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
     {"offload": "activations,optimizer,parameters"}),
])
def test_storage(folder, config, want):
    """Data types of states, gradients and communication, and offload."""
    _, flags, _ = read(folder, config)
    assert {name: flags[name][0] for name in want} == want
