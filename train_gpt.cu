/* train_gpt.cu: the program: main, the modes, the training loop.
 *
 * data/    flags.h flag_rules.h    options, what goes with what  kernels/  one file per operation: CPU and CUDA code
 *          tokens.h loader.h       token shards and batches      zero/     shard.h stages.h  which rank owns what
 *          tokenizer.h             text <-> tokens                         update.h          the end of a step
 *          safetensors.h run_log.h weights, log.jsonl                      save.h            checkpoints
 * model/   shapes.cuh              presets, config.json          run/      start.cuh         from flags to memory
 *          block.cuh passes.cuh    forward, backward                       train_step.cuh    one step
 *          generate.cuh            text from a model                       evaluate.cuh      validation
 *          choices.cuh             multiple choice                         report.cuh        what is printed, logged
 *                                                                          folder.cuh        save, resume, reproduce
 *
 * The file is compiled once per precision (PREC_FP32, PREC_BF16, PREC_FP16); the object with PREC_MAIN holds main(). */
#include "data/ds_config.h"
#include "data/flag_rules.h"
#include "model/choices.cuh"
#include "run/environment.cuh"
#include "run/evaluate.cuh"
#include "run/same.cuh"
#include "run/start.cuh"
#include "run/tune.cuh"
#include "run/version.h"

/* One per object, named by its precision and instruction set (kernels/cpu/isa.h). */
#if defined(PREC_BF16)
#define RUN_ALL ISA_NAME(run_all_bf16)
#elif defined(PREC_FP16)
#define RUN_ALL ISA_NAME(run_all_fp16)
#else
#define RUN_ALL ISA_NAME(run_all_fp32)
#endif
void RUN_ALL(Flags* f, Comm* comm);

/* --verbose: the communication volume of rank 0, and of each of its groups. */
static void say_sent(Run* run)
{
    const Group* groups[4];
    const int num_groups = layout_groups(run, groups);
    size_t sent = 0, asked = 0, in_steps = 0;
    for (int i = 0; i < num_groups; i++) {
        sent += group_sent_so_far(groups[i]);
        asked += groups[i]->asked_bytes;
        in_steps += groups[i]->step_bytes;
    }
    SAY("sent    communication volume of rank 0: %zu bytes, expected %zu; %zu in steps, planned per step %zu%s\n", sent,
        asked, in_steps, sent_bytes_per_step(run), run->batch_ramp.steps > 0 ? " at the end of the ramp" : "");
    for (int i = 0; i < num_groups && num_groups > 1; i++)
        SAY("sent   %s: %zu bytes, expected %zu; %zu in steps, planned per step %zu\n",
            groups[i]->words[0] ? groups[i]->words : " to all ranks", group_sent_so_far(groups[i]),
            groups[i]->asked_bytes, groups[i]->step_bytes, group_sent_bytes(run, groups[i]));
}

// -------------------------------------------------------------------------------------------------------- the loop
static void train(Run* run)
{
    const Flags* f = run->flags;
    run->on_terminal = on_terminal();
    size_t first = run->step, unread = first + 1;   // unread: the first step whose result the host has not read
    size_t waits_before = comm_host_waits(&run->comm);
    run->reads_at_once = launches_wait();
    trace_open(run);
    if (run->val_due || (f->eval_at_start && run->step == 0)) evaluate_and_say(run);
    while (run->step < run->num_steps && run->ask != Ask::END && !run_out_of_patience(run)) {
        train_step(run);
        size_t step = ++run->step;
        for (; unread < step; unread++) {
            step_wait(run, unread);
            finish_step(run, unread, nullptr);
        }
        bool last = step == run->num_steps;
        bool evals = last || (f->eval_every > 0 && step % f->eval_every == 0);
        bool saves = f->out[0] && (last || (f->save_every > 0 && step % f->save_every == 0));
        bool hashes = last || saves || (f->hash_every > 0 && step % f->hash_every == 0);
        bool reads = run->reads_at_once || evals || hashes || run->seen_skip || run->ask != Ask::NONE;
        if (reads) step_wait(run, step);                // else the host reads the newest result one step later
        saves = saves || (f->out[0] && run->ask != Ask::NONE);
        trace_poll(run, step - first, false);
        char hash[32] = "";
        if (saves || hashes) snprintf(hash, sizeof hash, "%016llx", zero_state_hash(&run->zero));
        if (f->check_replicas > 0 && step % f->check_replicas == 0)
            zero_ensure_replicas(&run->zero, step);
        if (reads) {
            finish_step(run, step, hash[0] ? hash : nullptr);
            unread = step + 1;
        }
        if (last && hash[0]) {
            SAY("state hash %s after step %zu\n", hash, step);
            repeat_say(run, hash);
        }
        if (evals) evaluate_and_say(run);
        saves = saves || (f->out[0] && (run->ask != Ask::NONE || run_out_of_patience(run)));   // a signal since then
        saves = saves || (f->keep_best && evals && run->best.step == step);
        if (saves) save(run);
        else save_poll(run, false);
        if (run->ask == Ask::SAVE) {
            if (!saves) SAY("asked to save: nothing is saved without -o\n");
            run->ask = Ask::NONE;
        }
        if (saves) ask_outside_step(run);
    }
    save_poll(run, true);
    say_best(run);
    trace_poll(run, run->step - first, true);
    if (run->ask == Ask::END)
        SAY("asked to end: stops after step %zu%s\n", run->step,
            f->out[0] ? ", which is saved" : "; nothing is saved without -o");
    if (!f->verbose) return;
    if (run->comm.num_ranks > 1 && run->step > 0) say_sent(run);
#ifndef DEVICE_CUDA
    SAY("syncs   host synchronizations: %zu inside steps, %zu for a step's result, %zu others\n", run->step_waits,
        run->result_waits, comm_host_waits(&run->comm) - waits_before - run->step_waits - run->result_waits);
#endif
}

