/* syscalls.c: for LD_PRELOAD: system calls that fail on purpose, and an MPI of one rank, so that a start takes little.
 *   SYSCALL_PATH   only calls on files whose path contains this are counted
 *   SYSCALL_FAIL   "OP FIRST COUNT HOW": calls number FIRST to FIRST + COUNT - 1 of OP do HOW: an errno, with which the
 *                  call fails without being made; "short", half of the bytes are moved; or "kill", the process ends
 *   SYSCALL_COUNT  a file to which the number of calls is written at exit, "OP NUMBER" a line
 * mpicc -shared -fPIC syscalls.c -ldl      -DREAL_MPI: without that MPI */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define OPS(O) O(open) O(read) O(pread) O(write) O(pwrite) O(fsync) O(close) O(rename) O(mkdir) O(unlink) O(rmdir) \
    O(ftruncate) O(fallocate) O(stat) O(readdir)
enum {
#define O(op) OP_##op,
    OPS(O)
#undef O
    NUM_OPS
};
static const char* const op_names[] = {
#define O(op) #op,
    OPS(O)
#undef O
};

static long counts[NUM_OPS];
static int fail_op = -1;
static long fail_first, fail_count;
static char fail_how[16];
static const char* part;

__attribute__((constructor)) static void begin(void)
{
    char op[16] = "";
    part = getenv("SYSCALL_PATH");
    const char* fail = getenv("SYSCALL_FAIL");
    if (fail == NULL || sscanf(fail, "%15s %ld %ld %15s", op, &fail_first, &fail_count, fail_how) != 4) return;
    for (int i = 0; i < NUM_OPS; i++) if (strcmp(op, op_names[i]) == 0) fail_op = i;
}

__attribute__((destructor)) static void end(void)
{
    const char* path = getenv("SYSCALL_COUNT");
    FILE* f = path != NULL ? fopen(path, "w") : NULL;
    for (int i = 0; f != NULL && i < NUM_OPS; i++) fprintf(f, "%s %ld\n", op_names[i], counts[i]);
    if (f != NULL) fclose(f);
}

static int is_ours(const char* path) { return part != NULL && path != NULL && strstr(path, part) != NULL; }

static int is_ours_fd(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = part != NULL ? readlink(link, path, sizeof path - 1) : -1;
    path[n > 0 ? n : 0] = 0;
    return is_ours(path);
}

enum { GOES_ON, FAILS, IS_SHORT };
static int meets(int op, int ours)
{
    if (!ours) return GOES_ON;
    long number = __sync_add_and_fetch(&counts[op], 1);
    if (op != fail_op || number < fail_first || number >= fail_first + fail_count) return GOES_ON;
    if (strcmp(fail_how, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(fail_how, "short") == 0) return IS_SHORT;
    errno = atoi(fail_how);
    return FAILS;
}

/* A call that fails, or is made. */
#define CALL(type, name, op, ours, failed, params, ...) \
    type name params { \
        static type (*real) params; \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name); \
        if (meets(OP_##op, ours) == FAILS) return failed; \
        return real(__VA_ARGS__); \
    }
/* A call that moves n bytes. */
#define MOVES(name, params, ...) \
    ssize_t name params { \
        static ssize_t (*real) params; \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name); \
        int saved = errno, meets_ = meets(OP_##name, is_ours_fd(fd)); \
        if (meets_ == FAILS) return -1; \
        if (meets_ == IS_SHORT && n > 1) n /= 2; \
        errno = saved; \
        return real(__VA_ARGS__); \
    }

MOVES(read, (int fd, void* data, size_t n), fd, data, n)
MOVES(write, (int fd, const void* data, size_t n), fd, data, n)
MOVES(pread, (int fd, void* data, size_t n, off_t at), fd, data, n, at)
MOVES(pwrite, (int fd, const void* data, size_t n, off_t at), fd, data, n, at)
CALL(int, fsync, fsync, is_ours_fd(fd), -1, (int fd), fd)
CALL(int, rename, rename, is_ours(from), -1, (const char* from, const char* to), from, to)
CALL(int, mkdir, mkdir, is_ours(path), -1, (const char* path, mode_t mode), path, mode)
CALL(int, unlink, unlink, is_ours(path), -1, (const char* path), path)
CALL(int, unlinkat, unlink, is_ours_fd(fd), -1, (int fd, const char* name, int flags), fd, name, flags)
CALL(int, rmdir, rmdir, is_ours(path), -1, (const char* path), path)
CALL(int, ftruncate, ftruncate, is_ours_fd(fd), -1, (int fd, off_t n), fd, n)
CALL(int, fallocate, fallocate, is_ours_fd(fd), -1, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
CALL(int, stat, stat, is_ours(path), -1, (const char* path, struct stat* info), path, info)
CALL(struct dirent*, readdir, readdir, is_ours_fd(dirfd(dir)), NULL, (DIR* dir), dir)

int open(const char* path, int flags, ...)
{
    static int (*real)(const char*, int, ...);
    if (real == NULL) real = dlsym(RTLD_NEXT, "open");
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return meets(OP_open, is_ours(path)) == FAILS ? -1 : real(path, flags, mode);
}

/* On Linux the descriptor is closed, whatever close says. */
int close(int fd)
{
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "close");
    int fails = meets(OP_close, is_ours_fd(fd)) == FAILS, error = errno, result = real(fd);
    if (fails) errno = error;
    return fails ? -1 : result;
}

// ------------------------------------------------------------------------------------------------- MPI of one rank
#ifndef REAL_MPI
#include <mpi.h>

int MPI_Init(int* argc, char*** argv) { return MPI_SUCCESS; }
int MPI_Finalize(void) { return MPI_SUCCESS; }
int MPI_Abort(MPI_Comm comm, int code) { _exit(code); }
int MPI_Comm_rank(MPI_Comm comm, int* rank) { return *rank = 0, MPI_SUCCESS; }
int MPI_Comm_size(MPI_Comm comm, int* size) { return *size = 1, MPI_SUCCESS; }
int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* part_of)
{
    return *part_of = comm, MPI_SUCCESS;
}
int MPI_Comm_free(MPI_Comm* comm) { return MPI_SUCCESS; }
int MPI_Bcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm comm) { return MPI_SUCCESS; }
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) { return MPI_SUCCESS; }
int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) { return *done = 1, MPI_SUCCESS; }
#endif
