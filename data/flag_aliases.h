/* flag_aliases.h: what users of Hugging Face (HF), DeepSpeed, Megatron-LM, llm.c and nanoGPT type, a row each. To add a
 * spelling, add a row, and one to the tables of docs/coming-from.md, which a test compares with this one.
 *
 *   ALIAS(spelling, field, value)   the spelling is the flag of this field. value nullptr: it takes the flag's values.
 *                                   Otherwise it is a switch that gives the flag this value. "--name=word" is --name
 *                                   with that word and no other; such a row may stand several times, a flag each
 *   DEFAULT(spelling, field, value) of a spelling that has an ALIAS above: what its program does where nothing else is
 *                                   said, so that any other word on the flag counts instead
 *   REFUSED(spelling, sentence)     known, but here something else is meant or needed: the sentence says what. With
 *                                   "--name=": where no value follows
 *
 * Only what means exactly the same is an alias. In a spelling - stands for _ too, as in all long names. */
#pragma once

#define FLAG_NOT_YET "is not there yet in this version (CHANGELOG.md says what is): leave it out"

#define FLAG_ALIASES(ALIAS, DEFAULT, REFUSED) \
    /* ---- HF: TrainingArguments, run_clm.py */ \
    ALIAS("--model-name-or-path",           model,        nullptr) \
    ALIAS("--output-dir",                   out,          nullptr) \
    ALIAS("--learning-rate",                lr,           nullptr) \
    ALIAS("--per-device-train-batch-size",  micro_batch,  nullptr) \
    ALIAS("--gradient-accumulation-steps",  grad_accum,   nullptr) \
    ALIAS("--max-steps",                    steps,        nullptr) \
    ALIAS("--num-train-epochs",             epochs,       nullptr) \
    ALIAS("--block-size",                   seq_len,      nullptr) \
    ALIAS("--bf16",                         precision,    "bf16") \
    ALIAS("--fp16",                         precision,    "fp16") \
    ALIAS("--gradient-checkpointing",       recompute,    "block") \
    ALIAS("--deepspeed",                    config,       nullptr) \
    ALIAS("--optim=adamw_torch",            optimizer,    "adamw") \
    ALIAS("--optim=adamw_torch_fused",      optimizer,    "adamw") \
    ALIAS("--adam-beta1",                   beta1,        nullptr) \
    ALIAS("--adam-beta2",                   beta2,        nullptr) \
    ALIAS("--adam-epsilon",                 eps,          nullptr) \
    ALIAS("--max-grad-norm",                clip,         nullptr) \
    ALIAS("--warmup-steps",                 warmup,       nullptr) \
    ALIAS("--lr-scheduler-type=linear",     schedule,     "linear") \
    DEFAULT("--lr-scheduler-type=linear",   min_lr,       "0") \
    DEFAULT("--lr-scheduler-type=linear",   warmup,       "0") \
    ALIAS("--lr-scheduler-type=cosine",     schedule,     "cosine") \
    DEFAULT("--lr-scheduler-type=cosine",   min_lr,       "0") \
    DEFAULT("--lr-scheduler-type=cosine",   warmup,       "0") \
    ALIAS("--lr-scheduler-type=constant",   schedule,     "constant") \
    ALIAS("--lr-scheduler-type=constant",   warmup,       "0") \
    ALIAS("--lr-scheduler-type=constant_with_warmup", schedule, "constant") \
    DEFAULT("--lr-scheduler-type=constant_with_warmup", warmup, "0") \
    ALIAS("--save-steps",                   save_every,   nullptr) \
    ALIAS("--save-total-limit",             keep,         nullptr) \
    ALIAS("--eval-steps",                   eval_every,   nullptr) \
    ALIAS("--logging-steps",                log_every,    nullptr) \
    ALIAS("--resume-from-checkpoint",       resume,       nullptr) \
    REFUSED("--resume-from-checkpoint=True", "is --resume auto here: the newest checkpoint of -o, or a new run where there is none") \
    REFUSED("--resume-from-checkpoint=False", "is what happens without --resume: leave it out") \
    REFUSED("--lr-scheduler-type=cosine_with_min_lr", "is --schedule cosine --min-lr X here") \
    REFUSED("--warmup-ratio",               "is a count of steps here: give --warmup") \
    REFUSED("--save-strategy",              "is not needed: --save-every N, in steps; without it a checkpoint at the end: leave it out") \
    REFUSED("--eval-strategy",              "is not needed: --eval-every N, in steps; without it validation at the end: leave it out") \
    REFUSED("--evaluation-strategy",        "is not needed: --eval-every N, in steps; without it validation at the end: leave it out") \
    REFUSED("--logging-strategy",           "is not needed: --log-every N, in steps; log.jsonl has every one: leave it out") \
    REFUSED("--per-device-eval-batch-size", "is -b here, for validation as for training: leave it out") \
    REFUSED("--do-train",                   "is what happens where no mode is given: leave it out") \
    REFUSED("--do-eval",                    "is --eval here, which does nothing else; a run validates at its end and every --eval-every steps") \
    REFUSED("--overwrite-output-dir",       "is never done: take another -o, or --resume auto") \
    REFUSED("--report-to",                  "is not needed: log.jsonl has everything; scripts/tensorboard.py makes event files of it") \
    REFUSED("--local-rank",                 "comes from a launcher that is not used here: mpirun -np N starts the ranks") \
    /* ---- DeepSpeed */ \
    REFUSED("--deepspeed=",                 "needs the JSON file; beside --deepspeed-config FILE it is not needed: leave it out") \
    ALIAS("--deepspeed-config",             config,       nullptr) \
    ALIAS("--zero-stage",                   zero,         nullptr) \
    ALIAS("--train-micro-batch-size-per-gpu", micro_batch, nullptr) \
    REFUSED("--train-batch-size",           "means the batch of a rank in some programs and that of all in others: give -b or --batch") \
    /* ---- Megatron-LM */ \
    ALIAS("--micro-batch-size",             micro_batch,  nullptr) \
    ALIAS("--global-batch-size",            batch,        nullptr) \
    ALIAS("--seq-length",                   seq_len,      nullptr) \
    ALIAS("--train-iters",                  steps,        nullptr) \
    ALIAS("--lr-warmup-iters",              warmup,       nullptr) \
    ALIAS("--lr-decay-style=constant",      schedule,     "constant") \
    DEFAULT("--lr-decay-style=constant",    warmup,       "0") \
    ALIAS("--lr-decay-style=linear",        schedule,     "linear") \
    DEFAULT("--lr-decay-style=linear",      min_lr,       "0") \
    DEFAULT("--lr-decay-style=linear",      warmup,       "0") \
    ALIAS("--lr-decay-style=cosine",        schedule,     "cosine") \
    DEFAULT("--lr-decay-style=cosine",      min_lr,       "0") \
    DEFAULT("--lr-decay-style=cosine",      warmup,       "0") \
    ALIAS("--clip-grad",                    clip,         nullptr) \
    ALIAS("--adam-eps",                     eps,          nullptr) \
    ALIAS("--attention-dropout",            attn_dropout, nullptr) \
    ALIAS("--use-distributed-optimizer",    zero,         "1") \
    ALIAS("--save",                         out,          nullptr) \
    ALIAS("--save-interval",                save_every,   nullptr) \
    ALIAS("--eval-interval",                eval_every,   nullptr) \
    ALIAS("--log-interval",                 log_every,    nullptr) \
    REFUSED("--hidden-dropout",             "is --dropout here, which counts for attention too where --attn-dropout does not say otherwise") \
    REFUSED("--load",                       "is --resume FOLDER here, or --resume auto: the newest checkpoint of -o, or a new run where there is none") \
    REFUSED("--data-path",                  "is -d here: token shards as data/prepare.py makes them") \
    REFUSED("--lr-decay-iters",             "is not apart from the run's length here: give -n") \
    REFUSED("--lr-warmup-fraction",         "is a count of steps here: give --warmup") \
    REFUSED("--eval-iters",                 "counts global batches; --eval-batches counts micro-batches of all ranks") \
    REFUSED("--recompute-granularity",      "is -r here: full is -r block, or -r K for K blocks at a time; what selective recomputes is never stored") \
    ALIAS("--tensor-model-parallel-size",   tp,           nullptr) \
    REFUSED("--pipeline-model-parallel-size", FLAG_NOT_YET) \
    /* ---- llm.c's letters, where they are free */ \
    ALIAS("-e",                             model,        nullptr) \
    ALIAS("-i",                             data,         nullptr) \
    ALIAS("-j",                             val,          nullptr) \
    ALIAS("-x",                             steps,        nullptr) \
    ALIAS("-u",                             warmup,       nullptr) \
    ALIAS("-c",                             weight_decay, nullptr) \
    /* ---- nanoGPT */ \
    ALIAS("--out-dir",                      out,          nullptr) \
    ALIAS("--max-iters",                    steps,        nullptr) \
    ALIAS("--warmup-iters",                 warmup,       nullptr) \
    ALIAS("--grad-clip",                    clip,         nullptr) \
    ALIAS("--dtype=float32",                precision,    "fp32") \
    ALIAS("--dtype=bfloat16",               precision,    "bf16") \
    ALIAS("--dtype=float16",                precision,    "fp16") \
    REFUSED("--init-from",                  "is -m here, a preset or a folder; to resume, --resume auto") \
    REFUSED("--batch-size",                 "means the batch of a rank in some programs and that of all in others: give -b or --batch") \
    /* ---- of the design, not built */ \
    REFUSED("--pp",                         FLAG_NOT_YET) \
    REFUSED("--sp",                         FLAG_NOT_YET) \
    REFUSED("--offload-dir",                FLAG_NOT_YET)
