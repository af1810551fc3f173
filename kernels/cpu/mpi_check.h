/* mpi_check.h: MPI calls whose failure ends the program by name. */
#pragma once
#ifndef NO_MPI
#include <mpi.h>
#include "data/error.h"

[[noreturn]] static void die_mpi(const char* call, int error)
{
    char text[MPI_MAX_ERROR_STRING];
    int len;
    if (MPI_Error_string(error, text, &len) != MPI_SUCCESS) text[0] = '\0';
    die("%s: %s", call, text);
}

#define MPI_CHECK(name, ...) do { \
    int mpi_error_ = name(__VA_ARGS__); \
    if (mpi_error_ != MPI_SUCCESS) die_mpi(#name, mpi_error_); \
} while (0)

/* threads: a host function on a stream calls MPI while the main thread does. */
static int mpi_init(int* argc, char*** argv, bool threads)
{
    if (!threads) return PMPI_Init(argc, argv);
    int provided = 0, error = PMPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
    ENSURE(error != MPI_SUCCESS || provided == MPI_THREAD_MULTIPLE, "TRAIN_GPT_SHARE_GPU=1: this MPI is built without "
           "MPI_THREAD_MULTIPLE");
    return error;
}
#endif
