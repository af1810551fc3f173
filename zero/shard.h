/* shard.h: which rank owns which element. Integer arithmetic only: no GPU, no MPI, so that test/test_shard.cpp can try
 * every R.
 *
 * All parameters form one flat space, cut into units: tensors that are gathered and released together (the embeddings,
 * each block, the head). A unit's tensors follow one another in the layout of the HF file, each at a multiple of
 * SHARD_ALIGN_ELEMS or joined to the one before. A unit has a group of R ranks (comm.h) that share it, and is padded to
 * a multiple of R * SHARD_ALIGN_ELEMS. Rank r of the group owns slice r of the unit:
 *
 *      unit 0                                  unit 1
 *      | tensor a  | tensor b |pad|            | tensor c |  tensor d   | pad |
 *      | slice 0 | slice 1 | slice 2 |         | slice 0  | slice 1 | slice 2 |
 *
 * So each element of the parameters is owned by exactly one rank, and a sum over the slices of all ranks counts it
 * once, whatever the groups are. A rank's slices of all units are also contiguous in buffers of their own, from
 * unit.packed_first on. Padding is always 0: its gradient is never written, and it is in no norm and no file.
 *
 * Tensors stored in fp32 (--fp32-tensors), and those of another group than the rest of their unit (apart), form units
 * of their own, one for each group that has any, before all others; the units that the caller has numbered from 0
 * follow, and may be empty.
 *
 * A Tensor is a rectangle of the tensor in the file: all of it or, with tensor parallelism, some of its rows or columns
 * (tensor_cut). Of a tensor that joins several blocks (q, k and v) it is the same rectangle of each. Random numbers and
 * hashes use the index in the whole tensor (tensor_rectangle), so that they are the same however it is cut. All ranks
 * list the same tensors in the same order with the same groups. A tensor that is cut has the group of the ranks with
 * the same part, one that is not cut the group of all ranks: so each element belongs to one group.
 *
 * A tensor too large for one unit is cut into pieces: each is a Tensor with the name of the whole, some of its rows and
 * a unit of its own; they follow one another. Only the unit of the last piece has padding, so that all pieces together
 * are one matrix. */
#pragma once
#include <cstddef>
#include <cstdint>
#include "data/error.h"
#include "kernels/rectangle.h"

enum { SHARD_ALIGN_ELEMS = 64 };   // 256 bytes of fp32, 128 of bf16: any vector load is aligned

typedef struct Range { size_t first, count; } Range;   // elements

typedef struct Tensor {
    char name[64];          // as in the HF file
    int num_dims;           // 1 or 2
    size_t shape[2];        // rows and columns of this part of it, all if it is not cut; shape[1] = 1: one-dimensional
    size_t padded_rows;     // >= shape[0]: rows past shape[0] are always 0 and never leave the program
    size_t file_rows, file_cols;             // of the whole tensor, as in the HF file
    size_t file_first_row, file_first_col;   // where this part begins in the whole, or in each of its num_fused blocks
    int whole;              // index of the first part of the same tensor that this rank has; set by shard_build
    int group;              // which ranks share it: index of a group of zero_plan
    int unit;
    int home;               // the model's unit for it; tensors stored in fp32 or apart are in one in front instead
    bool fp32;              // weight, gradient and states are stored in fp32, whatever -p is
    bool apart;             // of another group than the rest of its home: in a unit with others that are
    double init_std;        // > 0: N(0, init_std); 0: every element is init_value
    double init_value;
    bool decay;             // weight decay applies by default
    bool hidden;            // a matrix between two layers: Muon makes its steps orthogonal
    bool in_out;            // rows are inputs, columns outputs; else the other way round
    int num_fused;          // blocks side by side: 3 where q, k and v are one tensor; of a vector, one after another
    float lr_factor, weight_decay;   // of its parameter group
    bool grad_overwritten;  // the first kernel with its gradient overwrites what is there: it need not be cleared
    int row;                // the model's index for it; not used in this file
    bool joined;            // directly follows the tensor before it: the two are one matrix to the model
    size_t first;           // first element in the flat space; set by shard_build
    size_t logical_first;   // elements of all tensors before it in the files: equal on all ranks, however it is cut
} Tensor;

typedef struct Unit {
    Range range;
    size_t packed_first;    // start of a rank's slice in a buffer of its slices of all units
    int first_tensor, num_tensors;
    int group, num_ranks;   // of its tensors, and how many ranks that group has
} Unit;

typedef struct Shard {
    Tensor* tensors;
    int num_tensors;
    Unit* units;
    int num_units;
    int num_front_units, num_fp32_units;   // before the model's units, and how many of those are stored in fp32
    size_t num_elems;       // of the flat space, padding included
    size_t slice_elems;     // of a rank's slices of all units
    size_t num_params;      // without padding, as in the files
} Shard;

static inline size_t tensor_elems(const Tensor* t) { return t->shape[0] * t->shape[1]; }

