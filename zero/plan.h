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

/* Of the host memory the part that is allocated as planned: pinned. */
static size_t plan_pinned_bytes(const Plan* p)
{
    size_t sum = 0;
    for (int i = 0; i < p->num_rows; i++)
        if (p->rows[i].place == Place::HOST && p->rows[i].dest != nullptr) sum += p->rows[i].bytes;
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
 * plan_say_taken compares with the device's free memory. */
static void plan_ensure_held(const Plan* p, const char* when)
{
#ifdef DEVICE_CUDA
    (void)p; (void)when;
#else
    const size_t pinned = plan_pinned_bytes(p);
    ENSURE(device_peak_bytes() == plan_bytes(p, Place::DEVICE),
           "device memory: %zu bytes are allocated %s, the plan has %zu: something allocates that is not in the plan",
           device_peak_bytes(), when, plan_bytes(p, Place::DEVICE));
    const size_t have = pinned_used_bytes() - nccl_staging_bytes();
    ENSURE(have == pinned,
           "pinned host memory: %zu bytes are allocated %s, the plan has %zu: something allocates that is not in it",
           have, when, pinned);
#endif
}

/* Zeroed by all threads: their first touch places the pages. */
static void pinned_clear(char* data, size_t size_bytes)
{
    const size_t piece_bytes = (size_t)16 << 20;
    #pragma omp parallel for schedule(static)
    for (size_t first = 0; first < size_bytes; first += piece_bytes)
        memset(data + first, 0, size_bytes - first < piece_bytes ? size_bytes - first : piece_bytes);
}

static void plan_row_allocate(const Plan* p, const PlanRow* row)
{
    if (row->dest == nullptr || row->bytes == 0) return;
    if (row->place == Place::DEVICE) {
        CUDA_CHECK(cudaMalloc(row->dest, row->bytes));
        CUDA_CHECK(cudaMemset(*row->dest, 0, row->bytes));
        return;
    }
    cudaError_t error = cudaMallocHost(row->dest, row->bytes);
    ENSURE(error == cudaSuccess, "host memory: %.1f MiB pinned for '%s' cannot be had of the %.1f MiB listed above: "
           "%s: leave out --offload, or -o where 'states being saved' is the most, or raise -z or the number of ranks",
           row->bytes / 1048576.0, row->label, plan_bytes(p, Place::HOST) / 1048576.0, cudaGetErrorString(error));
    pinned_clear((char*)*row->dest, row->bytes);
}

#ifdef DEVICE_CUDA
/* Says what the device has lost beyond the plan since free_bytes were free. That need not be ours: another process may
 * allocate meanwhile, and the driver takes device memory for the page tables of pinned memory and for code that it
 * loads at its first launch. So it is reported, from a size on that the driver does not explain, and ends nothing. */
static void plan_say_taken(const Plan* p, size_t free_before_bytes)
{
    size_t free_bytes, total_bytes, own_bytes = 0;
    const size_t page = (size_t)2 << 20, explained_bytes = ((size_t)256 << 20) + plan_bytes(p, Place::HOST) / 256;
    for (int i = 0; i < p->num_rows; i++)
        if (p->rows[i].place == Place::DEVICE && p->rows[i].dest != nullptr)
            own_bytes += round_up(p->rows[i].bytes, page);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    const size_t taken_bytes = free_before_bytes > free_bytes ? free_before_bytes - free_bytes : 0;
    if (taken_bytes > own_bytes + explained_bytes)
        fprintf(stderr, "train_gpt: rank %d: %.1f MiB of device memory were taken while the %.1f MiB of the plan were "
                "allocated: another process uses this GPU\n", die_rank, taken_bytes / 1048576.0,
                own_bytes / 1048576.0);
    if (die_rank == 0)
        printf("device  %.1f MiB are outside of the plan: CUDA, cuBLAS, NCCL and other processes\n",
               (total_bytes - free_bytes - fmin(own_bytes, taken_bytes)) / 1048576.0);
}
#endif

/* Allocates all rows that have a pointer. A plan that is too large is refused before the first allocation. */
static void plan_allocate(Plan* p)
{
    size_t free_bytes, total_bytes, need = plan_bytes(p, Place::DEVICE);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    ENSURE(need <= free_bytes,
           "device memory: need %.1f MiB (list above), have %.1f MiB free of %.1f MiB: lower -b or -t, "
           "raise -z or the number of ranks, or take a smaller model",
           need / 1048576.0, free_bytes / 1048576.0, total_bytes / 1048576.0);
    for (int i = 0; i < p->num_rows; i++) plan_row_allocate(p, &p->rows[i]);
    CUDA_CHECK(cudaDeviceSynchronize());
    plan_ensure_held(p, "at the start");
#ifdef DEVICE_CUDA
    plan_say_taken(p, free_bytes);
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
