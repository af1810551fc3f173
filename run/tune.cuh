/* tune.cuh: --tune: cuBLASLt's first choice of algorithm for a GEMM is a heuristic, and whether an epilogue is fused is
 * a rule (matmul.cuh). Before the first step an extra micro-step, whose gradients are discarded, runs every GEMM of the
 * run, those with an optional epilogue both with it and without. Each is then timed with up to MATMUL_MAX_CHOICES
 * algorithms, on its operands and workspace of a step, and the fastest is used from then on. An optional epilogue is
 * fused from then on if the GEMM with it is faster than the one without it and the passes that replace it.
 * Both choices change the order of sums and so the bits: rank 0 chooses for all ranks, and choices are stored
 *   1. in run.json, key "products"; a run that is resumed or repeated takes them, with --tune or without
 *   2. in the cache, products.json in $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt
 * Both have an array of lines, one per GEMM, which are valid only for the same GPU, driver, library and shape:
 *   SUM GPU DRIVER CUBLASLT TYPE m n k transpose_a transpose_b d_is_float epilogue alignment ALGORITHM FIRST_US US
 *       EPILOGUE FUSED_US UNFUSED_US
 * SUM is FNV-1a of the rest of the line; SUM and ALGORITHM (cuBLASLt's 64 bytes) are hexadecimal. EPILOGUE is "fused",
 * "unfused" or, where it is not optional, "fixed", with times of 0. */
#pragma once
#include "run.cuh"

#ifdef DEVICE_CPU
static void tune(Run*, const char*) {}                       // --tune is refused: this build has its own GEMMs
#else

enum { TUNE_ROUNDS = 3, TUNE_REPEATS = 4, TUNE_SUM_CHARS = 17 };

typedef struct Tuner {
    Run* run;
    char cache_path[4200], record_path[4200];
    cJSON *cache, *record;                                   // arrays of lines; null: none
    int num_measured, num_cached, num_recorded, num_others;  // GEMMs; num_others: not cuBLASLt's first choice
    int num_missing;                                         // not as in the record
    double first_us, us;                                     // of all GEMMs, once each
    int num_fused, num_unfused, num_against_rule;            // optional epilogues; otherwise than by the rule
    double rule_us, chosen_us;                               // of the GEMMs with them, by the rule and as chosen
} Tuner;

/* What is chosen for a GEMM, with the times that it was chosen by. */
typedef struct TuneChoice {
    cublasLtMatmulAlgo_t algo;
    double first_us, us;
    char epilogue[8];
    double fused_us, unfused_us;                             // 0: not optional
} TuneChoice;

// ----------------------------------------------------------------------------------------------------------- lines
static void tune_key(const Run* run, const MatmulPlan* plan, char (&key)[512])
{
    const MatmulShape* s = &plan->shape;
    int driver;
    char gpu[256];
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    snprintf(gpu, sizeof gpu, "%s", run->device.name);
    for (char* c = gpu; *c != 0; c++) if (*c == ' ') *c = '_';
    snprintf(key, sizeof key, "%s %d %zu %s %d %d %d %d %d %d %d %d ", gpu, driver, cublasLtGetVersion(), FLOATX_NAME,
             s->m, s->n, s->k, s->transpose_a, s->transpose_b, s->d_is_float, s->epilogue, s->alignment_bytes);
}

static bool tune_line_is_whole(const cJSON* line)
{
    if (!cJSON_IsString(line) || strlen(line->valuestring) < TUNE_SUM_CHARS) return false;
    const char* text = line->valuestring + TUNE_SUM_CHARS;
    return strtoull(line->valuestring, nullptr, 16) == fnv1a64(text, strlen(text));
}

static cJSON* tune_line_find(const cJSON* lines, const char* key)
{
    for (cJSON* line = lines == nullptr ? nullptr : lines->child; line != nullptr; line = line->next)
        if (strncmp(line->valuestring + TUNE_SUM_CHARS, key, strlen(key)) == 0) return line;
    return nullptr;
}

static cJSON* tune_line(const char* key, const TuneChoice* choice)
{
    char text[1024], line[1100];
    int n = snprintf(text, sizeof text, "%s", key);
    for (size_t i = 0; i < sizeof choice->algo; i++)
        n += snprintf(text + n, sizeof text - n, "%02x", ((const uint8_t*)&choice->algo)[i]);
    snprintf(text + n, sizeof text - n, " %.3f %.3f %s %.3f %.3f", choice->first_us, choice->us, choice->epilogue,
             choice->fused_us, choice->unfused_us);
    snprintf(line, sizeof line, "%016llx %s", (unsigned long long)fnv1a64(text, strlen(text)), text);
    return json_added(cJSON_CreateString(line), "products");
}

