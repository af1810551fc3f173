/* test_emu.cu: the device as kernels and the host see it: warp calls, barriers, shared memory, atomics, asynchronous
 * copies, tensor cores, streams and events, memory and its budget, cuBLASLt. On a GPU the same tests hold the emulator
 * to the real thing; in the CPU build only memory and conversions are left.
 *   ./test_emu             runs itself under several seeds, then plants mistakes, each of which must be reported
 *   ./test_emu --run       the tests once, under EMU_SEED
 *   ./test_emu --speed     nanoseconds per emulated operation */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include "kernels/common.cuh"
#ifndef DEVICE_CPU
#include <cublasLt.h>
#endif
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif

static int num_passed, num_failed;
static cudaStream_t stream;

static void report(bool ok, const char* fmt, ...)
{
    if (ok) num_passed++;
    else num_failed++;
    printf(ok ? "ok " : "FAILED ");
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    printf("\n");
}

template <class T> static T* device_new(size_t n)
{
    T* p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T> static void upload(T* device, const T* host, size_t n)
{
    CUDA_CHECK(cudaMemcpyAsync(device, host, n * sizeof(T), cudaMemcpyHostToDevice, stream));
}
template <class T> static void download(T* host, const T* device, size_t n)
{
    CUDA_CHECK(cudaMemcpyAsync(host, device, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

/* ---- conversions */

static double half_value(unsigned bits)              // by definition
{
    int exponent = (int)(bits >> 10 & 31);
    double m = (bits & 1023) / 1024.0, x = exponent ? ldexp(1 + m, exponent - 15) : ldexp(m, -14);
    return bits & 0x8000 ? -x : x;
}

static void test_conversions(void)
{
    bool half_ok = true, bf16_ok = true;
    for (unsigned bits = 0; bits < 0x7C00; bits++) {
        float x = (float)half_value(bits), above = (float)half_value(bits + 1), middle = (x + above) / 2;
        unsigned even = bits & 1 ? bits + 1 : bits;
        half_ok = half_ok && __half2float(__ushort_as_half((unsigned short)bits)) == x;
        half_ok = half_ok && __half_as_ushort(__float2half_rn(x)) == bits;
        half_ok = half_ok && __half_as_ushort(__float2half_rn(-x)) == (bits | 0x8000);
        half_ok = half_ok && __half_as_ushort(__float2half_rn(middle)) == even;
        half_ok = half_ok && __half_as_ushort(__float2half_rn(nextafterf(middle, INFINITY))) == bits + 1;
        half_ok = half_ok && __half_as_ushort(__float2half_rn(nextafterf(middle, 0))) == bits;
    }
    half_ok = half_ok && __half_as_ushort(__float2half_rn(NAN)) == 0x7FFF;
    half_ok = half_ok && __half_as_ushort(__float2half_rn(1e9f)) == 0x7C00;
    for (unsigned bits = 0; bits < 0x7F7F; bits++) {
        float x = __bfloat162float(__ushort_as_bfloat16((unsigned short)bits));
        float above = __bfloat162float(__ushort_as_bfloat16((unsigned short)(bits + 1)));
        float middle = x + (above - x) / 2;
        unsigned even = bits & 1 ? bits + 1 : bits;
        bf16_ok = bf16_ok && __bfloat16_as_ushort(__float2bfloat16_rn(x)) == bits;
        bf16_ok = bf16_ok && __bfloat16_as_ushort(__float2bfloat16_rn(middle)) == even;
        bf16_ok = bf16_ok && __bfloat16_as_ushort(__float2bfloat16_rn(nextafterf(middle, INFINITY))) == bits + 1;
    }
    bf16_ok = bf16_ok && __bfloat16_as_ushort(__float2bfloat16_rn(-NAN)) == 0x7FFF;
    bf16_ok = bf16_ok && __bfloat16_as_ushort(__float2bfloat16_rn(-INFINITY)) == 0xFF80;
    report(half_ok, "fp16: every value, every tie");
    report(bf16_ok, "bf16: every value, every tie");
#if !defined(DEVICE_CUDA) && defined(__F16C__)
    bool same = true;
    for (uint64_t u = 0; u < 1ull << 32; u += 4099) {
        uint32_t word = (uint32_t)u;
        float f;
        memcpy(&f, &word, 4);
        same = same && (f != f || fp16_bits_from_float(f) == (unsigned short)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
    }
    report(same, "fp16: F16C and integer arithmetic agree");
#endif
}

/* ---- memory, in all builds */

static void test_memory(void)
{
    float *device = device_new<float>(1000), *pinned, host[1000];
    CUDA_CHECK(cudaMallocHost(&pinned, 4000));
    for (int i = 0; i < 1000; i++) pinned[i] = (float)i;
    CUDA_CHECK(cudaMemcpyAsync(device, pinned, 4000, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemsetAsync(device + 10, 0, 40, stream));
    download(host, device, 1000);
    bool ok = true;
    for (int i = 0; i < 1000; i++) ok = ok && host[i] == (i >= 10 && i < 20 ? 0 : (float)i);
    report(ok, "copies and memset");
    CUDA_CHECK(cudaMemcpy(host, device, 4000, cudaMemcpyDeviceToHost));
    report(host[999] == 999, "blocking copy");
    CUDA_CHECK(cudaFreeHost(pinned));
    CUDA_CHECK(cudaFree(device));
#ifndef DEVICE_CUDA
    uint64_t before = host_sync_count();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    report(host_sync_count() == before + 2, "host synchronisations are counted");
    size_t free_bytes, total_bytes, used = device_used_bytes();
    device_set_budget(used + (10 << 20));
    char *a = device_new<char>(6 << 20), *b = nullptr;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    report(free_bytes == 4 << 20 && total_bytes == used + (10 << 20), "cudaMemGetInfo is honest");
    cudaError_t error = cudaMalloc(&b, (4 << 20) + 1);
    report(error == cudaErrorMemoryAllocation && b == nullptr, "one byte over the budget fails");
    error = cudaGetLastError();
    report(error == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess, "and is remembered once");
    error = cudaMalloc(&b, 4 << 20);
    report(error == cudaSuccess && device_used_bytes() == used + (10 << 20), "the whole budget fits");
    CUDA_CHECK(cudaFree(a));
    CUDA_CHECK(cudaFree(b));
    bool peak_stays = device_peak_bytes() >= used + (10 << 20);
    report(device_used_bytes() == used && peak_stays, "freed bytes return, the peak stays");
    device_set_budget((size_t)2 << 30);
#endif
#if defined(DEVICE_EMU) && !defined(EMU_CHECK)   // the checker does not let it be read
    float* fresh = device_new<float>(3);
    download(host, fresh, 3);
    report(host[0] != host[0] && host[2] != host[2], "fresh memory is NaN");
    CUDA_CHECK(cudaFree(fresh));
#endif
}

#ifndef DEVICE_CPU

/* ---- warps and blocks */

static __global__ void shuffle_kernel(int* out)
{
    int lane = threadIdx.x % 32, v = threadIdx.x * 3 + 1, *p = out + threadIdx.x * 8;
    p[0] = __shfl_sync(0xFFFFFFFFu, v, 5);
    p[1] = __shfl_up_sync(0xFFFFFFFFu, v, 3, 16);
    p[2] = __shfl_down_sync(0xFFFFFFFFu, v, 9, 16);
    p[3] = __shfl_xor_sync(0xFFFFFFFFu, v, 6, 8);
    if (lane < 16) p[4] = __shfl_xor_sync(0x0000FFFFu, v, 1);
    else p[4] = __shfl_xor_sync(0xFFFF0000u, v, 2);
    p[5] = (int)__ballot_sync(0xFFFFFFFFu, lane % 3 == 0);
    p[6] = __any_sync(0xFFFFFFFFu, lane == 31) + 2 * __all_sync(0xFFFFFFFFu, lane < 31);
    p[7] = __syncthreads_count(threadIdx.x % 5 == 0) + 100 * __syncthreads_or(threadIdx.x == 63) +
           1000 * __syncthreads_and(threadIdx.x != 63);
}

static void test_shuffles(void)
{
    int* device = device_new<int>(64 * 8), host[64 * 8];
    LAUNCH(shuffle_kernel, 1, 64, 0, stream, device);
    CUDA_CHECK(cudaGetLastError());
    download(host, device, 64 * 8);
    bool ok[8] = {true, true, true, true, true, true, true, true};
    for (int t = 0; t < 64; t++) {
        int lane = t % 32, warp = t - lane;
        int src[5] = {5, lane % 16 >= 3 ? lane - 3 : lane, lane % 16 + 9 < 16 ? lane + 9 : lane, lane ^ 6,
                      lane < 16 ? lane ^ 1 : lane ^ 2};
        for (int k = 0; k < 5; k++) ok[k] = ok[k] && host[8 * t + k] == (warp + src[k]) * 3 + 1;
        ok[5] = ok[5] && host[8 * t + 5] == 0x49249249;
        ok[6] = ok[6] && host[8 * t + 6] == 1;
        ok[7] = ok[7] && host[8 * t + 7] == 13 + 100;
    }
    static const char* const names[8] = {"shfl", "shfl_up width 16", "shfl_down width 16", "shfl_xor width 8",
                                         "shfl_xor partial masks", "ballot", "any, all",
                                         "syncthreads_count, _or, _and"};
    for (int k = 0; k < 8; k++) report(ok[k], "%s", names[k]);
    CUDA_CHECK(cudaFree(device));
}

static __global__ void warp_reduce_kernel(float* sums, double* double_sums, float* maxima, const float* in)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    sums[i] = warp_sum(in[i]);
    double_sums[i] = warp_sum((double)in[i]);
    maxima[i] = warp_max(in[i]);
}

static void test_warp_reduce(void)
{
    const int N = 256;
    float in[N], sums[N], maxima[N], *d_in = device_new<float>(N), *d_sums = device_new<float>(N);
    float* d_maxima = device_new<float>(N);
    double double_sums[N], *d_double_sums = device_new<double>(N);
    for (int i = 0; i < N; i++) in[i] = sinf((float)i * 1.7f) * expf(sinf((float)i));
    upload(d_in, in, N);
    LAUNCH(warp_reduce_kernel, 4, 64, 0, stream, d_sums, d_double_sums, d_maxima, d_in);
    download(sums, d_sums, N);
    download(double_sums, d_double_sums, N);
    download(maxima, d_maxima, N);
    bool ok = true;
    for (int w = 0; w < N; w += 32) {
        float v[32], next[32], largest = in[w];
        double total = 0;
        for (int i = 0; i < 32; i++) {
            v[i] = in[w + i];
            total += in[w + i];
            largest = fmaxf(largest, in[w + i]);
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            for (int i = 0; i < 32; i++) next[i] = v[i] + v[i ^ offset];
            memcpy(v, next, sizeof v);
        }
        for (int i = 0; i < 32; i++)
            ok = ok && sums[w + i] == v[i] && maxima[w + i] == largest && fabs(double_sums[w + i] - total) < 1e-13;
    }
    report(ok, "warp_sum in butterfly order, to the bit; warp_sum of doubles; warp_max");
    CUDA_CHECK(cudaFree(d_in));
    CUDA_CHECK(cudaFree(d_sums));
    CUDA_CHECK(cudaFree(d_maxima));
    CUDA_CHECK(cudaFree(d_double_sums));
}

/* Sums by block; the last block to finish adds the parts, in their order. */
template <int BLOCK>
static __global__ void last_block_kernel(float* out, float* parts, unsigned* ticket, const float* in, int n)
{
    SHARED(float, by_warp, [BLOCK / 32]);
    SHARED(unsigned, place, [1]);
    float v = 0;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += gridDim.x * BLOCK) v += in[i];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int w = 0; w < BLOCK / 32; w++) sum += by_warp[w];
        parts[blockIdx.x] = sum;
        __threadfence();
        place[0] = atomicAdd(ticket, 1u);
    }
    __syncthreads();
    if (place[0] != gridDim.x - 1 || threadIdx.x != 0) return;
    __threadfence();
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += parts[b];
    *out = sum;
}

static __global__ void atomics_kernel(int* counters, float* sum, unsigned long long* wide)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&counters[0], 1);
    atomicMax(&counters[1], i);
    atomicMin(&counters[2], -i);
    for (int old = 0, seen;; old = seen) {
        seen = atomicCAS(&counters[3], old, old + 2);
        if (seen == old) break;
    }
    atomicAdd(sum, 0.5f);
    atomicAdd(wide, 1ull << 33);
}

