/* gpus.h: what GPUs can do at best: a table of those whose data sheets are known, figures by compute capability for the
 * rest. To add a GPU, add a row; the order of rows does not matter.
 *   gpu_find      the row of a name, as nvidia-smi or a user writes it; null if there is none
 *   gpu_generic   a row for any other GPU, from its compute capability, multiprocessors, clock and memory
 *   gpu_of_rank   which of the GPUs that a rank sees is its own */
#pragma once
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <strings.h>

/* Compute capability (90 is 9.0), multiprocessors, clock; dense 16-bit tensor-core peak with fp32 accumulation
 * (no sparsity), fp32 peak without TF32, memory bandwidth; link, bus to the host's memory (if that is less, half of
 * this memory's bandwidth) and network adapter, in one direction; memory; what of the peak large matrix multiplications
 * reach. The last is others' measurement where docs/benchmarks.md names it, else that of the nearest relative. A link
 * is NVLink where it joins all GPUs of a host, else the bus. */
typedef struct {
    const char* name;
    int capability, num_sms;
    double clock_ghz, tensor16_tflops, fp32_tflops, memory_gbps, link_gbps, host_gbps, network_gbps, memory_gb;
    double product_share;
} GpuRow;

static const GpuRow gpu_rows[] = {
    {"GB300", 103, 148, 2.062, 2500, 80, 8000, 900, 256, 100, 288, 0.72},
    {"B300", 103, 148, 1.856, 2250, 75, 8000, 900, 128, 100, 288, 0.72},
    {"GB200", 100, 148, 2.062, 2500, 80, 8000, 900, 256, 50, 186, 0.72},
    {"B200", 100, 148, 1.856, 2250, 75, 8000, 900, 64, 50, 180, 0.72},
    {"GH200", 90, 132, 1.83, 989.4, 67, 4900, 450, 256, 50, 144, 0.75},
    {"GH200 480GB", 90, 132, 1.83, 989.4, 67, 4000, 450, 256, 50, 96, 0.75},    // 480 GB are the host's
    {"H200", 90, 132, 1.83, 989.4, 67, 4800, 450, 64, 50, 141, 0.72},
    {"H200 NVL", 90, 132, 1.545, 835.5, 60, 4800, 64, 64, 25, 141, 0.72},
    {"H100", 90, 132, 1.83, 989.4, 67, 3350, 450, 64, 50, 80, 0.72},
    {"H100 NVL", 90, 132, 1.545, 835.5, 60, 3900, 64, 64, 25, 94, 0.72},
    {"H100 PCIe", 90, 114, 1.62, 756, 51, 2000, 64, 64, 25, 80, 0.72},
    {"H20", 90, 78, 1.83, 148, 44, 4000, 450, 64, 50, 96, 0.72},
    {"A100-SXM", 80, 108, 1.41, 312, 19.5, 2039, 300, 32, 25, 80, 0.77},
    {"A100-SXM 40GB", 80, 108, 1.41, 312, 19.5, 1555, 300, 32, 25, 40, 0.77},
    {"A100", 80, 108, 1.41, 312, 19.5, 1935, 32, 32, 25, 80, 0.74},
    {"A100 40GB", 80, 108, 1.41, 312, 19.5, 1555, 32, 32, 25, 40, 0.74},
    {"A40", 86, 84, 1.74, 149.7, 37.4, 696, 32, 32, 12.5, 48, 0.8},
    {"A10", 86, 72, 1.695, 125, 31.2, 600, 32, 32, 12.5, 24, 0.7},
    {"A10G", 86, 80, 1.71, 70, 31.5, 600, 32, 32, 12.5, 24, 0.8},
    {"L40S", 89, 142, 2.49, 362, 91.6, 864, 32, 32, 12.5, 48, 0.7},
    {"L40", 89, 142, 2.49, 181, 90.5, 864, 32, 32, 12.5, 48, 0.8},
    {"L4", 89, 58, 2.04, 121, 30.3, 300, 32, 32, 12.5, 24, 0.6},
    {"RTX A6000", 86, 84, 1.8, 154.8, 38.7, 768, 32, 32, 1.25, 48, 0.8},
    {"RTX 6000 Ada", 89, 142, 2.505, 364.2, 91.1, 960, 32, 32, 1.25, 48, 0.7},
    {"RTX 3090", 86, 82, 1.695, 71, 35.6, 936, 32, 32, 1.25, 24, 0.9},
    {"RTX 3090 Ti", 86, 84, 1.86, 80, 40, 1008, 32, 32, 1.25, 24, 0.9},
    {"RTX 4080", 89, 76, 2.505, 97.5, 48.7, 717, 32, 32, 1.25, 16, 0.9},
    {"RTX 4090", 89, 128, 2.52, 165.2, 82.6, 1008, 32, 32, 1.25, 24, 0.9},
    {"RTX 5090", 120, 170, 2.407, 209.5, 104.8, 1792, 64, 64, 1.25, 32, 0.9},
    {"RTX PRO 6000", 120, 188, 2.617, 503.8, 126, 1792, 64, 64, 1.25, 96, 0.7},
};

