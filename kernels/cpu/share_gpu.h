/* share_gpu.h: TRAIN_GPT_SHARE_GPU=1, for tests: the ranks of a host may take the same GPU. NCCL refuses that, so a
 * build for GPUs needs SHARE_GPU=1: kernels/cpu/nccl.cpp in its place, on MPI, through pinned memory. In the CPU and
 * emulated builds, where that is NCCL anyway, the variable makes it go the same way. */
#pragma once
#include <cstdlib>
#include <cstring>
#include "data/error.h"

static inline bool gpu_may_be_shared(void)
{
    const char* s = getenv("TRAIN_GPT_SHARE_GPU");
    if (s == nullptr || strcmp(s, "0") == 0) return false;
    ENSURE(strcmp(s, "1") == 0, "TRAIN_GPT_SHARE_GPU is \"%s\": 1 lets ranks share a GPU, 0 does not", s);
#if defined(DEVICE_CUDA) && !defined(SHARE_GPU)
    die("TRAIN_GPT_SHARE_GPU=1: NCCL refuses two ranks on one GPU; `make DEVICE=cuda SHARE_GPU=1` builds without NCCL, "
        "for tests");
#endif
    return true;
}