static void test_blocks(void)
{
    const int N = 5000;
    float *d_in = device_new<float>(N), *d_parts = device_new<float>(16), *d_out = device_new<float>(1), in[N], out;
    unsigned* d_ticket = device_new<unsigned>(1);
    for (int i = 0; i < N; i++) in[i] = (float)(i % 7);
    upload(d_in, in, N);
    CUDA_CHECK(cudaMemsetAsync(d_ticket, 0, 4, stream));
    LAUNCH((last_block_kernel<256>), 16, 256, 0, stream, d_out, d_parts, d_ticket, d_in, N);
    download(&out, d_out, 1);
    float want = 0;
    for (int i = 0; i < N; i++) want += in[i];
    report(out == want, "sum by the last block, template kernel");
    int *d_counters = device_new<int>(4), counters[4];
    unsigned long long *d_wide = device_new<unsigned long long>(1), wide;
    CUDA_CHECK(cudaMemsetAsync(d_counters, 0, 16, stream));
    CUDA_CHECK(cudaMemsetAsync(d_out, 0, 4, stream));
    CUDA_CHECK(cudaMemsetAsync(d_wide, 0, 8, stream));
    LAUNCH(atomics_kernel, 10, 100, 0, stream, d_counters, d_out, d_wide);
    download(counters, d_counters, 4);
    download(&out, d_out, 1);
    download(&wide, d_wide, 1);
    report(counters[0] == 1000 && counters[1] == 999 && counters[2] == -999 && counters[3] == 2000, "integer atomics");
    report(out == 500 && wide == 1000ull << 33, "float and 64-bit atomics");
    CUDA_CHECK(cudaFree(d_in));
    CUDA_CHECK(cudaFree(d_parts));
    CUDA_CHECK(cudaFree(d_out));
    CUDA_CHECK(cudaFree(d_ticket));
    CUDA_CHECK(cudaFree(d_counters));
    CUDA_CHECK(cudaFree(d_wide));
}