static bool tune_line_parse(const cJSON* line, const char* key, TuneChoice* choice)
{
    const char* hex = line->valuestring + TUNE_SUM_CHARS + strlen(key);
    for (size_t i = 0; i < sizeof choice->algo; i++)
        if (sscanf(hex + 2 * i, "%2hhx", (uint8_t*)&choice->algo + i) != 1) return false;
    return sscanf(hex + 2 * sizeof choice->algo, "%lf %lf %7s %lf %lf", &choice->first_us, &choice->us,
                  choice->epilogue, &choice->fused_us, &choice->unfused_us) == 5;
}

/* From now on the plan does as chosen. */
static void tune_use(Tuner* t, MatmulPlan* plan, const TuneChoice* choice)
{
    t->num_others += memcmp(&plan->algo, &choice->algo, sizeof plan->algo) != 0;
    plan->algo = choice->algo;
    t->first_us += choice->first_us;
    t->us += choice->us;
    if (!matmul_is_optional(plan->shape.epilogue)) return;
    const bool by_rule = plan->fuses;
    plan->fuses = strcmp(choice->epilogue, "fused") == 0;
    (plan->fuses ? t->num_fused : t->num_unfused)++;
    t->num_against_rule += plan->fuses != by_rule;
    t->rule_us += by_rule ? choice->fused_us : choice->unfused_us;
    t->chosen_us += plan->fuses ? choice->fused_us : choice->unfused_us;
}

/* Uses a line, if this program can: cuBLASLt still takes the algorithm, and the epilogue is as optional as it was. */
static bool tune_line_use(Tuner* t, MatmulPlan* plan, const cJSON* line, const char* key)
{
    TuneChoice choice;
    if (line == nullptr || !tune_line_parse(line, key, &choice)) return false;
    if (!matmul_choice_works(plan, &choice.algo)) return false;
    const bool fused = strcmp(choice.epilogue, "fused") == 0, unfused = strcmp(choice.epilogue, "unfused") == 0;
    const bool optional = matmul_is_optional(plan->shape.epilogue);
    if (optional ? !fused && !unfused : strcmp(choice.epilogue, "fixed") != 0) return false;
    tune_use(t, plan, &choice);
    return true;
}

// ----------------------------------------------------------------------------------------------------------- files
typedef struct TuneFile { const char* path; cJSON* root; } TuneFile;

static void tune_file_read(void* file)
{
    TuneFile* f = (TuneFile*)file;
    f->root = json_parse_file(f->path);
    if (json_has(f->root, "products"))
        for (const cJSON* line = json_array(f->root, "products", f->path)->child; line != nullptr; line = line->next)
            ENSURE(tune_line_is_whole(line), "%s: a line of \"products\" is damaged", f->path);
}

/* The lines of a file; null if it has none. */
static cJSON* tune_lines_read(const char* path, bool is_cache)
{
    TuneFile file = {path, nullptr};
    char why[1024];
    if (path[0] == 0 || !file_exists(path)) return nullptr;
    if (attempt(tune_file_read, &file, why) != Outcome::WELL) {
        if (!is_cache) die("%s: the run's GEMM algorithms are lost; leave out --resume or --repeat, or remove "
                           "\"products\" there", why);
        fprintf(stderr, "train_gpt: --tune: %s: the cache is not used and will be overwritten\n", why);
        return nullptr;
    }
    cJSON* lines = cJSON_DetachItemFromObject(file.root, "products");
    cJSON_Delete(file.root);
    return lines;
}

/* Paths of the cache and of the run.json that may have this run's choices. */
static void tune_paths(Tuner* t, const char* resume_path)
{
    const Flags* f = t->run->flags;
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char parent[4100];
    if (cache != nullptr && cache[0] == '/')
        snprintf(t->cache_path, sizeof t->cache_path, "%s/train_gpt/products.json", cache);
    else if (home != nullptr && home[0] == '/')
        snprintf(t->cache_path, sizeof t->cache_path, "%s/.cache/train_gpt/products.json", home);
    snprintf(parent, sizeof parent, "%s", f->repeat[0] ? f->repeat : resume_path);
    char* slash = f->repeat[0] ? nullptr : strrchr(parent, '/');   // the run folder of a checkpoint is its parent
    if (slash != nullptr) *slash = 0;
    if (parent[0]) snprintf(t->record_path, sizeof t->record_path, "%s/run.json", slash || f->repeat[0] ? parent : ".");
}

