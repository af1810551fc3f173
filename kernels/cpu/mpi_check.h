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
#endif