/* ---- shared memory, cp.async, 128-bit accesses: reverse each row of 64 through two stages of a pipeline */

static __global__ void reverse_rows_kernel(int* out, const int* in, int num_rows)
{
    DYN_SHARED(int, stages);                         // (2,64)
    int c = threadIdx.x;                             // 16 threads of 4 elements
    cp_async16(stages + 4 * c, in + 4 * c);
    cp_async_commit();
    for (int row = 0; row < num_rows; row++) {
        int *now = stages + 64 * (row & 1), *next = stages + 64 * (~row & 1);
        bool more = row + 1 < num_rows;
        cp_async16(next + 4 * c, in + (more ? (row + 1) * 64 + 4 * c : 0), more);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        Vec128<int> v;
        for (int i = 0; i < 4; i++) v[i] = now[63 - 4 * c - i];
        st128(out + row * 64 + 4 * c, v);
        __syncthreads();
    }
    Vec128<int> last = ld128(out + (num_rows - 1) * 64 + 4 * c);
    st128_stream(out + num_rows * 64 + 4 * c, last);
}

static void test_pipeline(void)
{
    const int ROWS = 7;
    int in[ROWS * 64], out[(ROWS + 1) * 64];
    int *d_in = device_new<int>(ROWS * 64), *d_out = device_new<int>((ROWS + 1) * 64);
    for (int i = 0; i < ROWS * 64; i++) in[i] = i * i;
    upload(d_in, in, ROWS * 64);
    LAUNCH(reverse_rows_kernel, 1, 16, 2 * 64 * sizeof(int), stream, d_out, d_in, ROWS);
    download(out, d_out, (ROWS + 1) * 64);
    bool ok = true;
    for (int i = 0; i < (ROWS + 1) * 64; i++) {
        int row = i / 64 < ROWS ? i / 64 : ROWS - 1;
        ok = ok && out[i] == in[row * 64 + 63 - i % 64];
    }
    report(ok, "cp.async in two stages, dynamic shared memory, ld128 and st128");
    CUDA_CHECK(cudaFree(d_in));
    CUDA_CHECK(cudaFree(d_out));
}