static void tune_cache_write(const Tuner* t)
{
    char temporary[4300], folder[4200];
    if (t->cache_path[0] == 0 || t->num_measured == 0) return;
    snprintf(folder, sizeof folder, "%s", t->cache_path);
    *strrchr(folder, '/') = 0;
    folder_make(folder);
    snprintf(temporary, sizeof temporary, "%s.%d", t->cache_path, (int)getpid());   // other runs write it too
    cJSON* root = json_new_object();
    cJSON_AddItemToObject(root, "products", cJSON_Duplicate(t->cache, true));
    json_write_file(temporary, root);
    cJSON_Delete(root);
    ENSURE(TEMP_FAILURE_RETRY(rename(temporary, t->cache_path)) == 0, "%s: cannot be written: %s", t->cache_path,
           strerror(errno));
}

// ------------------------------------------------------------------------------------------------------------ times
/* A micro-step whose gradients are discarded: it makes the plan of every GEMM, with its operands, and of what replaces
 * it without its epilogue. The next step clears its sums. */
static void tune_micro(Run* run)
{
    Zero* z = &run->zero;
    for (int i = 0; i < matmul_state.num_plans; i++) matmul_state.plans[i].call = MatmulCall{};   // earlier ones
    const Fusion fusion = matmul_state.fusion;
    if (fusion == Fusion::CHOSEN) matmul_state.fusion = Fusion::BOTH;
    zero_step_begin(z);
    model_train_micro(&run->model, run->B, run->T, 1e-6f, 0, 1);
    stream_wait(z->compute, z->reduce, z->edge, "gradients are still being sent");
    for (int i = 0; z->muon != nullptr && i < z->muon->num_tensors; i++) {
        bool whole = z->stage == 0 || z->muon->group->num_ranks == 1;
        const Tensor* t = &z->shard->tensors[z->muon->tensors[i]];
        muon_tensor(z, t, whole ? muon_grad(z, t, t->first) : z->muon->whole);
    }
    matmul_state.fusion = fusion;
}

/* Microseconds of a call: the fastest of some rounds, after one to warm up. */
template <class F> static double tune_time(cudaStream_t stream, F call)
{
    cudaEvent_t begin, end;
    float best_ms = INFINITY, ms;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    call();
    for (int round = 0; round < TUNE_ROUNDS; round++) {
        CUDA_CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < TUNE_REPEATS; i++) call();
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        best_ms = fminf(best_ms, ms);
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return best_ms * 1e3 / TUNE_REPEATS;
}

/* The newest call of a plan, with its epilogue or without; the algorithms are those of the plans. */
static double tune_time_epilogue(MatmulPlan* plan, bool fuses, cudaStream_t stream)
{
    const bool before = plan->fuses;
    const MatmulCall call = plan->call;
    plan->fuses = fuses;
    const double us = tune_time(stream, [&] { matmul_lt(plan->shape, call, stream); });
    plan->fuses = before;
    return us;
}

static TuneChoice tune_measure(Tuner* t, MatmulPlan* plan)
{
    cudaStream_t stream = t->run->zero.compute;
    MatmulChoices choices;
    matmul_choices(plan, &choices, MATMUL_MAX_CHOICES);
    TuneChoice best = {plan->algo, 0, INFINITY, "fixed", 0, 0};
    for (int i = 0; i < choices.count; i++) {
        const cublasLtMatmulAlgo_t* algo = &choices.results[i].algo;
        double us = tune_time(stream, [&] { CUBLAS_CHECK(matmul_plan_run(plan, algo, stream)); });
        if (i == 0) best.first_us = us;
        if (us >= best.us) continue;
        best.us = us;
        best.algo = *algo;
    }
    if (!matmul_is_optional(plan->shape.epilogue)) return best;
    const cublasLtMatmulAlgo_t before = plan->algo;
    plan->algo = best.algo;
    best.fused_us = tune_time_epilogue(plan, true, stream);
    best.unfused_us = tune_time_epilogue(plan, false, stream);
    plan->algo = before;
    snprintf(best.epilogue, sizeof best.epilogue, best.fused_us <= best.unfused_us ? "fused" : "unfused");
    return best;
}

// -------------------------------------------------------------------------------------------------------- the choice
/* On rank 0. Returns the line that is used; null if none is recorded and --tune is off. */
static cJSON* tune_choose(Tuner* t, MatmulPlan* plan)
{
    char key[512];
    tune_key(t->run, plan, key);
    cJSON *recorded = tune_line_find(t->record, key), *cached = tune_line_find(t->cache, key);
    if (tune_line_use(t, plan, recorded, key)) {
        t->num_recorded++;
        return cJSON_Duplicate(recorded, true);
    }
    t->num_missing++;
    if (!t->run->flags->tune) return nullptr;
    if (tune_line_use(t, plan, cached, key)) {
        t->num_cached++;
        return cJSON_Duplicate(cached, true);
    }
    t->num_measured++;
    const TuneChoice choice = tune_measure(t, plan);
    tune_use(t, plan, &choice);
    cJSON* line = tune_line(key, &choice);
    if (cached != nullptr) cJSON_Delete(cJSON_DetachItemViaPointer(t->cache, cached));
    cJSON_AddItemToArray(t->cache, cJSON_Duplicate(line, true));
    return line;
}

