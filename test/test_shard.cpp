/* test_shard.cpp: who owns which element, for every number of ranks from 1 to 64, in one group or in units with groups
 * of different sizes; and which collective the watchdog takes for the oldest. No GPU, no MPI.
 * For random tables of tensors: the slices of a unit tile it; the parts of a tensor in the slices tile the tensor, in
 * order; packed slices of different units do not overlap and fill slice_elems; logical_first depends neither on R, on
 * groups, nor on which tensors are stored in fp32; those are in units before all others, one for each group.
 * Then for random tables of which some tensors are cut by rows or columns among tp of the ranks: the slices of all
 * ranks have each element of the files once, and an element's index is that of its row and column in the whole.
 * And whether initial weights, computed in vectors, have the bits of the C library's log and cos. */
#include "zero/init.h"
#include "zero/watchdog.h"

static int num_wrong;   // of the number of ranks being tried

static void check(bool ok, const char* what, int R)
{
    if (ok || num_wrong++ > 9) return;
    printf("FAILED %s, R = %d\n", what, R);
}

static uint64_t random_state = 1;
static size_t random_below(size_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (size_t)(random_state >> 33) % n;
}

static Tensor* random_table(int num_tensors, bool has_fp32, int num_groups)
{
    Tensor* tensors = (Tensor*)malloc_checked(num_tensors * sizeof(Tensor));
    int unit = 0, group = 0;
    for (int t = 0; t < num_tensors; t++) {
        if (t > 0 && random_below(3) == 0) {
            unit++;
            group = (int)random_below(num_groups);
        }
        tensors[t] = Tensor{};
        tensors[t].group = group;
        snprintf(tensors[t].name, sizeof tensors[t].name, "t%d", t);
        tensors[t].num_dims = 1 + (int)random_below(2);
        tensors[t].shape[0] = 1 + random_below(300);
        tensors[t].shape[1] = tensors[t].num_dims == 2 ? 1 + random_below(70) : 1;
        tensors[t].file_rows = tensors[t].shape[0];
        tensors[t].file_cols = tensors[t].shape[1];
        tensors[t].num_fused = 1;
        tensors[t].padded_rows = tensors[t].shape[0] + random_below(64);
        tensors[t].unit = unit;
        tensors[t].fp32 = has_fp32 && random_below(4) == 0;
        tensors[t].apart = has_fp32 && random_below(4) == 0;
        tensors[t].joined = t > 0 && tensors[t].fp32 == tensors[t - 1].fp32 && tensors[t - 1].unit == unit &&
                            tensors[t].apart == tensors[t - 1].apart && random_below(3) == 0;
    }
    return tensors;
}

