/* ds_keys.h: every training key of DeepSpeed's JSON (v0.19), one row each, and what becomes of it here. Read by
 * ds_config.h, in this order: a later row that sets the same flag wins, as the scheduler's learning rate does.
 *
 *   FLAG(key, flag, note)    its value is that of the flag; "flag=word": true sets the flag to that word. Where a flag
 *                            is not there yet, a value that asks for something is refused by the flag's name
 *   RULE(key, function, note)  more than a value to copy: a function of ds_config.h
 *   SAME(key, why)           accepted: what it asks for is done anyway, or is a detail of DeepSpeed's own code
 *   ONLY(key, values, why)   accepted with one of the values, refused with any other
 *   UNLESS_OFF(key, why)     a block that is refused where its "enabled" is true
 *   NEVER(key, why)          refused
 *   ALIAS(key, other, both)  another name of the key `other`, whose row counts. Both together are refused, as by
 *                            DeepSpeed, unless `both` says which counts
 *   PARAM(key)               a parameter of a scheduler, for --schedule-params
 * A row for a block covers all keys in it. test/golden/deepspeed_keys.json has every key that DeepSpeed reads. The note
 * is printed with the key: what differs from DeepSpeed. */
#pragma once

#define DS_KEYS \
    /* ---- batch */ \
    RULE("train_batch_size",                ds_batch, "") \
    FLAG("train_micro_batch_size_per_gpu",  "micro_batch", "") \
    FLAG("gradient_accumulation_steps",     "grad_accum", "") \
    ONLY("managed_gradient_accumulation",   "true", "the program knows where a step ends") \
    /* ---- precision; fp16.* and bf16.* count where -p ends up as that */ \
    RULE("fp16.enabled",                    ds_fp16, "") \
    RULE("bf16.enabled",                    ds_bf16, "") \
    ALIAS("bfloat16.enabled",               "bf16.enabled", "bf16 counts") \
    ALIAS("bfloat16.immediate_grad_update", "bf16.immediate_grad_update", "bf16 counts") \
    ALIAS("bfloat16.check_grad_overflow",   "bf16.check_grad_overflow", "bf16 counts") \
    ALIAS("bfloat16.bf16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", "bf16 counts") \
    ALIAS("bfloat16.bf16_optimizer_states", "bf16.bf16_optimizer_states", "bf16 counts") \
    SAME("fp16.auto_cast",                  "the inputs are token numbers") \
    FLAG("fp16.loss_scale",                 "loss_scale", "") \
    FLAG("fp16.initial_scale_power",        "initial_scale_power", "") \
    FLAG("fp16.loss_scale_window",          "loss_scale_window", "gradients are unscaled with the scale of their own backward; DeepSpeed halves them where the scale grows") \
    FLAG("fp16.hysteresis",                 "hysteresis", "") \
    FLAG("fp16.consecutive_hysteresis",     "consecutive_hysteresis", "") \
    FLAG("fp16.min_loss_scale",             "min_loss_scale", "") \
    ONLY("fp16.fp16_master_weights_and_grads", "false", "fp16 keeps fp32 master weights") \
    SAME("bf16.immediate_grad_update",      "a gradient is added to its sum as soon as it is there") \
    SAME("bf16.check_grad_overflow",        "every precision is checked for Inf and NaN") \
    RULE("bf16.bf16_master_weights_and_grads", ds_bf16_master, "") \
    FLAG("bf16.bf16_optimizer_states",      "state_dtype=bf16", "moments take stochastic rounding") \
    RULE("data_types.grad_accum_dtype",     ds_grad_accum_dtype, "left out, DeepSpeed sums in the model's precision and this program in fp32") \
    RULE("data_types.param_dtype",          ds_param_dtype, "") \
    SAME("data_types.buffer_dtype",         "nothing but parameters is stored") \
    UNLESS_OFF("amp",                       "apex is PyTorch's; fp16 or bf16 is the like of it") \
    UNLESS_OFF("torch_autocast",            "autocast is PyTorch's; fp16 or bf16 is the like of it") \
    /* ---- optimizer and gradients */ \
    RULE("optimizer.type",                  ds_optimizer, "") \
    SAME("optimizer.legacy_fusion",         "there is one implementation") \
    FLAG("optimizer.params.lr",             "lr", "") \
    RULE("optimizer.params.betas",          ds_betas, "") \
    FLAG("optimizer.params.eps",            "eps", "") \
    FLAG("optimizer.params.weight_decay",   "weight_decay", "tensors with two axes only; DeepSpeed decays all it is given") \
    SAME("optimizer.params.torch_adam",     "there is one implementation") \
    SAME("optimizer.params.adam_w_mode",    "read with optimizer.type") \
    ONLY("optimizer.params.bias_correction", "true", "Adam corrects its moments") \
    ONLY("optimizer.params.amsgrad",        "false", "DeepSpeed's own Adam refuses it as well") \
    ONLY("optimizer.params.maximize",       "false", "a loss is minimized") \
    ONLY("optimizer.params.lr_decay",       "0", "--schedule says what the learning rate does") \
    ONLY("optimizer.params.initial_accumulator_value", "0", "Adagrad's sum starts at 0") \
    ONLY("optimizer.params.eps_inside_sqrt", "false", "eps is added to the root") \
    SAME("optimizer.params.set_grad_none",  "gradients are overwritten in the first micro-step") \
    SAME("optimizer.params.foreach",        "there is one implementation") \
    SAME("optimizer.params.fused",          "there is one implementation") \
    SAME("optimizer.params.capturable",     "a detail of PyTorch") \
    SAME("optimizer.params.differentiable", "a detail of PyTorch") \
    ONLY("optimizer.params.fp32_optimizer_states", "true", "bf16.bf16_optimizer_states asks for the other") \
    FLAG("optimizer.params.momentum",       "momentum", "") \
    FLAG("optimizer.params.nesterov",       "nesterov", "") \
    FLAG("optimizer.params.dampening",      "dampening", "") \
    ONLY("optimizer.params.max_coeff",      "10", "LAMB's ratio is between 0.01 and 10") \
    ONLY("optimizer.params.min_coeff",      "0.01", "LAMB's ratio is between 0.01 and 10") \
    FLAG("optimizer.params.muon_lr",        "muon_lr", "") \
    FLAG("optimizer.params.adam_lr",        "lr", "") \
    ONLY("optimizer.params.ns_method",      "standard", "Muon iterates on the matrix, not on its Gram matrix") \
    NEVER("optimizer.params.max_grad_norm", "DeepSpeed refuses it as well: use gradient_clipping") \
    NEVER("optimizer.params.freeze_step",   "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.cuda_aware",    "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.comm_backend_name", "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.var_freeze_step", "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.var_update_scaler", "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.local_step_scaler", "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.local_step_clipper", "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.coeff_beta",    "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.factor_max",    "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.factor_min",    "of the 1-bit optimizers, which are not there") \
    NEVER("optimizer.params.factor_threshold", "of the 1-bit optimizers, which are not there") \
    FLAG("gradient_clipping",               "clip", "") \
    SAME("prescale_gradients",              "the backward divides by the tokens of the whole batch: sums over ranks do not grow") \
    SAME("gradient_predivide_factor",       "the backward divides by the tokens of the whole batch") \
    ONLY("gradient_allreduce_op",           "mean", "a loss is a mean over tokens, and so is its gradient") \
    RULE("communication_data_type",         ds_comm_dtype, "") \
    SAME("seq_parallel_communication_data_type", "a sequence is not split") \
    ONLY("sparse_gradients",                "false", "gradients of embeddings are dense") \
    ONLY("disable_allgather",               "false", "parameters are all-gathered") \
    SAME("zero_allow_untested_optimizer",   "every optimizer here is tested under every stage") \
    SAME("zero_force_ds_cpu_optimizer",     "there is one implementation") \
    /* ---- schedule */ \
    RULE("scheduler.type",                  ds_scheduler, "") \
    FLAG("scheduler.params.warmup_max_lr",  "lr", "") \
    RULE("scheduler.params.warmup_min_lr",  ds_warmup_min_lr, "") \
    RULE("scheduler.params.warmup_num_steps", ds_warmup_num_steps, "") \
    RULE("scheduler.params.warmup_type",    ds_warmup_type, "") \
    RULE("scheduler.params.total_num_steps", ds_total_num_steps, "the run ends there, too, unless -n or --epochs says where") \
    RULE("scheduler.params.warmup_min_ratio", ds_warmup_min_ratio, "") \
    RULE("scheduler.params.cos_min_ratio",  ds_cos_min_ratio, "") \
    ONLY("scheduler.params.last_batch_iteration", "-1", "--resume takes the position from the checkpoint") \
    FLAG("scheduler.params.cycle_min_lr",   "min_lr", "") \
    FLAG("scheduler.params.cycle_max_lr",   "lr", "") \
    FLAG("scheduler.params.cycle_first_step_size", "warmup", "") \
    PARAM("scheduler.params.cycle_second_step_size") \
    PARAM("scheduler.params.cycle_first_stair_count") \
    PARAM("scheduler.params.cycle_second_stair_count") \
    PARAM("scheduler.params.decay_step_size") \
    PARAM("scheduler.params.decay_lr_rate") \
    PARAM("scheduler.params.cycle_momentum") \
    PARAM("scheduler.params.cycle_min_mom") \
    PARAM("scheduler.params.cycle_max_mom") \
    PARAM("scheduler.params.decay_mom_rate") \
    SAME("scheduler.params.lr_range_test_min_lr", "read with scheduler.type") \
    SAME("scheduler.params.lr_range_test_step_size", "read with scheduler.type") \
    SAME("scheduler.params.lr_range_test_step_rate", "read with scheduler.type") \
    PARAM("scheduler.params.lr_range_test_staircase") \
    /* ---- ZeRO */ \
    RULE("zero_optimization",               ds_zero_switch, "") \
    SAME("allgather_size",                  "goes with zero_optimization true: parameters are all-gathered unit by unit") \
    FLAG("zero_optimization.stage",         "zero", "") \
    SAME("zero_optimization.contiguous_gradients", "gradients of a unit always lie one after another") \
    SAME("zero_optimization.reduce_scatter", "stages 1 to 3 always reduce-scatter") \
    FLAG("zero_optimization.reduce_bucket_size", "reduce_bucket", "whole units of at most so many elements; a larger unit goes alone") \
    SAME("zero_optimization.use_multi_rank_bucket_allreduce", "stages 1 to 3 always reduce-scatter") \
    SAME("zero_optimization.allgather_partitions", "parameters are always all-gathered") \
    FLAG("zero_optimization.allgather_bucket_size", "gather_bucket", "whole units of at most so many elements; DeepSpeed ignores it") \
    FLAG("zero_optimization.overlap_comm",  "overlap", "") \
    SAME("zero_optimization.round_robin_gradients", "every unit is cut evenly over all ranks") \
    ONLY("zero_optimization.load_from_fp32_weights", "true", "a checkpoint holds the fp32 weights") \
    SAME("zero_optimization.elastic_checkpoint", "any number of ranks and any stage resumes a checkpoint") \
    SAME("zero_optimization.ignore_unused_parameters", "every parameter is used") \
    SAME("zero_optimization.sub_group_size", "the optimizer goes unit by unit") \
    SAME("zero_optimization.stage3_prefetch_bucket_size", "one unit is fetched ahead") \
    FLAG("zero_optimization.stage3_param_persistence_threshold", "persist_below", "counts whole units (a block), not tensors") \
    SAME("zero_optimization.stage3_model_persistence_threshold", "the plan printed at the start counts what stays whole") \
    SAME("zero_optimization.stage3_max_live_parameters", "two units are whole at a time") \
    SAME("zero_optimization.stage3_max_reuse_distance", "the unit at the turn from forward to backward is kept") \
    SAME("zero_optimization.stage3_gather_16bit_weights_on_model_save", "a checkpoint is a whole Hugging Face folder") \
    SAME("zero_optimization.stage3_module_granularity_threshold", "a block is fetched as one") \
    SAME("zero_optimization.stage3_use_all_reduce_for_fetch_params", "parameters are all-gathered") \
    SAME("zero_optimization.stage3_allgather_sequential", "a block is fetched as one") \
    ALIAS("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size", "") \
    ALIAS("zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold", "") \
    ALIAS("zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold", "") \
    ALIAS("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters", "") \
    ALIAS("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance", "") \
    ALIAS("zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save", "") \
    ALIAS("zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold", "") \
    ALIAS("zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params", "") \
    ALIAS("zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential", "") \
    ALIAS("zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save", "") \
    ONLY("zero_optimization.zero_hpz_partition_size", "1", "ZeRO++ is not there") \
    ONLY("zero_optimization.zero_quantized_weights", "false", "ZeRO++ is not there") \
    ONLY("zero_optimization.zero_quantized_nontrainable_weights", "false", "ZeRO++ is not there") \
    ONLY("zero_optimization.zero_quantized_gradients", "false", "ZeRO++ is not there") \
    ONLY("zero_optimization.zeropp_loco_param", "null", "ZeRO++ is not there") \
    ONLY("zero_optimization.mics_shard_size", "-1", "a unit is cut over all ranks") \
    ONLY("zero_optimization.mics_hierarchical_params_gather", "false", "a unit is cut over all ranks") \
    SAME("zero_optimization.memory_efficient_linear", "the backward gathers a weight anew") \
    SAME("zero_optimization.override_module_apply", "a detail of PyTorch") \
    SAME("zero_optimization.pipeline_loading_checkpoint", "every rank reads its own ranges") \
    SAME("zero_optimization.log_trace_cache_warnings", "the order of units is known from the start") \
    SAME("zero_optimization.enable_sanity_checks", "ranks compare their plans at the start") \
    SAME("zero_optimization.save_muon_momentum_buffer_in_memory", "a detail of DeepSpeed's code") \
    SAME("zero_optimization.leaf_module",   "a block is fetched as one") \
    RULE("zero_optimization.cpu_offload",   ds_offload, "") \
    RULE("zero_optimization.cpu_offload_param", ds_offload, "") \
    SAME("zero_optimization.cpu_offload_use_pin_memory", "memory that is copied from and to is always pinned") \
    NEVER("zero_optimization.legacy_stage1", "DeepSpeed refuses it as well") \
    NEVER("zero_optimization.zenflow",      "ZenFlow is not there") \
    RULE("zero_optimization.offload_param.device", ds_offload, "") \
    SAME("zero_optimization.offload_param.nvme_path", "goes with device nvme") \
    SAME("zero_optimization.offload_param.buffer_count", "goes with device nvme") \
    SAME("zero_optimization.offload_param.buffer_size", "goes with device nvme") \
    SAME("zero_optimization.offload_param.max_in_cpu", "goes with device nvme") \
    SAME("zero_optimization.offload_param.pin_memory", "memory that is copied from and to is always pinned") \
    RULE("zero_optimization.offload_optimizer.device", ds_offload, "the update itself runs on the device and reaches them over the bus") \
    SAME("zero_optimization.offload_optimizer.nvme_path", "goes with device nvme") \
    SAME("zero_optimization.offload_optimizer.buffer_count", "goes with device nvme") \
    SAME("zero_optimization.offload_optimizer.pin_memory", "memory that is copied from and to is always pinned") \
    SAME("zero_optimization.offload_optimizer.pipeline_read", "goes with device nvme") \
    SAME("zero_optimization.offload_optimizer.pipeline_write", "goes with device nvme") \
    SAME("zero_optimization.offload_optimizer.fast_init", "goes with device nvme") \
    FLAG("zero_optimization.offload_optimizer.ratio", "offload_share", "whole units; the first ones of the forward stay on the device") \
    ONLY("zero_optimization.offload_optimizer.super_offload", "false", "SuperOffload is not there") \
    SAME("zero_optimization.offload_optimizer.cpuadam_cores_perc", "goes with super_offload") \
    SAME("aio",                             "goes with device nvme") \
    /* ---- parallelism, activation memory */ \
    ONLY("sequence_parallel_size",          "1", "a sequence is not split over ranks") \
    ONLY("use_data_before_expert_parallelism", "false", "there are no experts") \
    SAME("activation_checkpointing.partition_activations", "splits activations over the ranks of tensor parallelism alone") \
    RULE("activation_checkpointing.cpu_checkpointing", ds_offload, "with -r block or K; the key alone recomputes nothing") \
    SAME("activation_checkpointing.contiguous_memory_optimization", "activations always lie one after another") \
    SAME("activation_checkpointing.number_checkpoints", "-r chooses activation recomputation") \
    SAME("activation_checkpointing.synchronize_checkpoint_boundary", "streams wait for events, not for the device") \
    SAME("activation_checkpointing.profile", "the times of a step are in the log") \
    RULE("tensor_parallel.autotp_size",     ds_tensor_parallel, "") \
    RULE("tensor_parallel.tensor_parallel.tp_size", ds_tensor_parallel, "") \
    ALIAS("tensor_parallel.tp.tp_size",     "tensor_parallel.tensor_parallel.tp_size", "") \
    SAME("tensor_parallel.tensor_parallel.tp_grain_size","goes with tp_size") \
    SAME("tensor_parallel.tensor_parallel.mpu","goes with tp_size") \
    SAME("tensor_parallel.tensor_parallel.tp_group","goes with tp_size") \
    SAME("tensor_parallel.tp.tp_grain_size",  "goes with tp_size") \
    SAME("tensor_parallel.tp.mpu",            "goes with tp_size") \
    SAME("tensor_parallel.tp.tp_group",       "goes with tp_size") \
    SAME("tensor_parallel.preset_model",    "goes with autotp_size") \
    SAME("tensor_parallel.tp_overlap_comm", "goes with autotp_size") \
    SAME("tensor_parallel.partition_config", "goes with autotp_size") \
    SAME("tensor_parallel.injection_policy_tuple", "goes with autotp_size") \
    SAME("tensor_parallel.keep_module_on_host", "goes with autotp_size") \
    SAME("tensor_parallel.replace_with_kernel_inject", "kernels for inference are not PyTorch's anyway") \
    ALIAS("tensor_parallel.kernel_inject",  "tensor_parallel.replace_with_kernel_inject", "") \
    SAME("tensor_parallel.dtype",           "-p says what parameters are stored in") \
    ONLY("pipeline.stages",                 "auto|1", "layers are not split over ranks") \
    SAME("pipeline.partition",              "goes with stages") \
    SAME("pipeline.seed_layers",            "weights depend on the seed alone") \
    SAME("pipeline.activation_checkpoint_interval", "-r chooses activation recomputation") \
    SAME("pipeline.pipe_partitioned",       "goes with stages") \
    SAME("pipeline.grad_partitioned",       "goes with stages") \
    SAME("pipeline.use_reentrant",          "goes with stages") \
    UNLESS_OFF("expert_parallel",           "there are no experts") \
    UNLESS_OFF("hybrid_engine",             "generation is a mode of its own: --generate, --prompts") \
    ONLY("compile.deepcompile",             "false", "nothing is compiled while it runs") \
    SAME("compile.free_activation",         "goes with deepcompile") \
    SAME("compile.free_activation_threshold", "goes with deepcompile") \
    SAME("compile.offload_activation",      "goes with deepcompile") \
    SAME("compile.offload_activation_pin_memory","goes with deepcompile") \
    SAME("compile.debug_log",               "goes with deepcompile") \
    SAME("compile.sync_before_reduce",      "goes with deepcompile") \
    SAME("compile.sync_after_reduce",       "goes with deepcompile") \
    SAME("compile.sync_before_allgather",   "goes with deepcompile") \
    SAME("compile.sync_after_allgather",    "goes with deepcompile") \
    SAME("compile.keep_int_input_tensors",  "goes with deepcompile") \
    SAME("compile.keep_all_input_tensors",  "goes with deepcompile") \
    SAME("compile.offload_opt_states",      "goes with deepcompile") \
    SAME("compile.offload_parameters",      "goes with deepcompile") \
    SAME("compile.double_buffer",           "goes with deepcompile") \
    SAME("compile.symmetric_memory",        "goes with deepcompile") \
    SAME("compile.passes",                  "goes with deepcompile") \
    ONLY("graph_harvesting",                "false", "there is no CUDA graph") \
    /* ---- what is said */ \
    FLAG("steps_per_print",                 "log_every", "") \
    SAME("wall_clock_breakdown",            "the log has the time of each phase of every step; --profile has every operation's") \
    SAME("memory_breakdown",                "the plan of the memory is printed at every start") \
    SAME("dump_state",                      "--print-config prints it") \
    SAME("timers",                          "tokens per second are measured by events, without a wait") \
    SAME("log_level",                       "there is one") \
    SAME("flops_profiler",                  "floating-point operations are counted from the shapes: at the start, and in % of peak at each step") \
    SAME("comms_logger",                    "bytes sent are counted and compared with the plan: --verbose prints them") \
    SAME("tensorboard",                     "log.jsonl has it all: scripts/tensorboard.py RUN writes event files") \
    SAME("csv_monitor",                     "log.jsonl has it all") \
    SAME("wandb",                           "nothing is sent over the network: log.jsonl has it all") \
    SAME("comet",                           "nothing is sent over the network: log.jsonl has it all") \
    /* ---- data */ \
    SAME("dataloader_drop_last",            "the windows of a batch that is not full go into the next epoch") \
    SAME("vocabulary_size",                 "the model says it; it is padded where kernels need that") \
    RULE("curriculum_learning",             ds_curriculum, "") \
    RULE("data_efficiency",                 ds_data_efficiency, "") \
    /* ---- checkpoints, elasticity, the rest */ \
    SAME("checkpoint.tag_validation",       "ranks compare the step before they write") \
    SAME("checkpoint.load_universal",       "any number of ranks and any stage resumes a checkpoint") \
    ONLY("checkpoint.use_node_local_storage", "false", "a checkpoint is one folder") \
    SAME("checkpoint.parallel_write",       "every rank writes its own ranges") \
    SAME("checkpoint.checkpoint_serialization", "checkpoints are safetensors") \
    SAME("checkpoint.writer",               "checkpoints are safetensors") \
    UNLESS_OFF("nebula",                    "checkpoints go to a folder") \
    NEVER("datastates_ckpt",                "checkpoints go to a folder") \
    UNLESS_OFF("elasticity",                "the batch is what is given; --resume auto --elastic keeps it on any number of ranks") \
    UNLESS_OFF("autotuning",                "--auto chooses stage, recomputation and micro-batch from the plan") \
    UNLESS_OFF("eigenvalue",                "it is not there") \
    UNLESS_OFF("progressive_layer_drop",    "no layer is left out") \
    NEVER("sparse_attention",               "attention is dense") \
    NEVER("compression_training",           "weights are neither quantised nor pruned") \
    NEVER("quantize_training",              "weights are neither quantised nor pruned") \
    NEVER("weight_quantization",            "weights are neither quantised nor pruned")