// ----------------------------------------------------------------------------------------------------------- a run
/* A run from its flags to its end, in this file's precision. */
void RUN_ALL(Flags* f, Comm* comm)
{
    Run run_ = {}, *run = &run_;
    run->flags = f;
    run->best.loss = INFINITY;
    run->comm = *comm;
    bool generates = f->given[FLAG_generate] || f->given[FLAG_prompts], exports = f->given[FLAG_export_];
    bool trains = flags_num_modes(f) == 0 || f->bench;
    char resume_path[4096];
    const char* model_name = run_prepare(run, trains, resume_path);
    repeat_check(run);
    if (trains || f->plan) print_start(run, model_name);
    else if (comm->rank == 0) say_to(stderr, "%s", run->model.config.notes);
    if (f->plan) return;
    ensure_same_start(run);
    Ceilings ceilings = f->bench ? ceilings_measure(run) : Ceilings{};
    run_allocate(run);
    if (resume_path[0] && trains) resume(run, resume_path);
    else weights_start(run, resume_path[0] ? resume_path : model_name, f->from_scratch && !resume_path[0]);
#ifdef DEVICE_CUDA
    CUDA_CHECK(cudaDeviceSynchronize());    // copies from pageable memory may have returned before they ended
#endif
    if (exports) {
        tokenizer_say(run, model_name);
        weights_export(&run->zero, f->export_, weights_dtype(f->export_dtype), (size_t)f->shard_bytes,
                       write_small_files, run);
        SAY("exported %s\n", f->export_);
    } else if (generates) {
        ENSURE(run->tokenizer_path[0] || f->given[FLAG_prompts],
               "--generate needs a tokenizer.json: none in %s or %s%s; give --tokenizer FILE", model_name, f->data,
               run->no_tokenizer);
        if (generates_here(run))
            generate(&run->model, f->no_kv_cache ? nullptr : &run->decoder, f, run->tokenizer);
        comm_barrier_idle(&run->comm);
    } else if (f->given[FLAG_choices]) {
        ENSURE(run->tokenizer_path[0], "--choices needs a tokenizer.json: none in %s or %s%s; give --tokenizer FILE",
               model_name, f->data, run->no_tokenizer);
        ChoiceCounts counts = choices_count(&run->model, run->tokenizer, f->choices);
        SAY("choices %s: %.0f lines | accuracy %.4f by likelihood, %.4f by likelihood per byte\n", f->choices,
            counts.num_items, counts.num_right / counts.num_items, counts.num_right_per_byte / counts.num_items);
    } else if (f->eval) {
        ENSURE(run->has_val, "--eval needs validation shards: no val_*.bin in %s; give --val", f->data);
        evaluate_and_say(run);
    } else if (f->bench) {
        tune(run, resume_path);
        bench(run, ceilings, model_name);
    } else {
        signals_begin(run->zero.h_asks);
        save_start(run);
        tune(run, resume_path);
        log_start(run, model_name);
        record_start(run, model_name);
        tokenizer_keep(run);
        train(run);
        if (run->has_val && f->sample_tokens > 0 && run->ask != Ask::END && run->num_steps > 0) say_sample(run);
    }
    run_free(run);
    *comm = run->comm;
}