/* The next word of a name at *at, which moves behind it: letters and digits; empty at the end. SXM4 is SXM. */
static void gpu_word(const char** at, char (&word)[32])
{
    const char* p = *at;
    while (*p && !isalnum((unsigned char)*p)) p++;
    size_t n = 0;
    for (; isalnum((unsigned char)*p); p++)
        if (n + 1 < sizeof word) word[n++] = *p;
    word[n] = 0;
    *at = p;
    if (strncasecmp(word, "SXM", 3) == 0) word[3] = 0;
}

/* Words that do not tell one GPU from another: the maker's, the socket, cooling by air, the edition for workstations,
 * the kind of memory (HBM3), its size if it is about the row's (80GB, 144G). Any other word that a row lacks (D, Ti,
 * SUPER, Laptop, MIG, Max-Q, Server, 64GB) makes another GPU. */
static bool gpu_word_is_neutral(const char* word, double memory_gb)
{
    for (const char* neutral : {"NVIDIA", "GeForce", "Tesla", "Quadro", "GPU", "Generation", "PCIe", "SXM", "AC",
                                "Blackwell", "Workstation", "Edition"})
        if (strcasecmp(word, neutral) == 0) return true;
    size_t digits = strspn(word, "0123456789");
    bool is_size = digits > 0 && (strcasecmp(word + digits, "GB") == 0 || strcasecmp(word + digits, "G") == 0);
    if (is_size) return fabs(atof(word) / memory_gb - 1) < 0.1;
    return strncasecmp(word, "HBM", 3) == 0;
}

static bool gpu_has_word(const char* name, const char* word)
{
    char other[32];
    for (gpu_word(&name, other); other[0]; gpu_word(&name, other))
        if (strcasecmp(other, word) == 0) return true;
    return false;
}

/* How many words a row has, if all are in the name and what else is there is neutral; else 0. */
static int gpu_row_matches(const GpuRow* row, const char* name)
{
    char word[32];
    int num_words = 0;
    const char* at = row->name;
    for (gpu_word(&at, word); word[0]; gpu_word(&at, word), num_words++)
        if (!gpu_has_word(name, word)) return 0;
    at = name;
    for (gpu_word(&at, word); word[0]; gpu_word(&at, word))
        if (!gpu_has_word(row->name, word) && !gpu_word_is_neutral(word, row->memory_gb)) return 0;
    return num_words;
}

/* The row that names the most of it. */
static const GpuRow* gpu_find(const char* name)
{
    const GpuRow* best = nullptr;
    int most = 0;
    for (const GpuRow& row : gpu_rows) {
        int num_words = gpu_row_matches(&row, name);
        if (num_words > most) { most = num_words; best = &row; }
    }
    return best;
}

/* Of a generation: floating-point operations in a clock and multiprocessor, 16-bit by tensor cores (GeForce accumulates
 * in fp32 at half that rate below 9.0 and from 12.0 on) and fp32, and shared memory of a multiprocessor in KiB, from
 * NVIDIA's white papers and programming guide; the bus, in one direction. */
typedef struct {
    int capability, tensor16, fp32, shared_kib;
    double host_gbps;
} GpuGeneration;

static const GpuGeneration gpu_generations[] = {
    {80, 2048, 128, 164, 32}, {86, 1024, 256, 100, 32}, {89, 1024, 256, 100, 32},
    {90, 4096, 256, 228, 64}, {100, 8192, 256, 228, 64}, {103, 8192, 256, 228, 128}, {120, 1024, 256, 100, 64},
};

/* Between and beyond them the one before. */
static const GpuGeneration* gpu_generation(int capability)
{
    const GpuGeneration* found = &gpu_generations[0];
    for (const GpuGeneration& g : gpu_generations)
        if (g.capability <= capability) found = &g;
    return found;
}

/* clock_ghz and memory_gbps are 0 where the runtime does not say: what they give is 0 then, not known. */
static GpuRow gpu_generic(const char* name, int major, int minor, int num_sms, double clock_ghz, double memory_gbps,
                          double memory_gb)
{
    const int capability = 10 * major + minor;
    const GpuGeneration* g = gpu_generation(capability);
    const bool half = gpu_has_word(name, "GeForce") && g->tensor16 == 1024;
    const double clocks = 1e-3 * num_sms * clock_ghz;       // 10^12 in a second
    return {name, capability, num_sms, clock_ghz, clocks * g->tensor16 / (half ? 2 : 1), clocks * g->fp32, memory_gbps,
            g->host_gbps, g->host_gbps, 12.5, memory_gb, 0.72};
}

/* Of `count` GPUs that the rank sees: that of its place on the host, or the only one, where a launcher shows each rank
 * its own (Slurm's --gpus-per-task, Kubernetes). -1: too few. Two ranks with the same one are found by its UUID.
 * Ranks that may share a GPU (kernels/cpu/share_gpu.h) do not ask. */
static inline int gpu_of_rank(int count, int host_rank, int host_num_ranks)
{
    if (count >= host_num_ranks) return host_rank;
    return count == 1 ? 0 : -1;
}
