/* test_shard.cpp: who owns which element, for every number of ranks from 1 to 64; and which collective the watchdog
 * takes for the oldest. No GPU, no MPI.
 * For random tables of tensors: the slices of a unit tile it; the parts of a tensor in the slices tile the tensor, in
 * order; packed slices of different units do not overlap and fill num_elems / R; logical_first depends neither on R nor
 * on which tensors are stored in fp32; those are all in unit 0. */
#include "zero/shard.h"
#include "zero/watchdog.h"

static int num_wrong;   // of the number of ranks being tried

static void check(bool ok, const char* what, int R)
{
    if (ok) return;
    num_wrong++;
    printf("FAILED %s, R = %d\n", what, R);
}

static uint64_t random_state = 1;
static size_t random_below(size_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (size_t)(random_state >> 33) % n;
}

static Tensor* random_table(int num_tensors, bool has_fp32)
{
    Tensor* tensors = (Tensor*)malloc_checked(num_tensors * sizeof(Tensor));
    int unit = 0;
    for (int t = 0; t < num_tensors; t++) {
        if (t > 0 && random_below(3) == 0) unit++;
        tensors[t] = Tensor{};
        snprintf(tensors[t].name, sizeof tensors[t].name, "t%d", t);
        tensors[t].num_dims = 1 + (int)random_below(2);
        tensors[t].shape[0] = 1 + random_below(300);
        tensors[t].shape[1] = tensors[t].num_dims == 2 ? 1 + random_below(70) : 1;
        tensors[t].padded_rows = tensors[t].shape[0] + random_below(64);
        tensors[t].unit = unit;
        tensors[t].fp32 = has_fp32 && random_below(4) == 0;
        tensors[t].joined = t > 0 && tensors[t].fp32 == tensors[t - 1].fp32 && tensors[t - 1].unit == unit &&
                            random_below(3) == 0;
    }
    return tensors;
}

static void check_tensor(const Shard* s, const Tensor* t, int R)
{
    size_t next = t->first;
    for (int r = 0; r < R; r++) {
        Range part = tensor_part(t, shard_slice(s, t->unit, r));
        if (part.count == 0) continue;
        check(part.first == next, "parts of a tensor follow one another", R);
        next = part.first + part.count;
    }
    check(next == t->first + tensor_elems(t), "parts of a tensor are the tensor", R);
    Range unit = s->units[t->unit].range;
    if (t->joined) check(t->first == t[-1].first + t[-1].padded_rows * t[-1].shape[1], "a joined tensor follows", R);
    else check(t->first % SHARD_ALIGN_ELEMS == 0, "a tensor is aligned", R);
    check(t->first >= unit.first && t->first + t->padded_rows * t->shape[1] <= unit.first + unit.count,
          "a tensor is in its unit", R);
}

static void check_shard(const Shard* s, int R)
{
    size_t next = 0, packed = 0, params = 0;
    for (int u = 0; u < s->num_units; u++) {
        check(s->units[u].range.first == next, "units follow one another", R);
        check(s->units[u].range.count % ((size_t)R * SHARD_ALIGN_ELEMS) == 0, "a unit divides by R", R);
        for (int r = 0; r < R; r++) {
            Range slice = shard_slice(s, u, r);
            check(slice.first == next, "slices of a unit follow one another", R);
            next = slice.first + slice.count;
        }
        check(next == s->units[u].range.first + s->units[u].range.count, "slices of a unit are the unit", R);
        check(shard_packed_first(s, u) == packed, "packed places follow one another", R);
        packed += shard_slice(s, u, 0).count;
    }
    check(next == s->num_elems && packed == s->num_elems / R, "units fill the flat space", R);
    for (int k = 0; k < s->num_tensors; k++) {      // in the caller's order
        int t = 0;
        for (int number; sscanf(s->tensors[t].name, "t%d", &number) == 1 && number != k; ) t++;
        check(s->tensors[t].logical_first == params, "logical places are those of the caller's order", R);
        params += tensor_elems(&s->tensors[t]);
    }
    for (int t = 0; t < s->num_tensors; t++) {
        const Tensor* tensor = &s->tensors[t];
        check_tensor(s, tensor, R);
        check(tensor->fp32 == unit_is_fp32(s, tensor->unit), "unit 0 is what is kept in fp32", R);
        check(tensor->fp32 || tensor->unit == tensor->home, "the others stay where they belong", R);
        if (t > 0 && s->tensors[t].unit == s->tensors[t - 1].unit)
            check(s->tensors[t].first >=
                      s->tensors[t - 1].first + s->tensors[t - 1].padded_rows * s->tensors[t - 1].shape[1],
                  "tensors do not overlap", R);
    }
    check(params == s->num_params, "num_params counts what the files hold", R);
}

/* Four collectives on two streams, then as many as the watchdog remembers and more: the oldest whose stream has not
 * come past it. */
static bool watch_finds_the_oldest(void)
{
    Watch* w = (Watch*)calloc(1, sizeof(Watch));
    unsigned long long progress[WATCH_STREAMS] = {};
    w->progress = progress;
    bool well = w != nullptr && watch_oldest(w) == nullptr;
    const Enqueued enqueued[4] = {{"first", 1, 0}, {"second", 2, 1}, {"third", 3, 0}, {"fourth", 4, 1}};
    for (const Enqueued& a : enqueued) watch_enqueued(w, a.name, a.elems, a.stream_idx);
    const struct { unsigned long long progress[2]; size_t oldest; } rows[] = {
        {{0, 0}, 1}, {{1, 0}, 2}, {{3, 0}, 2}, {{0, 4}, 1}, {{1, 2}, 3}, {{1, 4}, 3}, {{3, 2}, 4}, {{3, 4}, 0}};
    for (const auto& row : rows) {
        memcpy(progress, row.progress, sizeof row.progress);
        const Enqueued* oldest = watch_oldest(w);
        well = well && (oldest == nullptr ? 0 : oldest->elems) == row.oldest;
    }
    for (size_t i = 0; i < 2 * WATCH_ENQUEUED; i++) watch_enqueued(w, "later", i, 0);
    const Enqueued* oldest = watch_oldest(w);
    well = well && oldest != nullptr && oldest->elems == WATCH_ENQUEUED;
    w->progress = nullptr;
    well = well && watch_oldest(w) == nullptr;
    free(w);
    if (!well) printf("FAILED the watchdog names the oldest collective\n");
    return well;
}

/* One test per number of ranks, and one. */
int main(void)
{
    int num_passed = watch_finds_the_oldest(), num_failed = !num_passed;
    for (int R = 1; R <= 64; R++) {
        num_wrong = 0;
        for (int table = 0; table < 8; table++) {
            int num_tensors = 1 + (int)random_below(20);
            Shard s;
            shard_build(&s, random_table(num_tensors, table >= 2), num_tensors, R);
            check_shard(&s, R);
            shard_free(&s);
        }
        if (num_wrong == 0) num_passed++;
        else num_failed++;
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}