#ifdef PREC_MAIN
/* The precisions in this binary, PREC of the Makefile or this one alone, each for every instruction set. */
typedef void RunAll(Flags* f, Comm* comm);
#define ISA(isa) RunAll run_all_fp32_##isa, run_all_bf16_##isa, run_all_fp16_##isa;
ISAS
#undef ISA
static const struct { const char *name, *isa; RunAll* run_all; } precisions[] = {
#if !defined(HAVE_FP32) && !defined(HAVE_BF16) && !defined(HAVE_FP16)
    {FLOATX_NAME, "native", RUN_ALL},
#endif
#ifdef HAVE_FP32
#define ISA(isa) {"fp32", #isa, run_all_fp32_##isa},
    ISAS
#undef ISA
#endif
#ifdef HAVE_BF16
#define ISA(isa) {"bf16", #isa, run_all_bf16_##isa},
    ISAS
#undef ISA
#endif
#ifdef HAVE_FP16
#define ISA(isa) {"fp16", #isa, run_all_fp16_##isa},
    ISAS
#undef ISA
#endif
};

/* The names of all precisions, or of the instruction sets of one precision. */
static const char* precisions_have(char (&have)[64], const char* isas_of = nullptr)
{
    have[0] = 0;
    const char* last = "";
    for (const auto& p : precisions) {
        const char* word = isas_of != nullptr ? p.isa : p.name;
        if (isas_of != nullptr ? strcmp(p.name, isas_of) != 0 : strcmp(word, last) == 0) continue;
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%s", have[0] ? " " : "", word);
        last = word;
    }
    return have;
}

static bool precision_is_built(const char* name)
{
    for (const auto& p : precisions) if (strcmp(p.name, name) == 0) return true;
    return false;
}

/* The first row of the precision that this machine can run, or the one that TRAIN_GPT_ISA names. */
static RunAll* precision_find(const char* name)
{
    char have[64];
    const char* asked = getenv("TRAIN_GPT_ISA");
    for (const auto& p : precisions) {
        if (strcmp(p.name, name) != 0) continue;
        if ((asked == nullptr || strcmp(p.isa, asked) == 0) && isa_runs(p.isa)) return p.run_all;
    }
    if (!precision_is_built(name))
        die_usage("-p %s is not in this binary, have %s: build it in with make PREC='%s'", name, precisions_have(have),
                  name);
    if (asked != nullptr)
        die_usage("TRAIN_GPT_ISA is %s: this binary has %s in %s; name one that this machine can run", asked,
                  precisions_have(have, name), name);
    die_usage("this machine runs none of the instruction sets of this binary, %s: build it here with make",
              precisions_have(have, name));
}

int main(int argc, char** argv)
{
    Flags flags;
    Comm comm;
    char have[64];
    die_rank = comm_launcher_rank();
    signals_start();
    flags_parse(&flags, &flag_words_of_rows, argc, argv);
    cJSON* repeated = repeat_flags(&flags);
    lr_default(&flags);
    DsConfig config;
    ds_config_read(&config, &flags);
    if (flags.print_config && die_rank == 0) ds_config_print(&config, stdout);
    ds_config_refuse(&config);
    flags_refuse(&flags);
    rates_refuse(&flags);
    if (flags.print_config) {
        if (die_rank == 0 && !precision_is_built(flags.precision))
            printf("a run is refused: -p %s is not in this binary, have %s\n", flags.precision, precisions_have(have));
        ds_config_free(&config);
        return 0;
    }
    auto run_all = precision_find(flags.precision);
    if (flags.help || flags.version || flags.report) {
        if (die_rank == 0 && flags.help) {
            flags_help(&flags, stdout);
            rates_help(stdout);
        }
        if (die_rank == 0 && flags.version) printf("train_gpt " VERSION_LINE "\n");
        if (die_rank == 0 && flags.report) environment_print(VERSION_LINE, precisions_have(have));
        return 0;
    }
    comm_init(&comm, flags.timeout);
    comm_watch(&comm, flags.timeout);
    run_all(&flags, &comm);
    comm_free(&comm);
    ds_config_free(&config);
    cJSON_Delete(repeated);
    return 0;
}
#endif
