/* plan.h: the table of every buffer of a run, made before any is allocated. Each part of the program adds its rows; the
 * plan is printed, then allocated as printed, once. Nothing else allocates device memory, and no step allocates.
 * A row without a pointer is a measured or estimated amount (the libraries' own memory). */
#pragma once
#include "kernels/common.cuh"
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif

enum class Place { DEVICE, HOST };

typedef struct PlanRow { char label[48]; Place place; size_t bytes; void** dest; } PlanRow;

typedef struct Plan { PlanRow rows[96]; int num_rows; } Plan;

static void plan_add_bytes(Plan* p, const char* label, Place place, size_t bytes, void** dest)
{
    ENSURE(p->num_rows < (int)(sizeof p->rows / sizeof p->rows[0]), "plan: more rows than %d", p->num_rows);
    PlanRow* row = &p->rows[p->num_rows++];
    *row = PlanRow{{}, place, bytes, dest};
    snprintf(row->label, sizeof row->label, "%s", label);
}

/* *dest will point to n elements on the device (or in pinned host memory), zeroed. */
template <class T> static void plan_add(Plan* p, const char* label, Place place, T** dest, size_t n)
{
    *dest = nullptr;
    plan_add_bytes(p, label, place, n * sizeof(T), (void**)dest);
}

static size_t plan_bytes(const Plan* p, Place place)
{
    size_t sum = 0;
    for (int i = 0; i < p->num_rows; i++) if (p->rows[i].place == place) sum += p->rows[i].bytes;
    return sum;
}

/* Bytes of all rows with the place and label of row i if row i is the first of them, else 0. */
static size_t plan_label_bytes(const Plan* p, int i)
{
    size_t bytes = 0;
    for (int k = p->num_rows - 1; k >= 0; k--) {
        if (p->rows[k].place != p->rows[i].place || strcmp(p->rows[k].label, p->rows[i].label) != 0) continue;
        if (k < i) return 0;
        bytes += p->rows[k].bytes;
    }
    return bytes;
}

/* Rows with the same label are printed as one line. */
static void plan_print(const Plan* p, FILE* f)
{
    for (Place place : {Place::DEVICE, Place::HOST}) {
        fprintf(f, "%s memory per rank\n", place == Place::DEVICE ? "device" : "host");
        for (int i = 0; i < p->num_rows; i++) {
            size_t bytes = plan_label_bytes(p, i);
            if (p->rows[i].place == place && bytes > 0)
                fprintf(f, "  %-32s %10.1f MiB\n", p->rows[i].label, bytes / 1048576.0);
        }
        fprintf(f, "  %-32s %10.1f MiB\n", "total", plan_bytes(p, place) / 1048576.0);
    }
}

/* Checks that allocations equal the plan, to the byte; `when` is for the message. The CPU and emulated builds count
 * allocations, the largest sum since the start. CUDA rounds each up to pages of 2 MiB and has some of its own, so there
 * plan_allocate compares with the device's free memory. */
static void plan_ensure_held(const Plan* p, const char* when)
{
#ifdef DEVICE_CUDA
    (void)p; (void)when;
#else
    size_t pinned = 0;
    for (int i = 0; i < p->num_rows; i++)
        if (p->rows[i].place == Place::HOST && p->rows[i].dest != nullptr) pinned += p->rows[i].bytes;
    ENSURE(device_peak_bytes() == plan_bytes(p, Place::DEVICE),
           "device memory: %zu bytes are allocated %s, the plan has %zu: something allocates that is not in the plan",
           device_peak_bytes(), when, plan_bytes(p, Place::DEVICE));
    ENSURE(pinned_used_bytes() == pinned,
           "pinned host memory: %zu bytes are allocated %s, the plan has %zu: something allocates that is not in it",
           pinned_used_bytes(), when, pinned);
#endif
}

/* Allocates all rows that have a pointer. A plan that is too large is refused before the first allocation. */
static void plan_allocate(Plan* p)
{
    size_t free_bytes, total_bytes, need = plan_bytes(p, Place::DEVICE);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    ENSURE(need <= free_bytes,
           "device memory: need %.1f MiB (list above), have %.1f MiB free of %.1f MiB: lower -b or -t, "
           "raise -z or the number of ranks, or take a smaller model",
           need / 1048576.0, free_bytes / 1048576.0, total_bytes / 1048576.0);
    for (int i = 0; i < p->num_rows; i++) {
        PlanRow* row = &p->rows[i];
        if (row->dest == nullptr || row->bytes == 0) continue;
        if (row->place == Place::DEVICE) {
            CUDA_CHECK(cudaMalloc(row->dest, row->bytes));
            CUDA_CHECK(cudaMemset(*row->dest, 0, row->bytes));
        } else {
            cudaError_t error = cudaMallocHost(row->dest, row->bytes);
            ENSURE(error == cudaSuccess, "host memory: %.1f MiB pinned for '%s' cannot be had of the %.1f MiB listed "
                   "above: %s: leave out --offload, raise -z or the number of ranks", row->bytes / 1048576.0,
                   row->label, plan_bytes(p, Place::HOST) / 1048576.0, cudaGetErrorString(error));
            memset(*row->dest, 0, row->bytes);
        }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    plan_ensure_held(p, "at the start");
#ifdef DEVICE_CUDA
    size_t before_bytes = free_bytes, own_bytes = 0, most_bytes = 0, page = (size_t)2 << 20;
    for (int i = 0; i < p->num_rows; i++) {
        if (p->rows[i].place != Place::DEVICE || p->rows[i].dest == nullptr) continue;
        own_bytes += p->rows[i].bytes;
        most_bytes += round_up(p->rows[i].bytes, page);
    }
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    size_t taken_bytes = before_bytes > free_bytes ? before_bytes - free_bytes : 0;
    ENSURE(taken_bytes + page * p->num_rows >= own_bytes && taken_bytes <= most_bytes + page,
           "device memory: %zu bytes were taken, the plan has %zu (%zu in whole pages): does another process use this "
           "GPU?", taken_bytes, own_bytes, most_bytes);
    if (die_rank == 0)
        printf("device  %.1f MiB are outside of the plan: CUDA, cuBLAS, NCCL and other processes\n",
               (total_bytes - free_bytes - taken_bytes) / 1048576.0);
#endif
}

static void plan_free(Plan* p)
{
    for (int i = 0; i < p->num_rows; i++) {
        PlanRow* row = &p->rows[i];
        if (row->dest == nullptr || *row->dest == nullptr) continue;
        if (row->place == Place::DEVICE) CUDA_CHECK(cudaFree(*row->dest));
        else CUDA_CHECK(cudaFreeHost(*row->dest));
        *row->dest = nullptr;
    }
    p->num_rows = 0;
}