/* True of one piece of each tensor: of its first, or of a tensor that is not in pieces. */
static inline bool tensor_is_first_piece(const Shard* s, int t_idx) { return s->tensors[t_idx].whole == t_idx; }

/* The tensors, of one in pieces the first, in the order of the model, which neither the units nor the groups change
 * -> order (num_tensors). Returns how many. */
static inline int tensors_in_order(const Shard* s, int* order)
{
    int n = 0;
    for (int t = 0; t < s->num_tensors; t++) {
        if (!tensor_is_first_piece(s, t)) continue;
        int at = n++;
        for (; at > 0 && s->tensors[order[at - 1]].logical_first > s->tensors[t].logical_first; at--)
            order[at] = order[at - 1];
        order[at] = t;
    }
    return n;
}

/* Makes a whole tensor part `part` of num_parts equal parts: of its rows if dim is 0, of its columns if dim is 1. Of a
 * tensor that joins several blocks it takes the part of each. All ranks pass the same arguments but for `part`. */
static void tensor_cut(Tensor* t, int dim, size_t part, size_t num_parts)
{
    const size_t num_blocks = dim == t->num_dims - 1 ? t->num_fused : 1, n = t->shape[dim] / num_blocks / num_parts;
    ENSURE(n * num_parts * num_blocks == t->shape[dim], "tensor_cut: %s has %zu x %zu elements: dimension %d cannot be "
           "cut into %zu parts", t->name, t->shape[0], t->shape[1], dim, num_parts);
    t->shape[dim] = num_blocks * n;
    (dim == 0 ? t->file_first_row : t->file_first_col) = part * n;
    if (dim == 0) t->padded_rows = t->shape[0];
}

/* Where the elements of tensor t, from `flat` of the flat space on, are in the whole tensor, as in the file. */
static inline Rectangle tensor_rectangle(const Tensor* t, size_t flat)
{
    const size_t num_blocks = t->num_fused, first = t->file_first_row * t->file_cols + t->file_first_col;
    const bool is_vector = t->num_dims == 1;
    const size_t cols = (is_vector ? t->shape[0] : t->shape[1]) / num_blocks;
    const size_t stride = (is_vector ? t->file_rows : t->file_cols) / num_blocks;
    const bool in_line = cols == stride || tensor_elems(t) <= cols;
    return rectangle_from(in_line ? rectangle_in_line(first) : Rectangle{first, 0, cols, stride},
                          (ptrdiff_t)(flat - t->first));
}

/* The same, with indices that count all parameters, as in the files. */
static inline Rectangle tensor_logical(const Tensor* t, size_t flat)
{
    Rectangle place = tensor_rectangle(t, flat);
    place.first += t->logical_first;
    return place;
}

/* Moves to the front, each group's into a unit of their own, those of the tensors that are stored in fp32, or those
 * that are not but apart. *n tensors and *num_units units are there already. */
static void tensors_move(Tensor* sorted, int* n, int* num_units, const Tensor* tensors, int num_tensors, int num_groups,
                         bool fp32)
{
    for (int group = 0; group < num_groups; group++) {
        const int before = *n;
        for (int t = 0; t < num_tensors; t++) {
            if (tensors[t].fp32 != fp32 || !(fp32 || tensors[t].apart) || tensors[t].group != group) continue;
            sorted[*n] = tensors[t];
            sorted[(*n)++].unit = *num_units;
        }
        *num_units += *n > before;
    }
}

/* Moves tensors in fp32, then those apart, to the front; the others follow in order, in the model's units. */
static void tensors_part(Shard* s, int num_groups)
{
    const int num_tensors = s->num_tensors;
    Tensor *tensors = s->tensors, *sorted = (Tensor*)malloc_checked(num_tensors * sizeof(Tensor));
    int n = 0;
    tensors_move(sorted, &n, &s->num_front_units, tensors, num_tensors, num_groups, true);
    s->num_fp32_units = s->num_front_units;
    tensors_move(sorted, &n, &s->num_front_units, tensors, num_tensors, num_groups, false);
    for (int t = 0; t < num_tensors; t++) if (!tensors[t].fp32 && !tensors[t].apart) sorted[n++] = tensors[t];
    for (int t = 0; t < num_tensors; t++) {
        sorted[t].home += s->num_front_units;
        if (!sorted[t].fp32 && !sorted[t].apart) sorted[t].unit = sorted[t].home;
    }
    memcpy(tensors, sorted, num_tensors * sizeof(Tensor));
    free(sorted);
    s->num_units += s->num_front_units;
}

/* The ranks of a unit: the group of its first tensor, which the others have too. A unit without tensors has group 0. */
static void unit_set_group(Unit* unit, const Tensor* tensors, const int* group_ranks)
{
    unit->group = unit->num_tensors > 0 ? tensors[unit->first_tensor].group : 0;
    unit->num_ranks = group_ranks[unit->group];
    for (int t = unit->first_tensor; t < unit->first_tensor + unit->num_tensors; t++)
        ENSURE(tensors[t].group == unit->group, "shard_build: %s and %s are in one unit, but in groups %d and %d",
               tensors[unit->first_tensor].name, tensors[t].name, unit->group, tensors[t].group);
}

