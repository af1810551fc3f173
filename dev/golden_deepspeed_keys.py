"""Writes test/golden/deepspeed_keys.json: every key that DeepSpeed's configuration reads, with its default.
Needs DeepSpeed (0.19.6 made the file): python dev/golden_deepspeed_keys.py

Where a block is a pydantic class its fields and their aliases are the keys; where it is read by hand, the keys are
those that DeepSpeedConfig asks a dictionary for that remembers. Optimizers' and schedulers' parameters are those of the
constructors."""
import enum
import inspect
import json
import pathlib
import typing

import deepspeed
import torch
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.runtime import config as runtime, lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam
from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

ROOT = pathlib.Path(__file__).resolve().parent.parent
keys = {}


def plain(value):
    """As JSON has it; what it has not is left out."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (bool, str, list)) or value is None:
        return value
    return float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else None


def add(path, default=None):
    keys.setdefault(path, plain(default))


def model_in(annotation):
    kinds = [annotation, *typing.get_args(annotation)]
    return next((k for k in kinds if inspect.isclass(k) and issubclass(k, DeepSpeedConfigModel)), None)


def walk_model(prefix, model):
    for name, field in model.model_fields.items():
        for key in {name, field.alias or name}:
            inner = model_in(field.annotation)
            add(f"{prefix}.{key}", None if inner else field.default)
            if inner:
                walk_model(f"{prefix}.{key}", inner)


class Remembering(dict):
    """A dictionary that notes which keys it is asked for; the blocks in it do too."""
    def __init__(self, prefix, content):
        super().__init__({k: Remembering(f"{prefix}{k}.", v) if isinstance(v, dict) else v
                          for k, v in content.items()})
        self.prefix = prefix

    def get(self, key, default=None):
        add(self.prefix + key, default)
        return super().get(key, default)

    def __getitem__(self, key):
        add(self.prefix + key)
        return super().__getitem__(key)

    def __contains__(self, key):
        add(self.prefix + key)
        return super().__contains__(key)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def pop(self, key, *default):
        return self.get(key, *default)

    def keys(self):
        return self


BLOCKS = ("activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger compile compression_training "
          "csv_monitor data_efficiency data_types datastates_ckpt eigenvalue elasticity expert_parallel flops_profiler "
          "fp16 hybrid_engine nebula optimizer pipeline progressive_layer_drop scheduler tensor_parallel tensorboard "
          "timers torch_autocast wandb zero_optimization").split()


def walk_reads():
    """What DeepSpeedConfig asks for: first as in a file with every block empty, then with some of them filled."""
    empty = {name: {} for name in BLOCKS}
    filled = [
        {}, {"zero_optimization": True}, {"bf16": {"enabled": True}},
        {"checkpoint": {"parallel_write": {}, "writer": {"type": "fast"}}},
        {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        {"timers": {"throughput": {}}, "optimizer": {"type": "Adam", "params": {}}, "amp": {"enabled": False}},
        {"progressive_layer_drop": {"enabled": True}, "bfloat16": {}, "weight_quantization": {}},
        {"data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"curriculum_metrics": {}},
                                                                "dynamic_batching": {}},
                             "data_routing": {"random_ltd": {"random_ltd_schedule": {}}}}},
        *({"sparse_attention": {"mode": mode}} for mode in ("dense", "fixed", "variable", "bigbird", "bslongformer")),
    ]
    for more in filled:
        content = Remembering("", {**empty, "train_batch_size": 1, **more})
        for read in (runtime.DeepSpeedConfig,):
            try:
                read(content)
            except (AssertionError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                print("note:", type(error).__name__, error, "of", more)
    for name in ("min_gpus", "max_gpus", "min_time", "version", "prefer_larger_batch", "model_parallel_size",
                 "num_gpus_per_node", "ignore_non_elastic_batch_info", "max_train_batch_size", "micro_batch_sizes"):
        add(f"elasticity.{name}")
    ElasticityConfig(Remembering("elasticity.", {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1]}))
    DeepSpeedAutotuningConfig({"autotuning": Remembering("autotuning.", {"enabled": True})})


def walk_arguments(prefix, makers):
    for make in makers:
        for name, parameter in inspect.signature(make).parameters.items():
            if name not in ("self", "optimizer", "params", "deepspeed", "param_groups"):
                add(f"{prefix}.{name}", None if parameter.default is parameter.empty else parameter.default)


walk_model("zero_optimization", runtime.get_zero_config({}).__class__)
for name, model in {"fp16": runtime.get_float16_config({}), "bf16": runtime.get_bfloat16_config({}),
                    "bfloat16": runtime.get_bfloat16_config({}), "compile": runtime.CompileConfig(),
                    "tensor_parallel": runtime.get_tensor_parallel_config({}),
                    "hybrid_engine": runtime.get_hybrid_engine_config({}),
                    "timers.throughput": runtime.get_timers_config({}),
                    **{m: getattr(runtime.get_monitor_config({}), m)
                       for m in ("tensorboard", "wandb", "csv_monitor", "comet")}}.items():
    walk_model(name, model.__class__)
walk_model("comms_logger", runtime.DeepSpeedCommsConfig({"comms_logger": {}}).comms_logger.__class__)
walk_reads()
walk_arguments("scheduler.params", [getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES])
walk_arguments("optimizer.params", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, FusedLamb, FusedLion,
                                    adam.OnebitAdam, lamb.OnebitLamb, zoadam.ZeroOneAdam])
for name in ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "muon_lr", "adam_lr", "ns_method", "max_grad_norm"):
    add(f"optimizer.params.{name}")                  # taken out of the parameters before the constructor sees them
add("pipeline.stages", "auto")
for name, default in runtime.get_pipeline_config({}).items():
    add(f"pipeline.{name}", default)
text = json.dumps({"deepspeed": deepspeed.__version__, "keys": dict(sorted(keys.items()))}, indent=0)
(ROOT / "test" / "golden" / "deepspeed_keys.json").write_text(text + "\n")
print(len(keys), "keys")
