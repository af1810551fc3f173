/* ramp.h: sizes that grow during a run: the global batch by whole micro-steps (--batch-ramp), and the tokens used of
 * each sequence (--seq-ramp). Both depend on the step alone, so a resumed run continues them. Memory and communication
 * volume are planned for the final size. A window of data counts as used even if only part of it is.
 * source  batch: McCandlish et al. 2018, arXiv:1812.06162; sequence: Li et al. 2021, arXiv:2108.06084 */
#pragma once
#include "data/error.h"

typedef struct Ramp { size_t from, steps; } Ramp;    // steps 0: none
static const unsigned long long MAX_RAMP_STEPS = 1ull << 40;    // times a size this is below 2^63

/* "FROM:STEPS"; FROM is a multiple of `unit`, at most `to`. */
static Ramp ramp_parse(const char* flag, const char* text, size_t unit, size_t to)
{
    if (text[0] == 0) return Ramp{0, 0};
    unsigned long long from, steps;
    int end = 0;
    if (sscanf(text, "%llu:%llu%n", &from, &steps, &end) != 2 || text[end] != 0 || strchr(text, '-') || steps == 0)
        die_usage("%s %s: have FROM:STEPS, two whole numbers, the second at least 1", flag, text);
    if (steps > MAX_RAMP_STEPS) die_usage("%s %s: the ramp takes at most %llu steps", flag, text, MAX_RAMP_STEPS);
    if (from == 0 || from % unit != 0 || from > to)
        die_usage("%s %s: %llu is not a multiple of %zu from %zu to %zu, where the ramp ends", flag, text, from, unit,
                  unit, to);
    return Ramp{(size_t)from, (size_t)steps};
}

/* The size in step `step`, counted from 0: linear, in whole units. */
static size_t ramp_size(Ramp r, size_t step, size_t unit, size_t to)
{
    return step >= r.steps ? to : r.from + (to - r.from) / unit * step / r.steps * unit;
}

/* The first step after `step`, which is within the ramp, that may have another size. */
static size_t ramp_next(Ramp r, size_t step, size_t unit, size_t to)
{
    const size_t num_units = (to - r.from) / unit, level = num_units * step / r.steps;
    return level == num_units ? r.steps : ((level + 1) * r.steps + num_units - 1) / num_units;
}