/* Is the part inside the whole? One without rows always is. */
static void tensor_check(const Tensor* t)
{
    const int last = t->num_dims - 1;
    const size_t num_blocks[2] = {last == 0 ? (size_t)t->num_fused : 1, last == 1 ? (size_t)t->num_fused : 1};
    const size_t whole[2] = {t->file_rows, t->file_cols}, first[2] = {t->file_first_row, t->file_first_col};
    for (int d = 0; d < 2; d++)
        ENSURE(t->shape[0] == 0 || (t->shape[d] % num_blocks[d] == 0 && whole[d] % num_blocks[d] == 0 &&
               first[d] + t->shape[d] / num_blocks[d] <= whole[d] / num_blocks[d]),
               "shard_build: %s: %zu x %zu elements from row %zu and column %zu on are not in %zu x %zu", t->name,
               t->shape[0], t->shape[1], t->file_first_row, t->file_first_col, t->file_rows, t->file_cols);
}

/* Lays out `tensors` (sorted by unit, units numbered from 0 without a gap) for groups of group_ranks[Tensor.group]
 * ranks. Takes over the array. */
static void shard_build(Shard* s, Tensor* tensors, int num_tensors, const int* group_ranks, int num_groups)
{
    ENSURE(num_tensors > 0, "shard_build: no tensors");
    int num_units = tensors[num_tensors - 1].unit + 1;
    *s = Shard{};
    s->tensors = tensors;
    s->num_tensors = num_tensors;
    s->num_units = num_units;
    for (int t = 0, unit = -1; t < num_tensors; t++) {
        ENSURE(tensors[t].unit == unit || tensors[t].unit == unit + 1, "shard_build: tensor %s is not in unit order",
               tensors[t].name);
        ENSURE(tensors[t].group >= 0 && tensors[t].group < num_groups, "shard_build: %s has group %d, of %d",
               tensors[t].name, tensors[t].group, num_groups);
        tensors[t].home = unit = tensors[t].unit;
        tensor_check(&tensors[t]);
        const bool again = t > 0 && strcmp(tensors[t].name, tensors[t - 1].name) == 0;
        tensors[t].logical_first = again ? tensors[t - 1].logical_first : s->num_params;
        if (!again) s->num_params += tensors[t].file_rows * tensors[t].file_cols;
    }
    tensors_part(s, num_groups);
    for (int t = 0; t < num_tensors; t++)
        tensors[t].whole = t > 0 && strcmp(tensors[t].name, tensors[t - 1].name) == 0 ? tensors[t - 1].whole : t;
    s->units = (Unit*)malloc_checked(s->num_units * sizeof(Unit));
    int t = 0;
    for (int u = 0; u < s->num_units; u++) {
        Unit* unit = &s->units[u];
        *unit = Unit{{s->num_elems, 0}, s->slice_elems, t, 0, 0, 0};
        for (; t < num_tensors && tensors[t].unit == u; t++, unit->num_tensors++) {
            size_t align = tensors[t].joined ? 1 : SHARD_ALIGN_ELEMS;
            unit->range.count = (unit->range.count + align - 1) / align * align;
            tensors[t].first = unit->range.first + unit->range.count;
            unit->range.count += tensors[t].padded_rows * tensors[t].shape[1];
        }
        unit_set_group(unit, tensors, group_ranks);
        size_t unit_align = (size_t)unit->num_ranks * SHARD_ALIGN_ELEMS;
        unit->range.count = (unit->range.count + unit_align - 1) / unit_align * unit_align;
        s->num_elems += unit->range.count;
        s->slice_elems += unit->range.count / unit->num_ranks;
    }
}

static inline bool unit_is_fp32(const Shard* s, int unit_idx) { return unit_idx < s->num_fp32_units; }

static void shard_free(Shard* s)
{
    free(s->tensors);
    free(s->units);
    *s = Shard{};
}

/* The elements of unit `unit_idx` that `rank` of its group owns, in the flat space. */
static inline Range shard_slice(const Shard* s, int unit_idx, int rank)
{
    const Unit* unit = &s->units[unit_idx];
    size_t count = unit->range.count / unit->num_ranks;
    return Range{unit->range.first + rank * count, count};
}

/* The elements of tensor t inside `range`, in the flat space, without padded rows; count 0 if none. */
static inline Range tensor_part(const Tensor* t, Range range)
{
    size_t low = t->first > range.first ? t->first : range.first;
    size_t tensor_end = t->first + tensor_elems(t), range_end = range.first + range.count;
    size_t high = tensor_end < range_end ? tensor_end : range_end;
    return Range{low, high > low ? high - low : 0};
}
