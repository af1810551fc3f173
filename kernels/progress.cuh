/* progress.cuh: how far a stream has come, where a thread that may not make a CUDA call can see it (watchdog.h).
 *   progress_mark  word = value, once all that the stream was given before is done
 * shapes  word, in pinned host memory, which a device writes as it writes its own
 * writes  word =
 * needs   one stream to a word
 * exact   one thread
 * cost    8 bytes: a launch */
#pragma once
#include "common.cuh"

#ifndef DEVICE_CPU
static __global__ void progress_kernel(unsigned long long* word, unsigned long long value) { *word = value; }
#endif

static void progress_mark(unsigned long long* word, unsigned long long value, cudaStream_t stream)
{
    ON_CPU(*word = value);
#ifndef DEVICE_CPU
    LAUNCH(progress_kernel, 1, 1, 0, stream, word, value);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

static void progress_test(OpRun* run)
{
    const unsigned long long before[3] = {5, 6, 7};
    unsigned long long* words = (unsigned long long*)op_bytes(run, "words", OpKind::INOUT, before, sizeof before);
    OP_RUN(run, 8, 0, progress_mark(words + 1, 1ull << 40, 0));
    const unsigned long long* ours = (const unsigned long long*)op_result(run, "words");
    for (int i = 0; i < 3; i++) op_check_value(run, "word", (double)ours[i], i == 1 ? 0x1p40 : (double)before[i], 0.0);
}

static const OpTest progress_tests[] = {{"progress_mark", progress_test, {1}, OpWhen::ALWAYS}};

#endif