static void check_tensor(const Shard* s, const Tensor* t, int R)
{
    size_t next = t->first;
    for (int r = 0; r < s->units[t->unit].num_ranks; r++) {
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

/* Of the units in front those stored in fp32, and the others, have each a group of their own. */
static void check_front_units(const Shard* s, int R)
{
    for (int u = 1; u < s->num_front_units; u++)
        check(u == s->num_fp32_units || s->units[u - 1].group < s->units[u].group, "front units go by group", R);
}

static void check_shard(const Shard* s, const int* group_ranks, int num_groups)
{
    const int R = group_ranks[0];
    size_t next = 0, packed = 0, params = 0;
    for (int u = 0; u < s->num_units; u++) {
        const Unit* unit = &s->units[u];
        check(unit->range.first == next, "units follow one another", R);
        check(unit->num_ranks == group_ranks[unit->group], "a unit has the ranks of its group", R);
        check(unit->range.count % ((size_t)unit->num_ranks * SHARD_ALIGN_ELEMS) == 0, "a unit divides by R", R);
        for (int r = 0; r < unit->num_ranks; r++) {
            Range slice = shard_slice(s, u, r);
            check(slice.first == next, "slices of a unit follow one another", R);
            next = slice.first + slice.count;
        }
        check(next == unit->range.first + unit->range.count, "slices of a unit are the unit", R);
        check(unit->packed_first == packed, "packed places follow one another", R);
        packed += shard_slice(s, u, 0).count;
    }
    check(next == s->num_elems && packed == s->slice_elems, "units fill the flat space", R);
    if (num_groups == 1) check(packed == s->num_elems / R, "a rank owns one of R parts", R);
    check_front_units(s, R);
    for (int k = 0; k < s->num_tensors; k++) {      // in the caller's order
        int t = 0;
        for (int number; sscanf(s->tensors[t].name, "t%d", &number) == 1 && number != k; ) t++;
        check(s->tensors[t].logical_first == params, "logical places are those of the caller's order", R);
        params += tensor_elems(&s->tensors[t]);
    }
    for (int t = 0; t < s->num_tensors; t++) {
        const Tensor* tensor = &s->tensors[t];
        check_tensor(s, tensor, R);
        check(tensor->fp32 == unit_is_fp32(s, tensor->unit), "the first units are what is kept in fp32", R);
        check(tensor->group == s->units[tensor->unit].group, "a unit has the group of its tensors", R);
        check(tensor->fp32 || tensor->apart == (tensor->unit < s->num_front_units), "then comes what is apart", R);
        check(tensor->fp32 || tensor->apart || tensor->unit == tensor->home, "the others stay where they belong", R);
        if (t > 0 && s->tensors[t].unit == s->tensors[t - 1].unit)
            check(s->tensors[t].first >=
                      s->tensors[t - 1].first + s->tensors[t - 1].padded_rows * s->tensors[t - 1].shape[1],
                  "tensors do not overlap", R);
    }
    check(params == s->num_params, "num_params counts what the files hold", R);
}

enum class Cut { NONE, ROWS, COLUMNS, PADDED_ROWS };   // the last as a vocabulary: the last parts have fewer, or none
enum { MAX_TENSORS = 20 };

/* Whole tensors, and how each is cut. */
static int random_wholes(Tensor* tensors, Cut* cuts, int tp)
{
    const int num_tensors = 1 + (int)random_below(MAX_TENSORS);
    for (int i = 0, unit = 0; i < num_tensors; i++) {
        Tensor* t = &tensors[i];
        *t = Tensor{};
        cuts[i] = (Cut)random_below(4);
        t->group = cuts[i] != Cut::NONE;
        unit += i > 0 && (t->group != t[-1].group || random_below(3) == 0);
        t->unit = unit;
        snprintf(t->name, sizeof t->name, "t%d", i);
        t->num_dims = cuts[i] == Cut::COLUMNS ? 2 : 1 + (int)random_below(2);
        t->num_fused = cuts[i] != Cut::PADDED_ROWS && random_below(3) == 0 ? 3 : 1;
        const size_t rows_step = (t->num_dims == 1 ? t->num_fused : 1) * (cuts[i] == Cut::ROWS ? tp : 1);
        const size_t cols_step = t->num_fused * (cuts[i] == Cut::COLUMNS ? tp : 1);
        t->file_rows = t->shape[0] = (1 + random_below(9)) * rows_step;
        t->file_cols = t->shape[1] = t->num_dims == 1 ? 1 : (1 + random_below(7)) * cols_step;
        t->padded_rows = t->shape[0] + random_below(4);
        t->fp32 = random_below(4) == 0;
        t->joined = i > 0 && t->fp32 == t[-1].fp32 && t[-1].unit == unit && random_below(3) == 0;
    }
    return num_tensors;
}

static void cut_tensor(Tensor* t, Cut cut, size_t part, size_t num_parts)
{
    const size_t rows = (t->file_rows + num_parts - 1) / num_parts + 1;
    switch (cut) {
    case Cut::NONE: break;
    case Cut::ROWS: tensor_cut(t, 0, part, num_parts); break;
    case Cut::COLUMNS: tensor_cut(t, 1, part, num_parts); break;
    case Cut::PADDED_ROWS:
        t->padded_rows = rows;
        t->file_first_row = part * rows;
        t->shape[0] = part * rows >= t->file_rows ? 0
                      : t->file_rows - part * rows < rows ? t->file_rows - part * rows : rows;
        break;
    }
}

/* Of element (row, col) of the part, by what a part is. */
static size_t index_in_whole(const Tensor* t, size_t row, size_t col)
{
    const size_t rows = t->shape[0], cols = t->shape[1], n = t->num_fused;
    if (t->num_dims == 1) return row / (rows / n) * (t->file_rows / n) + t->file_first_row + row % (rows / n);
    const size_t file_col = col / (cols / n) * (t->file_cols / n) + t->file_first_col + col % (cols / n);
    return (t->file_first_row + row) * t->file_cols + file_col;
}

/* Counts at their place among all parameters the elements that rank t + tp * d owns. */
static void count_elements(const Shard* s, const int* group_ranks, int rank, int tp, unsigned char* counts)
{
    for (int k = 0; k < s->num_tensors; k++) {
        const Tensor* t = &s->tensors[k];
        const Range part = tensor_part(t, shard_slice(s, t->unit, t->group == 0 ? rank : rank / tp));
        const Rectangle place = tensor_logical(t, part.first);
        const size_t before = random_below(200);     // of padding, in the same launch
        if (part.count > 0)
            check(element_index(tensor_logical(t, part.first - before), before) == element_index(place, 0),
                  "the place of elements after padding", group_ranks[0]);
        for (size_t i = 0, n; i < part.count; i += n) {
            n = elements_in_row(place, i, part.count - i);
            check(n > 0 && n <= part.count - i, "elements in a row", group_ranks[0]);
            for (size_t e = i; e < i + n; e++) {
                const size_t own = part.first + e - t->first, idx = element_index(place, i) + (e - i);
                check(idx == element_index(place, e), "elements in a row follow one another", group_ranks[0]);
                check(idx == t->logical_first + index_in_whole(t, own / t->shape[1], own % t->shape[1]),
                      "an element's index is that of its row and column", group_ranks[0]);
                if (idx < s->num_params) counts[idx]++;
            }
        }
    }
}

static void check_rectangles(int tp, int dp)
{
    Tensor wholes[MAX_TENSORS];
    Cut cuts[MAX_TENSORS];
    const int group_ranks[2] = {tp * dp, dp}, num_tensors = random_wholes(wholes, cuts, tp);
    unsigned char* counts = nullptr;
    size_t num_params = 0;
    for (int t = 0; t < tp; t++) {
        Tensor* tensors = (Tensor*)malloc_checked(sizeof wholes);
        memcpy(tensors, wholes, sizeof wholes);
        for (int i = 0; i < num_tensors; i++) cut_tensor(&tensors[i], cuts[i], t, tp);
        Shard s;
        shard_build(&s, tensors, num_tensors, group_ranks, 2);
        if (t == 0) counts = (unsigned char*)calloc(num_params = s.num_params, 1);
        check(s.num_params == num_params, "all ranks know how many parameters there are", tp * dp);
        for (int d = 0; d < dp; d++) count_elements(&s, group_ranks, t + tp * d, tp, counts);
        shard_free(&s);
    }
    for (size_t i = 0; i < num_params; i++) check(counts[i] == 1, "each element has one owner", tp * dp);
    free(counts);
}

/* Four collectives on two streams, then as many as the watchdog remembers and more: the oldest whose stream has not
 * come past it. */
static bool watch_finds_the_oldest(void)
{
    Watch* w = (Watch*)calloc(1, sizeof(Watch));
    unsigned long long progress[WATCH_STREAMS] = {};
    w->progress = progress;
    bool well = w != nullptr && watch_oldest(w) == nullptr;
    const Enqueued enqueued[4] = {{"first", "", 1, 0}, {"second", "", 2, 1}, {"third", "", 3, 0}, {"fourth", "", 4, 1}};
    for (const Enqueued& a : enqueued) watch_enqueued(w, a.name, a.elems, a.stream_idx, a.group);
    const struct { unsigned long long progress[2]; size_t oldest; } rows[] = {
        {{0, 0}, 1}, {{1, 0}, 2}, {{3, 0}, 2}, {{0, 4}, 1}, {{1, 2}, 3}, {{1, 4}, 3}, {{3, 2}, 4}, {{3, 4}, 0}};
    for (const auto& row : rows) {
        memcpy(progress, row.progress, sizeof row.progress);
        const Enqueued* oldest = watch_oldest(w);
        well = well && (oldest == nullptr ? 0 : oldest->elems) == row.oldest;
    }
    for (size_t i = 0; i < 2 * WATCH_ENQUEUED; i++) watch_enqueued(w, "later", i, 0, "");
    const Enqueued* oldest = watch_oldest(w);
    well = well && oldest != nullptr && oldest->elems == WATCH_ENQUEUED;
    w->progress = nullptr;
    well = well && watch_oldest(w) == nullptr;
    free(w);
    if (!well) printf("FAILED the watchdog names the oldest collective\n");
    return well;
}

/* At the ends of u1's and u2's ranges and of the quarter turns, in all pairs, and at a million random places. */
static bool init_elements_are_those_of_libm(void)
{
    static const uint32_t ends[] = {0, 1, 2, 0x1fffffff, 0x20000000, 0x20000001, 0x3fffffff, 0x40000000, 0x40000001,
                                    0x60000000, 0x7fffffff, 0x80000000, 0xb504f332, 0xb504f333, 0xb504f334, 0xc0000000,
                                    0xe0000000, 0xfffffffe, 0xffffffff};
    const size_t num_ends = sizeof ends / sizeof ends[0];
    size_t num_off = 0;
    for (size_t first = 0; first < 1 << 20; first += INIT_BLOCK) {
        uint64_t z[INIT_BLOCK];
        float out[INIT_BLOCK];
        for (size_t i = 0; i < INIT_BLOCK; i++) {
            const bool is_end = first + i < num_ends * num_ends;
            z[i] = is_end ? (uint64_t)ends[(first + i) / num_ends] << 32 | ends[(first + i) % num_ends]
                          : mix64((first + i) * GOLDEN_GAMMA);
        }
        init_elements(out, z, INIT_BLOCK, 0.02);
        for (size_t i = 0; i < INIT_BLOCK; i++) {
            const float exact = init_element(z[i], 0.02);
            num_off += memcmp(&out[i], &exact, sizeof exact) != 0;
        }
    }
    if (num_off > 0) printf("FAILED %zu initial weights with other bits than by the C library\n", num_off);
    return num_off == 0;
}

/* One test per number of ranks, and two. */
int main(void)
{
    int num_passed = watch_finds_the_oldest() + init_elements_are_those_of_libm(), num_failed = 2 - num_passed;
    for (int R = 1; R <= 64; R++) {
        num_wrong = 0;
        for (int table = 0; table < 16; table++) {
            const int num_tensors = 1 + (int)random_below(20), num_groups = table < 8 ? 1 : 3;
            const int group_ranks[3] = {R, 1 + (int)random_below(R), 1};
            Tensor* tensors = random_table(num_tensors, table % 8 >= 2, num_groups);
            Shard s;
            shard_build(&s, tensors, num_tensors, group_ranks, num_groups);
            check_shard(&s, group_ranks, num_groups);
            shard_free(&s);
        }
        for (int tp = 1; tp <= R; tp++)
            if (R % tp == 0) check_rectangles(tp, R / tp);
        if (num_wrong == 0) num_passed++;
        else num_failed++;
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}
