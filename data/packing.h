/* packing.h: packs documents into windows by first-fit: each into the first window that still has room.
 *
 *   size_t W = first_fit(window_of, sizes, n, T)   window_of[i] of document i, sizes[i] from 1 to T; W windows. If
 *                                                  sizes never rise it is first-fit decreasing
 *
 * The first window with room is found in a tree of maxima, in log2(n) steps. First-fit decreasing needs at most 11/9 of
 * the least possible number of windows, and one (Johnson 1973; the constant: Dosa 2007). */
#pragma once
#include <cstdint>
#include "error.h"

static inline size_t first_fit(uint32_t* window_of, const uint32_t* sizes, size_t n, uint32_t T)
{
    size_t leaves = 1, num_windows = 0;
    while (leaves < n) leaves *= 2;
    uint32_t* room = (uint32_t*)malloc_checked(2 * leaves * sizeof *room);     // node i has the children 2i and 2i + 1
    for (size_t i = 1; i < 2 * leaves; i++) room[i] = T;
    for (size_t i = 0; i < n; i++) {
        assert(sizes[i] >= 1 && sizes[i] <= T);
        size_t node = 1;
        while (node < leaves) node = 2 * node + (room[2 * node] < sizes[i]);
        const size_t window = node - leaves;
        if (window + 1 > num_windows) num_windows = window + 1;
        window_of[i] = (uint32_t)window;
        room[node] -= sizes[i];
        for (node /= 2; node >= 1; node /= 2)
            room[node] = room[2 * node] > room[2 * node + 1] ? room[2 * node] : room[2 * node + 1];
    }
    free(room);
    return num_windows;
}