/* ---- tensor cores: one warp, d(16,8) = a(16,16) b(16,8) + d, b from rows of b through the transposing load */

template <class T> static __global__ void mma_kernel(float* d, const T* a, const T* b)
{
    SHARED(T, sa, [16][16]);
    SHARED(T, sb, [16][16]);                         // columns 8..15 are a second b
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) {
        sa[i / 16][i % 16] = a[i];
        sb[i / 16][i % 16] = b[i];
    }
    __syncwarp();
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, &sa[lane % 16][lane / 16 * 8]);
    ldmatrix_x4_trans(fb, &sb[lane % 16][lane / 16 * 8]);
    for (int n = 0; n < 2; n++) {
        uint32_t pair[2] = {fb[2 * n], fb[2 * n + 1]};
        float acc[4];
        for (int i = 0; i < 4; i++) acc[i] = d[(g + i / 2 * 8) * 16 + n * 8 + 2 * t + i % 2];
        mma_m16n8k16<T>(acc, fa, pair);
        for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 16 + n * 8 + 2 * t + i % 2] = acc[i];
    }
}

template <class T> static void test_mma(const char* name)
{
    T a[256], b[256], *d_a = device_new<T>(256), *d_b = device_new<T>(256);
    float d[256], out[256], *d_d = device_new<float>(256);
    for (int i = 0; i < 256; i++) {
        a[i] = T((float)(i % 11 - 5));
        b[i] = T((float)(i % 7 - 3) * 0.5f);
        d[i] = (float)i;
    }
    upload(d_a, a, 256);
    upload(d_b, b, 256);
    upload(d_d, d, 256);
    LAUNCH(mma_kernel<T>, 1, 32, 0, stream, d_d, d_a, d_b);
    download(out, d_d, 256);
    bool ok = true;
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            float sum = d[m * 16 + n];
            for (int k = 0; k < 16; k++) sum += (float)a[m * 16 + k] * (float)b[k * 16 + n];
            ok = ok && out[m * 16 + n] == sum;
        }
    }
    report(ok, "ldmatrix, ldmatrix.trans and mma.m16n8k16 %s", name);
    CUDA_CHECK(cudaFree(d_a));
    CUDA_CHECK(cudaFree(d_b));
    CUDA_CHECK(cudaFree(d_d));
}

