/* evaluate.cuh: the loss of the validation set, and the sample of text that a run generates at its end. */
#pragma once
#include "train_step.cuh"

typedef struct { double loss; double num_tokens; bool ended; } EvalResult;   // ended: early, by a signal

/* Mean loss per token of the windows first .. end - 1 of the validation set, or of --eval-batches of them. Ranks
 * without data run empty batches. A signal to end the run ends the validation early. */
static EvalResult evaluate_windows(Run* run, size_t first, size_t end)
{
    Loader* val = run->val;
    Zero* z = &run->zero;
    size_t per_batch = (size_t)run->B * run->dp, num_batches = ceil_div(end - first, per_batch);
    if (run->flags->eval_batches > 0 && (size_t)run->flags->eval_batches < num_batches)
        num_batches = run->flags->eval_batches;
    loader_seek(val, first, 0, end);
    double* sums = z->step_sums;   // not used between steps
    CUDA_CHECK(cudaMemsetAsync(sums, 0, 2 * sizeof(double), z->compute));
    for (size_t i = 0; i < num_batches; i++) {
        if (ask_outside_step(run) == Ask::END) return EvalResult{0, 0, true};      // no step follows
        cudaEvent_t copied = run->batch_copied[i % 2];
        CUDA_CHECK(cudaEventSynchronize(copied));                // the copy before the last
        load_batch(run, val, i % 2, run->T);
        CUDA_CHECK(cudaEventRecord(copied, z->compute));
        model_eval_micro(&run->model, sums, run->B, run->T);
    }
    comm_all_reduce(z->all, sums, 2, ncclFloat64, z->compute);
    double h_sums[2];
    CUDA_CHECK(cudaMemcpyAsync(h_sums, sums, sizeof h_sums, cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    zero_cache_clear(z);
    return EvalResult{h_sums[1] / h_sums[0], h_sums[0], false};
}

/* The line of one of the sets of a mixture. */
#define VALIDATION_SET_FIELDS(F) \
    F(step,         int,  "",               true, (long long)run->step, "after which the validation was done") \
    F(val_set,      text, "",               true, name, "one of the sets of a mixture, as `-d` or `-v` names it") \
    F(val_set_loss, real, "nats per token", true, r.num_tokens > 0 ? r.loss : NAN, "its mean loss")

static void say_set(Run* run, const char* name, EvalResult r)
{
    char loss[32] = "n/a";
    if (r.num_tokens > 0) snprintf(loss, sizeof loss, "%.6f", r.loss);
    SAY("val  %zu/%zu | %s | loss %s, %.0f tokens\n", run->step, run->num_steps, name, loss, r.num_tokens);
    RunLog* log = &run->log;
    if (log->f == nullptr) return;
    log_begin(log);
    VALIDATION_SET_FIELDS(LOG_FIELD)
    log_end(log);
}

/* Of the whole validation set; of a mixture the loss of each set is printed, and the mean is of the tokens of all. */
static EvalResult evaluate(Run* run)
{
    const TokenSet* set = &run->val_set;
    const size_t* source_window = run->val->source_window;
    if (set->num_sources == 1) return evaluate_windows(run, 0, run->val->num_windows);
    double loss = 0, num_tokens = 0;
    for (size_t s = 0; s < set->num_sources; s++) {
        const EvalResult r = evaluate_windows(run, source_window[s], source_window[s + 1]);
        if (r.ended) return r;
        say_set(run, set->sources[s].name, r);
        loss += r.num_tokens > 0 ? r.loss * r.num_tokens : 0;
        num_tokens += r.num_tokens;
    }
    return EvalResult{loss / num_tokens, num_tokens, false};
}

/* The line of a validation: see data/run_log.h. */
#define VALIDATION_FIELDS(F) \
    F(step,          int,  "",               true, (long long)run->step, "after which it was done") \
    F(val_loss,      real, "nats per token", true, r.loss, "mean loss of the validation set") \
    F(bits_per_byte, real, "bits per byte",  bits > 0, bits, "the same loss per byte of text, where the shards have its length") \
    F(val_tokens,    int,  "tokens",         true, (long long)r.num_tokens, "that it is the mean of")

/* Have --patience validations in a row brought no lower loss? */
static bool run_out_of_patience(const Run* run)
{
    return run->flags->patience > 0 && run->best.num_since >= (size_t)run->flags->patience;
}

/* The lines at the end of a run. */
static void say_best(const Run* run)
{
    const Flags* f = run->flags;
    if (run_out_of_patience(run) && run->step < run->num_steps)
        SAY("stops   after step %zu: %zu validations without a lower loss (--patience)\n", run->step,
            run->best.num_since);
    if ((!f->keep_best && f->patience == 0) || !std::isfinite(run->best.loss)) return;
    SAY("best    validation loss %.6f after step %zu", run->best.loss, run->best.step);
    if (f->keep_best && run->best.step > 0) SAY(": %s/step_%08zu", f->out, run->best.step);
    SAY("\n");
}

static void evaluate_and_say(Run* run)
{
    if (!run->has_val) return;
    EvalResult r = evaluate(run);
    run->val_due = r.ended;
    if (run->val_due) return;
    if (r.num_tokens == 0) {
        ENSURE(!run->flags->eval, "--eval: no token counts in the windows of -t %d that --eval-batches leaves", run->T);
        SAY("val  %zu/%zu | loss n/a: no token counts in its windows\n", run->step, run->num_steps);
        return;
    }
    run->best.num_since++;
    if (r.loss < run->best.loss) run->best = Best{r.loss, run->step, 0};
    double bits = 0;
    if (run->val_set.text_bytes > 0)
        bits = r.loss / M_LN2 * (double)run->val_set.num_toks / (double)run->val_set.text_bytes;
    if (run->flags->eval) SAY("val | ");
    else SAY("val  %zu/%zu | ", run->step, run->num_steps);
    SAY("loss %.6f | perplexity %.3f per token, %.0f tokens", r.loss,
        exp(r.loss), r.num_tokens);
    if (bits > 0) SAY(" | %.4f bits per byte", bits);
    if (run->val_set.num_words > 0)
        SAY(" | perplexity %.3f per word",
            exp(r.loss * (double)run->val_set.num_toks / (double)run->val_set.num_words));
    if (run->flags->eval_stride > 0) SAY(" | windows of %d every %lld", run->T, (long long)run->flags->eval_stride);
    SAY("\n");
    ENSURE(!run->flags->eval || std::isfinite(r.loss), "--eval: the loss is %g: weights or activations are not finite; "
           "check the weights, or take -p fp32", r.loss);
    RunLog* log = &run->log;
    if (log->f == nullptr) return;
    log_begin(log);
    VALIDATION_FIELDS(LOG_FIELD)
    log_end(log);
}

#define SAMPLE_FIELDS(F) \
    F(step,   int,  "", true, (long long)run->step, "after which it was generated") \
    F(sample, text, "", true, valid, "the model's continuation of the first validation text, at the end of a run")

/* At the end of a run, if there is a tokenizer that is supported: continues the beginning of the validation text. Rank
 * 0 prints it; the other ranks wait, or at stage 3 compute too, and so does the first replica of --tp. */
static void say_sample(Run* run)
{
    const bool fits = run->T % run->flags->tp == 0;       // each token's rows are shared out
    if (generates_here(run) && run->tokenizer != nullptr && fits) {
        int num_ids = run->T < 16 ? run->T : 16;   // of the first validation window, which is rank 0's
        loader_seek(run->val, 0);
        loader_next(run->val, run->h_tokens, run->h_targets);
        if (run->setting.stage == 3) comm_broadcast_host(&run->comm, run->h_tokens, num_ids * sizeof(int));
        spans_documents(&run->model.spans, &run->model.config, nullptr, 1, run->T, run->zero.compute);
        SAY("sample  after the first %d tokens of the validation text:\n", num_ids);
        JsonText heard = {};
        generate_sample(&run->model, run->flags, run->tokenizer, run->h_tokens, num_ids, &heard);
        if (heard.text != nullptr) {
            char* valid = text_as_utf8(heard.text, heard.length);
            RunLog* log = &run->log;
            log_begin(log);
            SAMPLE_FIELDS(LOG_FIELD)
            log_end(log);
            free(valid);
        }
        json_text_free(&heard);
    }
    comm_barrier_idle(&run->comm);
}
