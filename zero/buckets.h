/* buckets.h: which units are sent together, and which buffer of the double buffer they use. Integer arithmetic only, as
 * in shard.h. A bucket is one or more neighbouring whole units, at most bucket_elems elements unless one unit alone has
 * more. Persistent units have memory of their own and never share a bucket with buffered ones. Buffered buckets use two
 * buffers in turn:
 *
 *      units      0 | 1   2 | 3   4 | 5   6 | 7          0 and 7 are persistent
 *      buckets    0 |   1   |   2   |   3   | 4
 *      buffer     - |   0   |   1   |   0   | -                                                                    */
#pragma once
#include "shard.h"

enum { NOT_BUFFERED = -1, UNIT_BUFFERS = 2 };

typedef struct Buckets {
    int num_buckets;
    int* first_unit;        // (num_buckets + 1)
    int* of_unit;           // (num_units)
    int* buffer;            // (num_buckets) 0 or 1, or NOT_BUFFERED
    size_t buffer_elems;    // of the largest buffered bucket
    int num_buffers;        // in use, at most UNIT_BUFFERS
} Buckets;

static inline Range bucket_range(const Buckets* b, const Shard* s, int bucket)
{
    Range first = s->units[b->first_unit[bucket]].range, last = s->units[b->first_unit[bucket + 1] - 1].range;
    return Range{first.first, last.first + last.count - first.first};
}

/* kept (num_units): which units are not buffered. */
static void buckets_build(Buckets* b, const Shard* s, const bool* kept, size_t bucket_elems)
{
    *b = Buckets{};
    b->first_unit = (int*)malloc_checked((s->num_units + 1) * sizeof(int));
    b->of_unit = (int*)malloc_checked(s->num_units * sizeof(int));
    b->buffer = (int*)malloc_checked(s->num_units * sizeof(int));
    size_t elems = 0;
    int num_buffered = 0;
    for (int u = 0; u < s->num_units; u++) {
        size_t count = s->units[u].range.count;
        if (u == 0 || kept[u] != kept[u - 1] || elems + count > bucket_elems) {
            b->buffer[b->num_buckets] = kept[u] ? (int)NOT_BUFFERED : num_buffered++ % UNIT_BUFFERS;
            b->first_unit[b->num_buckets++] = u;
            elems = 0;
        }
        elems += count;
        b->of_unit[u] = b->num_buckets - 1;
        if (!kept[u] && elems > b->buffer_elems) b->buffer_elems = elems;
    }
    b->first_unit[b->num_buckets] = s->num_units;
    b->num_buffers = num_buffered < UNIT_BUFFERS ? num_buffered : (int)UNIT_BUFFERS;
}

static void buckets_free(Buckets* b)
{
    free(b->first_unit);
    free(b->of_unit);
    free(b->buffer);
    *b = Buckets{};
}

static inline bool bucket_is_buffered(const Buckets* b, int bucket)
{
    return bucket >= 0 && bucket < b->num_buckets && b->buffer[bucket] != NOT_BUFFERED;
}
static inline bool unit_is_buffered(const Buckets* b, int unit) { return bucket_is_buffered(b, b->of_unit[unit]); }

/* Offset of `unit` in its buffer. */
static inline size_t unit_buffer_offset(const Buckets* b, const Shard* s, int unit)
{
    return s->units[unit].range.first - s->units[b->first_unit[b->of_unit[unit]]].range.first;
}