/* ---- lane by lane, as the tables of the PTX manual have it (mma.m16n8k16, ldmatrix): no helper of ours in between */

static __global__ void fragments_kernel(float* d, uint16_t* loaded, uint16_t* loaded_trans, const uint16_t* a,
                                        const uint16_t* b)
{
    SHARED(uint16_t, matrices, [32][8]);             // four 8x8 matrices, one below the other
    const int lane = threadIdx.x, group = lane >> 2, in_group = lane & 3;
    uint32_t fa[4] = {}, fb[2] = {}, r[4];
    for (int i = 0; i < 8; i++) {                    // element a_i
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8, col = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        fa[i / 2] |= (uint32_t)a[row * 16 + col] << (16 * (i & 1));
    }
    for (int i = 0; i < 4; i++) {                    // element b_i
        int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0), col = group;
        fb[i / 2] |= (uint32_t)b[row * 8 + col] << (16 * (i & 1));
    }
    float acc[4] = {0, 0, 0, 0};
    mma_m16n8k16<__half>(acc, fa, fb);
    for (int i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = acc[i];
    for (int c = 0; c < 8; c++) matrices[lane][c] = (uint16_t)(lane * 8 + c);
    __syncwarp();
    ldmatrix_x4(r, matrices[lane]);
    for (int i = 0; i < 8; i++) loaded[lane * 8 + i] = (uint16_t)(r[i / 2] >> (16 * (i & 1)));
    ldmatrix_x4_trans(r, matrices[lane]);
    for (int i = 0; i < 8; i++) loaded_trans[lane * 8 + i] = (uint16_t)(r[i / 2] >> (16 * (i & 1)));
}