/* The record uses an epilogue that is not used here: cuBLASLt does not have it, or the environment forbids it. */
static bool tune_lacks_epilogue(const Tuner* t, const MatmulPlan* plan)
{
    char key[512];
    TuneChoice choice;
    tune_key(t->run, plan, key);
    const cJSON* recorded = tune_line_find(t->record, key);
    return recorded != nullptr && tune_line_parse(recorded, key, &choice) && strcmp(choice.epilogue, "unfused") != 0;
}

/* GEMMs with an optional epilogue come last: they are also timed without it, by the GEMMs of the first round. */
static void tune_plans(Tuner* t)
{
    for (bool optional : {false, true}) {
        for (int i = 0; i < matmul_state.num_plans; i++) {
            MatmulPlan* plan = &matmul_state.plans[i];
            if (plan->call.d == nullptr || matmul_is_optional(plan->shape.epilogue) != optional) continue;
            if (!plan->exists) {
                t->num_missing += tune_lacks_epilogue(t, plan);
                continue;
            }
            cJSON* line = tune_choose(t, plan);
            if (line != nullptr) cJSON_AddItemToArray(t->run->products, line);
        }
    }
}

static void tune_rank_0(Tuner* t, const char* resume_path)
{
    Run* run = t->run;
    run->products = json_added(cJSON_CreateArray(), "products");
    tune_plans(t);
    tune_cache_write(t);
    SAY("tune    %d GEMMs: %d measured, %d from %s, %d as recorded", t->num_measured + t->num_cached +
        t->num_recorded, t->num_measured, t->num_cached, t->cache_path[0] ? t->cache_path : "no cache",
        t->num_recorded);
    SAY(" | for %d another algorithm than cuBLASLt's first, which gives other bits | %.0f us instead of %.0f in all\n",
        t->num_others, t->us, t->first_us);
    SAY("        optional epilogues: %d fused, %d unfused | for %d not as without --tune, which gives other bits | ",
        t->num_fused, t->num_unfused, t->num_against_rule);
    SAY("%.0f us instead of %.0f\n", t->chosen_us, t->rule_us);
    if (t->record != nullptr && t->num_missing > 0)
        SAY("        %d GEMMs are not as in %s, which is of another GPU, driver, library, shape or version of this "
            "program: other bits than %s had\n", t->num_missing, t->record_path,
            resume_path[0] ? "before" : "the run");
}

/* What rank 0 has chosen, to all. */
static void tune_share(Comm* c)
{
    typedef struct { cublasLtMatmulAlgo_t algo; bool fuses; } Choice;
    const int n = matmul_state.num_plans;
    Choice* choices = (Choice*)malloc_checked(n * sizeof *choices);
    uint64_t hash = fnv1a64("", 0);
    for (int i = 0; i < n; i++) {
        const MatmulPlan* plan = &matmul_state.plans[i];
        choices[i] = Choice{plan->algo, plan->fuses};
        hash = fnv1a64(&plan->shape, sizeof plan->shape, hash);
        hash = fnv1a64(&plan->exists, sizeof plan->exists, hash);
    }
    comm_ensure_same(c, hash, "the shapes of its GEMMs, or the epilogues that cuBLASLt has for them");
    comm_broadcast_host(c, choices, n * sizeof *choices);
    for (int i = 0; i < n; i++) {
        matmul_state.plans[i].algo = choices[i].algo;
        matmul_state.plans[i].fuses = choices[i].fuses;
    }
    free(choices);
}

/* Before the first step, after weights are loaded. resume_path: the checkpoint to resume from, or empty. */
static void tune(Run* run, const char* resume_path)
{
    Tuner tuner = {}, *t = &tuner;
    t->run = run;
    Comm* c = &run->comm;
    if (c->rank == 0) {
        tune_paths(t, resume_path);
        t->record = tune_lines_read(t->record_path, false);
        if (run->flags->tune) t->cache = tune_lines_read(t->cache_path, true);
        if (t->cache == nullptr) t->cache = json_added(cJSON_CreateArray(), "products");
    }
    int wanted = run->flags->tune || t->record != nullptr;
    comm_broadcast_host(c, &wanted, sizeof wanted);
    if (wanted) {
        tune_micro(run);
        comm_idle(c, true);
        if (c->rank == 0) tune_rank_0(t, resume_path);
        tune_share(c);
        comm_idle(c, false);
    }
    cJSON_Delete(t->cache);
    cJSON_Delete(t->record);
}
#endif
