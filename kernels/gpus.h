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

/* Compute capability (90 is 9.0); dense 16-bit tensor-core peak with fp32 accumulation (no sparsity), fp32 peak without
 * TF32, memory bandwidth; link, bus to the host's memory (if that is less, half of this memory's bandwidth) and network
 * adapter, in one direction; memory; what of the peak large matrix multiplications reach, and what attention by mma
 * does with long sequences and heads of 64. The last two are others' measurements where docs/benchmarks.md names them,
 * else those of the nearest relative scaled by the peak. A link is NVLink where it joins all GPUs of a host, else the
 * bus. */
typedef struct {
    const char* name;
    int capability;
    double tensor16_tflops, fp32_tflops, memory_gbps, link_gbps, host_gbps, network_gbps, memory_gb;
    double product_share, attention_tflops;
} GpuRow;

static const GpuRow gpu_rows[] = {
    {"GB200", 100, 2500, 80, 8000, 900, 256, 50, 186, 0.72, 330},
    {"B200", 100, 2250, 75, 8000, 900, 64, 50, 180, 0.72, 330},
    {"GH200", 90, 989.4, 67, 4900, 450, 256, 50, 144, 0.75, 300},
    {"GH200 480GB", 90, 989.4, 67, 4000, 450, 256, 50, 96, 0.75, 300},      // 480 GB are the host's
    {"H200", 90, 989.4, 67, 4800, 450, 64, 50, 141, 0.72, 300},
    {"H200 NVL", 90, 835.5, 60, 4800, 64, 64, 25, 141, 0.72, 250},
    {"H100", 90, 989.4, 67, 3350, 450, 64, 50, 80, 0.72, 300},
    {"H100 NVL", 90, 835.5, 60, 3900, 64, 64, 25, 94, 0.72, 250},
    {"H100 PCIe", 90, 756, 51, 2000, 64, 64, 25, 80, 0.72, 230},
    {"H20", 90, 148, 44, 4000, 450, 64, 50, 96, 0.72, 45},
    {"A100-SXM", 80, 312, 19.5, 2039, 300, 32, 25, 80, 0.77, 180},
    {"A100-SXM 40GB", 80, 312, 19.5, 1555, 300, 32, 25, 40, 0.77, 180},
    {"A100", 80, 312, 19.5, 1935, 32, 32, 25, 80, 0.74, 170},
    {"A100 40GB", 80, 312, 19.5, 1555, 32, 32, 25, 40, 0.74, 170},
    {"A40", 86, 149.7, 37.4, 696, 32, 32, 12.5, 48, 0.8, 80},
    {"A10", 86, 125, 31.2, 600, 32, 32, 12.5, 24, 0.7, 65},
    {"A10G", 86, 70, 31.5, 600, 32, 32, 12.5, 24, 0.8, 38},
    {"L40S", 89, 362, 91.6, 864, 32, 32, 12.5, 48, 0.7, 190},
    {"L40", 89, 181, 90.5, 864, 32, 32, 12.5, 48, 0.8, 95},
    {"L4", 89, 121, 30.3, 300, 32, 32, 12.5, 24, 0.6, 60},
    {"RTX A6000", 86, 154.8, 38.7, 768, 32, 32, 1.25, 48, 0.8, 82},
    {"RTX 6000 Ada", 89, 364.2, 91.1, 960, 32, 32, 1.25, 48, 0.7, 190},
    {"RTX 3090", 86, 71, 35.6, 936, 32, 32, 1.25, 24, 0.9, 38},
    {"RTX 3090 Ti", 86, 80, 40, 1008, 32, 32, 1.25, 24, 0.9, 43},
    {"RTX 4080", 89, 97.5, 48.7, 717, 32, 32, 1.25, 16, 0.9, 53},
    {"RTX 4090", 89, 165.2, 82.6, 1008, 32, 32, 1.25, 24, 0.9, 90},
    {"RTX 5090", 120, 209.5, 104.8, 1792, 64, 64, 1.25, 32, 0.9, 115},
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

/* Words that do not tell one GPU from another: the maker's, the socket, the kind of memory (HBM3), its size if it is
 * about the row's (80GB, 144G). Any other word that a row lacks (D, Ti, SUPER, Laptop, MIG, 64GB) makes another GPU. */
static bool gpu_word_is_neutral(const char* word, double memory_gb)
{
    for (const char* neutral : {"NVIDIA", "GeForce", "Tesla", "Quadro", "GPU", "Generation", "PCIe", "SXM"})
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
 * in fp32 at half that rate below 9.0 and from 12.0 on) and fp32, from NVIDIA's white papers; what attention reaches of
 * the 16-bit peak, as in the table above; the bus, in one direction. */
static const struct {
    int major, minor, tensor16, fp32;
    double attention_share, host_gbps;
} gpu_generations[] = {
    {8, 0, 2048, 128, 0.55, 32}, {8, 6, 1024, 256, 0.53, 32}, {8, 9, 1024, 256, 0.52, 32},
    {9, 0, 4096, 256, 0.30, 64}, {10, 0, 8192, 256, 0.15, 64}, {12, 0, 1024, 256, 0.53, 64},
};

/* clock_ghz and memory_gbps are 0 where the runtime does not say: what they give is 0 then, not known. */
static GpuRow gpu_generic(const char* name, int major, int minor, int num_sms, double clock_ghz, double memory_gbps,
                          double memory_gb)
{
    auto g = &gpu_generations[0];
    for (const auto& later : gpu_generations)
        if (later.major < major || (later.major == major && later.minor <= minor)) g = &later;
    bool half = gpu_has_word(name, "GeForce") && g->tensor16 == 1024;
    double clocks = 1e-3 * num_sms * clock_ghz;             // 10^12 in a second
    GpuRow row = {name, 10 * major + minor, clocks * g->tensor16 / (half ? 2 : 1), clocks * g->fp32, memory_gbps,
                  g->host_gbps, g->host_gbps, 12.5, memory_gb, 0.72, 0};
    row.attention_tflops = g->attention_share * row.tensor16_tflops;
    return row;
}

/* Of `count` GPUs that the rank sees: that of its place on the host, or the only one, where a launcher shows each rank
 * its own (Slurm's --gpus-per-task, Kubernetes). -1: too few. Two ranks with the same one are found by its UUID.
 * Ranks that may share a GPU (kernels/cpu/share_gpu.h) do not ask. */
static inline int gpu_of_rank(int count, int host_rank, int host_num_ranks)
{
    if (count >= host_num_ranks) return host_rank;
    return count == 1 ? 0 : -1;
}
