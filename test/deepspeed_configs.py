"""34 DeepSpeed configurations of the shapes found in public repositories, for test_deepspeed.py: name, configuration as
text or dictionary, and the reasons for which it is refused, all of them; none where it is trained."""

AUTO_BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1}
AUTO_DTYPE = {"fp16": FP16, "bf16": {"enabled": "auto"}}
BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu", "pin_memory": True}
AUTO_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                        "weight_decay": "auto"}}}
AUTO_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
AUTO_LR = {"scheduler": {"type": "WarmupLR", "params": AUTO_WARMUP}}
STAGE2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
          "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
          "round_robin_gradients": True}
STAGE3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
          "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
          "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
AXOLOTL3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0, "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True}
HF = {**AUTO_DTYPE, **AUTO_ADAMW, **AUTO_LR, **AUTO_BATCH, "steps_per_print": 2000, "wall_clock_breakdown": False}
TRLX = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
        "allgather_partitions": True, "allgather_bucket_size": 5e8, "contiguous_gradients": True}
OLD_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
ALST_BF16 = {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16,
             "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}

CONFIGS = [
    # LLaMA-Factory
    ("llamafactory-z0", {**AUTO_BATCH, "zero_allow_untested_optimizer": True, **AUTO_DTYPE,
                         "zero_optimization": {**STAGE2, "stage": 0}}, []),
    ("llamafactory-z2", {**AUTO_BATCH, "zero_allow_untested_optimizer": True, **AUTO_DTYPE,
                         "zero_optimization": STAGE2}, []),
    ("llamafactory-z2-offload", {**AUTO_BATCH, "zero_allow_untested_optimizer": True, **AUTO_DTYPE,
                                 "zero_optimization": {**STAGE2, "offload_optimizer": CPU}}, []),
    ("llamafactory-z3", {**AUTO_BATCH, "zero_allow_untested_optimizer": True, **AUTO_DTYPE,
                         "zero_optimization": STAGE3}, []),
    ("llamafactory-z3-offload", {**AUTO_BATCH, "zero_allow_untested_optimizer": True, **AUTO_DTYPE,
                                 "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}}, []),
    ("llamafactory-z2-autotp", {"_comment": "models: see the tutorial", **AUTO_BATCH, **AUTO_DTYPE,
                                "zero_optimization": STAGE2, "tensor_parallel": {"autotp_size": 1}}, []),
    ("llamafactory-fp8", {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.001,
                          "zero_force_ds_cpu_optimizer": True, "bf16": {"enabled": False},
                          "fp8": {"enabled": True, "hysteresis": 2}, "zero_optimization": STAGE3,
                          "steps_per_print": 10000000}, ["fp8: is no key"]),
    ("llamafactory-alst", {**AUTO_BATCH, "zero_optimization": {**STAGE3, "offload_param": CPU},
                           "sequence_parallel": {"enabled": True, "size": 4, "ulysses": {"degree": 4}},
                           "bf16": ALST_BF16, **AUTO_ADAMW, **AUTO_LR, "comms_logger": {"enabled": False},
                           "comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "tag": "x"}},
     ["sequence_parallel: is no key", "comms_config: is no key", "monitor_config: is no key",
      "bf16.auto_cast: is no key", "bf16.loss_scale: is no key", "bf16.initial_scale_power: is no key",
      "bf16.loss_scale_window: is no key", "bf16.hysteresis: is no key", "bf16.min_loss_scale: is no key"]),
    ("llamafactory-autotune", {**AUTO_BATCH, **BF16, "zero_optimization": STAGE3, "autotuning": {
        "enabled": True, "results_dir": "autotuning_results", "metric": "throughput", "fast": True,
        "max_train_batch_size": None, "mp_size": 1, "tuner_type": "model_based"}}, ["autotuning: --auto"]),
    # axolotl
    ("axolotl-zero1", {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"},
                       "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32}, **AUTO_BATCH,
                       "wall_clock_breakdown": False}, []),
    ("axolotl-zero2-compile", {"compile": {"disable": False, "backend": "inductor"}, **AUTO_BATCH, **AUTO_DTYPE,
                               "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
     ["compile.disable: is no key", "compile.backend: is no key"]),
    ("axolotl-zero3-bf16", {"zero_optimization": AXOLOTL3, **BF16, **AUTO_BATCH, "wall_clock_breakdown": False}, []),
    ("axolotl-zero3-bf16-cpuoffload", {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
                                       "zero_optimization": {**AXOLOTL3, "offload_optimizer": CPU,
                                                             "offload_param": CPU}, **BF16, **AUTO_BATCH}, []),
    # Hugging Face: documentation, examples, tests, accelerate
    ("hf-zero2", {**HF, "zero_optimization": {**STAGE2, "offload_optimizer": CPU, "overlap_comm": True}}, []),
    ("hf-zero3", {**HF, "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}}, []),
    ("hf-zero3-old-names", {**HF, "zero_optimization": {
        "stage": 3, "offload_param": CPU, "stage3_max_live_parameters": 1e9,
        "stage3_gather_fp16_weights_on_model_save": True}}, []),
    ("hf-zero3-nvme", {**HF, "zero_optimization": {
        **STAGE3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e8, "max_in_cpu": 1e9}},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "overlap_events": True}},
     ["offload_optimizer.device: nvme", "offload_param.device: nvme"]),
    ("hf-first-zero3", {"fp16": OLD_FP16, "zero_optimization": {
        "stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True,
        "prefetch_bucket_size": 3e6, "stage3_prefetch_bucket_size": 0.94e6, "sub_group_size": 1e14},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}}},
     ["cpu_offload_params: is no key", "prefetch_bucket_size: is another name"]),
    ("hf-cosine", {**BF16, **AUTO_ADAMW, **AUTO_BATCH, "zero_optimization": {"stage": 2}, "scheduler": {
        "type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1, "warmup_num_steps": "auto",
                                             "total_num_steps": "auto"}}}, []),
    ("hf-cosine-with-rates", {**BF16, **AUTO_BATCH, "scheduler": {
        "type": "WarmupCosineLR", "params": {**AUTO_WARMUP, "total_num_steps": "auto"}}},
     ["WarmupCosineLR has no warmup_min_lr, warmup_max_lr"]),
    ("accelerate-offload-none", {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                                 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path":
                                                                                         None},
                                                       "offload_param": {"device": "none", "nvme_path": None},
                                                       "stage3_gather_16bit_weights_on_model_save": False},
                                 "bf16": {"enabled": True}, "fp16": {"enabled": False}}, []),
    ("offload-as-a-switch", {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": True,
                                                           "offload_param": False}},
     ["offload_optimizer: must be an object", "offload_param: must be an object"]),
    # Megatron-DeepSpeed and GPT-NeoX
    ("megatron-bf16", {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 1,
                       "zero_optimization": {"stage": 0, "elastic_checkpoint": True}, "gradient_clipping": 1.0,
                       "prescale_gradients": True, **BF16, "data_types": {"grad_accum_dtype": "float32"},
                       "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True}, []),
    ("megatron-curriculum", {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}, []),
    ("megatron-compression", {"train_batch_size": 4, "compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True}}}, "data_efficiency": {"enabled": True, "data_routing": {
            "enabled": True, "random_ltd": {"enabled": True}}},
        "sparse_attention": {"mode": "fixed", "block": 16}},
     ["compression_training: ", "data_efficiency: ", "sparse_attention: "]),
    ("neox-onebit", {"train_micro_batch_size_per_gpu": 4, "fp16": OLD_FP16, "optimizer": {
        "type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 2000, "cuda_aware": False,
                                         "comm_backend_name": "nccl"}}},
     ["optimizer.type: OneBitAdam", "freeze_step: ", "comm_backend_name: "]),
    ("megatron-activations", {"train_batch_size": 4, "activation_checkpointing": {
        "partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 24,
        "cpu_checkpointing": False, "synchronize_checkpoint_boundary": True, "profile": True},
        "pipeline": {"pipe_partitioned": True, "grad_partitioned": True, "activation_checkpoint_interval": 1}}, []),
    # trlx
    ("trlx-gptj", {"train_batch_size": 128, "fp16": {"enabled": True, "min_loss_scale": 1, "opt_level": "O2"},
                   "zero_optimization": TRLX, "optimizer": {"type": "AdamW", "params": {
                       "lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
                   "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5,
                                                                "warmup_num_steps": 100}}},
     ["fp16.opt_level: is no key"]),
    ("trlx-t5", {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "fp16": {
        "enabled": True, "min_loss_scale": 0.125, "fp16_scale_tolerance": 0.25, "opt_level": "O2"},
        "zero_optimization": TRLX}, ["fp16.fp16_scale_tolerance: is no key", "fp16.opt_level: is no key"]),
    ("trlx-vicuna", {"gradient_clipping": 1.0, "gradient_accumulation_steps": 4, "train_batch_size": "auto",
                     "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": False}, **BF16,
                     "zero_optimization": TRLX}, []),
    # of the first years, and by hand
    ("old-zero-true", {"train_batch_size": 4, "zero_optimization": True, "allgather_size": 2e8, "optimizer": {
        "type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0}}}, ["optimizer.params.max_grad_norm"]),
    ("old-fp16-onecycle", """{
  "train_batch_size": 16,     # of all GPUs
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 1,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7,},},
  "scheduler": {"type": "OneCycle", "params": {
      "cycle_first_step_size": 1000, "cycle_first_stair_count": 500, "cycle_second_step_size": 1000,
      "cycle_second_stair_count": 500, "decay_step_size": 1000, "cycle_min_lr": 0.0001, "cycle_max_lr": 0.0010,
      "decay_lr_rate": 0.001, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}},
  // the loss scale starts where it did for years
  "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 2},
  "zero_optimization": {"stage": 0, "cpu_offload": false,},
}""", []),
    ("lr-range-test", {"train_batch_size": 4, "gradient_clipping": 0.5, "optimizer": {"type": "SGD", "params": {
        "lr": 0.01, "momentum": 0.9}}, "scheduler": {"type": "LRRangeTest", "params": {
            "lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": False}}, "tensorboard": {"enabled": True, "output_path": "logs/"},
        "wandb": {"enabled": True, "project": "mine"}}, []),
    ("of-other-programs", {"train_batch_size": 4, "max_grad_norm": 0.5, "learning_rate": 1e-3, "int8": {
        "enabled": True}, "activation_checkpointing": {"enabled": True}, "zero_optimization": {
            "stage": 5, "_note": "x", "overlap_com": True, "gradient_clipping": 1.0}},
     ["max_grad_norm: is no key of DeepSpeed's: did you mean gradient_clipping?", "did you mean optimizer.params.lr?",
      "int8: is no key of DeepSpeed's that is known here", "activation_checkpointing.enabled: is no key",
      "5 is out of range", "zero_optimization._note: is no key", "did you mean zero_optimization.overlap_comm?",
      "zero_optimization.gradient_clipping: is no key of DeepSpeed's: did you mean gradient_clipping?"]),
]
