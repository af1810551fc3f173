/* isa.h: the instruction sets that one binary holds. The program is compiled once for each (Makefile's ISA) and main
 * takes the first that the machine can run; so no kernel asks what it may use: simd.h's vectors have the width that the
 * object is compiled for.
 *   native  the machine that compiles; the only one unless asked for, and the only one on a GPU
 *   avx512bf16  avx512 and multiply-adds of pairs of bf16: other bits of -p bf16 alone
 *   avx512  x86-64-v4, 16 floats a vector     avx2  x86-64-v3, 8     sse2  every x86-64, 4
 * Two sets differ in the last bits, since sums over lanes are taken in another order: a run that is to be repeated to
 * the last bit is repeated with TRAIN_GPT_ISA=NAME, which takes one by its name. */
#pragma once
#include <cstring>

#ifndef ISA_THIS
#define ISA_THIS native
#define ISAS ISA(native)
#endif
#define ISA_JOIN(name, isa) name##_##isa
#define ISA_JOIN_EXPANDED(name, isa) ISA_JOIN(name, isa)
#define ISA_NAME(name) ISA_JOIN_EXPANDED(name, ISA_THIS)      // name_avx2 in the object for avx2

static inline bool isa_runs(const char* isa)
{
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (strcmp(isa, "avx2") == 0) return avx2;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (strcmp(isa, "avx512") == 0) return avx512;
    if (strcmp(isa, "avx512bf16") == 0) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return true;
}
