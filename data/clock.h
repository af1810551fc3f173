/* clock.h: seconds of a clock that only goes forward; its zero means nothing. */
#pragma once
#include <ctime>

static inline double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