static void test_fragments(void)
{
    uint16_t a[256], b[128], loaded[256], loaded_trans[256], *d_a = device_new<uint16_t>(256);
    uint16_t *d_b = device_new<uint16_t>(128), *d_loaded = device_new<uint16_t>(256);
    uint16_t* d_trans = device_new<uint16_t>(256);
    float d[128], *d_d = device_new<float>(128);
    for (int i = 0; i < 256; i++) a[i] = __half_as_ushort(__float2half_rn((float)(i * 7 % 23 - 11)));
    for (int i = 0; i < 128; i++) b[i] = __half_as_ushort(__float2half_rn((float)(i * 5 % 17 - 8)));
    upload(d_a, a, 256);
    upload(d_b, b, 128);
    LAUNCH(fragments_kernel, 1, 32, 0, stream, d_d, d_loaded, d_trans, d_a, d_b);
    download(d, d_d, 128);
    download(loaded, d_loaded, 256);
    download(loaded_trans, d_trans, 256);
    bool mma_ok = true, ld_ok = true, trans_ok = true;
    for (int row = 0; row < 16; row++) {
        for (int col = 0; col < 8; col++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += (float)(((row * 16 + k) * 7 % 23 - 11) * ((k * 8 + col) * 5 % 17 - 8));
            mma_ok = mma_ok && d[row * 8 + col] == sum;
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 8; i++) {                // register i / 2 is of matrix i / 2
            int row = lane / 4, col = lane % 4 * 2 + (i & 1), matrix = i / 2 * 64;
            ld_ok = ld_ok && loaded[lane * 8 + i] == matrix + row * 8 + col;
            trans_ok = trans_ok && loaded_trans[lane * 8 + i] == matrix + col * 8 + row;
        }
    }
    report(mma_ok, "mma.m16n8k16, each lane's elements");
    report(ld_ok, "ldmatrix, each lane's elements");
    report(trans_ok, "ldmatrix.trans, each lane's elements");
    CUDA_CHECK(cudaFree(d_a));
    CUDA_CHECK(cudaFree(d_b));
    CUDA_CHECK(cudaFree(d_d));
    CUDA_CHECK(cudaFree(d_loaded));
    CUDA_CHECK(cudaFree(d_trans));
}

/* ---- launches that a GPU refuses */

static __global__ void dyn_shared_kernel(float* out, int n)
{
    DYN_SHARED(float, x);
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = (float)i;
    __syncthreads();
    if (threadIdx.x == 0) *out = x[n - 1];
}

static void test_launch_errors(void)
{
    float *d_out = device_new<float>(1), out;
    LAUNCH(dyn_shared_kernel, 1, 1025, 16, stream, d_out, 4);
    report(cudaGetLastError() == cudaErrorInvalidConfiguration, "1025 threads in a block are refused");
    LAUNCH(dyn_shared_kernel, 0, 32, 16, stream, d_out, 4);
    report(cudaGetLastError() == cudaErrorInvalidConfiguration, "an empty grid is refused");
    int size_bytes = 64 << 10, n = size_bytes / 4;
    LAUNCH(dyn_shared_kernel, 1, 32, size_bytes, stream, d_out, n);
    report(cudaGetLastError() == cudaErrorInvalidValue, "64 KiB of dynamic shared memory unasked are refused");
    CUDA_CHECK(cudaFuncSetAttribute(dyn_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size_bytes));
    LAUNCH(dyn_shared_kernel, 1, 32, size_bytes, stream, d_out, n);
    CUDA_CHECK(cudaGetLastError());
    download(&out, d_out, 1);
    report(out == (float)(n - 1), "and granted when asked for");
    CUDA_CHECK(cudaFree(d_out));
}

/* ---- streams */

static __global__ void add_kernel(float* out, const float* in, float x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] + x;
}

