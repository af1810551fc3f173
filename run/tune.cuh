/* tune.cuh: --tune: cuBLASLt's first choice of algorithm for a GEMM is a heuristic. Before the first step an extra
 * micro-step, whose gradients are discarded, runs every GEMM of the run; each is then timed with up to
 * MATMUL_MAX_CHOICES algorithms, on its operands and workspace of a step, and the fastest is used from then on.
 * The algorithm changes the order of sums and so the bits: rank 0 chooses for all ranks, and choices are stored
 *   1. in run.json, key "products"; a run that is resumed or repeated takes them, with --tune or without
 *   2. in the cache, products.json in $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt
 * Both have an array of lines, one per GEMM, which are valid only for the same GPU, driver, library and shape:
 *   SUM GPU DRIVER CUBLASLT TYPE m n k transpose_a transpose_b d_is_float epilogue alignment ALGORITHM FIRST_US US
 * SUM is FNV-1a of the rest of the line; SUM and ALGORITHM (cuBLASLt's 64 bytes) are hexadecimal. */
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
    double first_us, us;                                     // of all GEMMs, once each
} Tuner;

// ----------------------------------------------------------------------------------------------------------- lines
static void tune_key(const Run* run, const MatmulPlan* plan, char (&key)[512])
{
    const MatmulShape* s = &plan->shape;
    int driver;
    char card[256];
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    snprintf(card, sizeof card, "%s", run->device.name);
    for (char* c = card; *c != 0; c++) if (*c == ' ') *c = '_';
    snprintf(key, sizeof key, "%s %d %zu %s %d %d %d %d %d %d %d %d ", card, driver, cublasLtGetVersion(), FLOATX_NAME,
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

static cJSON* tune_line(const char* key, const cublasLtMatmulAlgo_t* algo, double first_us, double us)
{
    char text[1024], line[1100];
    int n = snprintf(text, sizeof text, "%s", key);
    for (size_t i = 0; i < sizeof *algo; i++) n += snprintf(text + n, sizeof text - n, "%02x", ((uint8_t*)algo)[i]);
    snprintf(text + n, sizeof text - n, " %.3f %.3f", first_us, us);
    snprintf(line, sizeof line, "%016llx %s", (unsigned long long)fnv1a64(text, strlen(text)), text);
    return json_added(cJSON_CreateString(line), "products");
}

/* The choice in a line, if cuBLASLt still takes it. */
static bool tune_line_use(Tuner* t, MatmulPlan* plan, const cJSON* line, const char* key)
{
    cublasLtMatmulAlgo_t algo;
    double first_us, us;
    const char* hex = line->valuestring + TUNE_SUM_CHARS + strlen(key);
    for (size_t i = 0; i < sizeof algo; i++)
        if (sscanf(hex + 2 * i, "%2hhx", (uint8_t*)&algo + i) != 1) return false;
    if (sscanf(hex + 2 * sizeof algo, "%lf %lf", &first_us, &us) != 2) return false;
    if (!matmul_choice_works(plan, &algo)) return false;
    plan->algo = algo;
    t->first_us += first_us;
    t->us += us;
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
/* A micro-step whose gradients are discarded: it makes the plan of every GEMM, with its operands. The next
 * zero_step_begin clears its sums. */
static void tune_micro(Run* run)
{
    Zero* z = &run->zero;
    for (int i = 0; i < matmul_state.num_plans; i++) matmul_state.plans[i].d_data = nullptr;   // of earlier calls
    zero_step_begin(z);
    model_train_micro(&run->model, run->B, run->T, 1e-6f, 0, 1);
    stream_wait(z->compute, z->reduce, z->edge, "gradients are still being sent");
    for (int i = 0; z->muon != nullptr && i < z->muon->num_tensors; i++) {
        bool whole = z->stage == 0 || z->muon->group->num_ranks == 1;
        const Tensor* t = &z->shard->tensors[z->muon->tensors[i]];
        muon_tensor(z, t, whole ? muon_grad(z, t, t->first) : z->muon->whole);
    }
}

/* Microseconds of a GEMM with one algorithm: the fastest of some rounds. */
static double tune_time(MatmulPlan* plan, const cublasLtMatmulAlgo_t* algo, cudaStream_t stream)
{
    cudaEvent_t begin, end;
    float best_ms = INFINITY, ms;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    CUBLAS_CHECK(matmul_plan_run(plan, algo, stream));
    for (int round = 0; round < TUNE_ROUNDS; round++) {
        CUDA_CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < TUNE_REPEATS; i++) CUBLAS_CHECK(matmul_plan_run(plan, algo, stream));
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        best_ms = fminf(best_ms, ms);
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return best_ms * 1e3 / TUNE_REPEATS;
}

static cJSON* tune_measure(Tuner* t, MatmulPlan* plan, const char* key)
{
    MatmulChoices choices;
    matmul_choices(plan, &choices, MATMUL_MAX_CHOICES);
    double first_us = 0, best_us = INFINITY;
    for (int i = 0; i < choices.count; i++) {
        double us = tune_time(plan, &choices.results[i].algo, t->run->zero.compute);
        if (i == 0) first_us = us;
        if (us >= best_us) continue;
        best_us = us;
        plan->algo = choices.results[i].algo;
    }
    t->first_us += first_us;
    t->us += best_us;
    return tune_line(key, &plan->algo, first_us, best_us);
}

// -------------------------------------------------------------------------------------------------------- the choice
/* On rank 0. Returns the line of the algorithm that is used; null if none is recorded and --tune is off. */
static cJSON* tune_choose(Tuner* t, MatmulPlan* plan)
{
    char key[512];
    tune_key(t->run, plan, key);
    cublasLtMatmulAlgo_t first = plan->algo;
    cJSON *recorded = tune_line_find(t->record, key), *cached = tune_line_find(t->cache, key), *line = nullptr;
    if (recorded != nullptr && tune_line_use(t, plan, recorded, key)) {
        t->num_recorded++;
        line = cJSON_Duplicate(recorded, true);
    } else if (t->run->flags->tune && cached != nullptr && tune_line_use(t, plan, cached, key)) {
        t->num_cached++;
        line = cJSON_Duplicate(cached, true);
    } else if (t->run->flags->tune) {
        t->num_measured++;
        line = tune_measure(t, plan, key);
        if (cached != nullptr) cJSON_Delete(cJSON_DetachItemViaPointer(t->cache, cached));
        cJSON_AddItemToArray(t->cache, cJSON_Duplicate(line, true));
    }
    t->num_others += memcmp(&first, &plan->algo, sizeof first) != 0;
    return line;
}

static void tune_rank_0(Tuner* t, const char* resume_path)
{
    Run* run = t->run;
    run->products = json_added(cJSON_CreateArray(), "products");
    for (int i = 0; i < matmul_state.num_plans; i++) {
        MatmulPlan* plan = &matmul_state.plans[i];
        cJSON* line = plan->exists && plan->d_data != nullptr ? tune_choose(t, plan) : nullptr;
        if (line != nullptr) cJSON_AddItemToArray(run->products, line);
    }
    tune_cache_write(t);
    SAY("tune    %d GEMMs: %d measured, %d from %s, %d as recorded", t->num_measured + t->num_cached +
        t->num_recorded, t->num_measured, t->num_cached, t->cache_path[0] ? t->cache_path : "no cache",
        t->num_recorded);
    SAY(" | for %d another algorithm than cuBLASLt's first, which gives other bits | %.0f us instead of %.0f in all\n",
        t->num_others, t->us, t->first_us);
    if (t->record != nullptr && t->num_recorded == 0)
        SAY("        %s is of another GPU, driver or library: other bits than %s had\n", t->record_path,
            resume_path[0] ? "before" : "the run");
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
        const int n = matmul_state.num_plans;
        cublasLtMatmulAlgo_t* algos = (cublasLtMatmulAlgo_t*)malloc_checked(n * sizeof *algos);
        uint64_t hash = fnv1a64("", 0);
        for (int i = 0; i < n; i++) {
            algos[i] = matmul_state.plans[i].algo;
            hash = fnv1a64(&matmul_state.plans[i].shape, sizeof(MatmulShape), hash);
        }
        comm_ensure_same(c, hash, "the shapes of its GEMMs");
        comm_broadcast_host(c, algos, n * sizeof *algos);
        comm_idle(c, false);
        for (int i = 0; i < n; i++) matmul_state.plans[i].algo = algos[i];
        free(algos);
    }
    cJSON_Delete(t->cache);
    cJSON_Delete(t->record);
}
#endif