/* A value goes through three streams and two buffers, 20 times; wait = false leaves the events out. */
static bool relay_right(bool wait)
{
    const int N = 100, TURNS = 20;
    cudaStream_t streams[3];
    cudaEvent_t events[3];
    float *buffers[3], *pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, TURNS * N * sizeof(float)));
    for (int i = 0; i < 3; i++) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
        buffers[i] = device_new<float>(N);
        CUDA_CHECK(cudaMemsetAsync(buffers[i], 0, N * sizeof(float), streams[0]));
    }
    CUDA_CHECK(cudaEventRecord(events[0], streams[0]));
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < 3; i++) {
            int last = (i + 2) % 3;
            bool first = turn == 0 && i == 0;
            if (wait || first) CUDA_CHECK(cudaStreamWaitEvent(streams[i], events[first ? 0 : last], 0));
            LAUNCH(add_kernel, 4, 32, 0, streams[i], buffers[i], buffers[last], 1.0f, N);
            if (i == 2) CUDA_CHECK(cudaMemcpyAsync(pinned + turn * N, buffers[2], N * sizeof(float),
                                                   cudaMemcpyDeviceToHost, streams[2]));
            CUDA_CHECK(cudaEventRecord(events[i], streams[i]));
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(streams[2]));
    bool ok = true;
    for (int i = 0; i < TURNS * N; i++) ok = ok && pinned[i] == 3.0f * (float)(i / N + 1);
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 3; i++) {
        CUDA_CHECK(cudaFree(buffers[i]));
        CUDA_CHECK(cudaEventDestroy(events[i]));
        CUDA_CHECK(cudaStreamDestroy(streams[i]));
    }
    CUDA_CHECK(cudaFreeHost(pinned));
    return ok;
}

static void test_streams(void)
{
    report(relay_right(true), "three streams and their events");
    float *device = device_new<float>(8), *pinned, host[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    CUDA_CHECK(cudaMallocHost(&pinned, sizeof host));
    upload(device, host, 8);
    for (int i = 0; i < 8; i++) host[i] = 0;         // a pageable source may be changed once the call has returned
    CUDA_CHECK(cudaMemcpyAsync(pinned, device, sizeof host, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    report(pinned[0] == 1 && pinned[7] == 8, "a pageable source is read at the call");
    cudaStream_t blocking;
    CUDA_CHECK(cudaStreamCreate(&blocking));
    LAUNCH(add_kernel, 1, 32, 0, blocking, device, device, 1.0f, 8);
    CUDA_CHECK(cudaMemsetAsync(device, 0, 16, nullptr));   // default stream and blocking streams wait for each other
    LAUNCH(add_kernel, 1, 32, 0, blocking, device, device, 1.0f, 8);
    CUDA_CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    report(host[0] == 1 && host[7] == 10, "the default stream orders blocking streams");
    cudaEvent_t start, end;
    float ms = -1;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    cudaError_t error = cudaEventElapsedTime(&ms, start, end);
    report(error == cudaErrorInvalidResourceHandle, "no time between unrecorded events");
    cudaGetLastError();
    CUDA_CHECK(cudaEventRecord(start, stream));
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    report(ms >= 0 && cudaEventQuery(end) == cudaSuccess && cudaStreamQuery(stream) == cudaSuccess, "events and time");
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaStreamDestroy(blocking));
    CUDA_CHECK(cudaFreeHost(pinned));
    CUDA_CHECK(cudaFree(device));
}

#include "test_emu_blaslt.h"
#ifdef DEVICE_EMU
#include "test_emu_mistakes.h"
#ifdef EMU_CHECK
#include "test_emu_checks.h"
#endif
#endif
#endif

static int run_tests(void)
{
    test_conversions();
    test_memory();
#ifndef DEVICE_CPU
    test_shuffles();
    test_warp_reduce();
    test_blocks();
    test_pipeline();
    test_mma<__nv_bfloat16>("bf16");
    test_mma<__half>("fp16");
    test_fragments();
    test_launch_errors();
    test_streams();
    test_blaslt();
#ifdef EMU_CHECK
    test_counts();
#endif
#endif
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}

int main(int argc, char** argv)
{
#if defined(EMU_CHECK)
    if (argc == 1) return run_checks(argv[0]);
    if (argc == 3 && strcmp(argv[1], "--mistake") == 0) return make_checked_mistake(argv[2]);
#elif defined(DEVICE_EMU)
    if (argc == 1) return run_seeds_and_mistakes(argv[0]);
#endif
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
#ifdef DEVICE_EMU
    if (argc == 3 && strcmp(argv[1], "--mistake") == 0) return make_mistake(argv[2]);
    if (argc == 2 && strcmp(argv[1], "--speed") == 0) return print_speed();
#endif
    (void)argc;
    (void)argv;
    return run_tests();
}
