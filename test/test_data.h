/* test_data.h: what the tests of data/ share: CHECK, a folder of their own, and children that must refuse.
 *   CHECK(cond, fmt, ...)      says what failed and continues
 *   dies(f, words)             f() in a child ends with exit code 1 and one line on stderr that holds the words
 *   survives(f)                f() in a child ends by itself, refused or not: no signal, no sanitizer's report */
#pragma once
#include <sys/resource.h>
#include <sys/wait.h>
#include "data/loader.h"
#include "data/safetensors.h"
#include "data/tokenizer.h"

static int num_passed, num_failed;
static const char* current_test;
static bool current_failed;
static char folder[64];                  // of this run's files

#define CHECK(cond, ...) do { \
    if (!(cond)) { \
        printf("FAIL %s (line %d): %s: ", current_test, __LINE__, #cond); \
        printf(__VA_ARGS__); \
        printf("\n"); \
        current_failed = true; \
    } \
} while (0)

/* The file `name` in this run's folder; valid until eight more were asked for. */
static const char* in_folder(const char* name)
{
    static char paths[8][256];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char* path, const void* data, size_t size_bytes)
{
    file_write(path, (const char*)data, size_bytes);
}

/* Runs f(argument) in a child. True if it ended with exit code 1 and one line on stderr that holds `words`. */
template<class F>
static bool dies(F f, const char* words)
{
    int pipe_fds[2];
    ENSURE(pipe(pipe_fds) == 0, "pipe: %s", strerror(errno));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipe_fds[1], 2);
        f();
        _exit(0);
    }
    close(pipe_fds[1]);
    char said[8192];
    size_t length = 0;
    for (ssize_t n; (n = read(pipe_fds[0], said + length, sizeof said - 1 - length)) > 0;) length += (size_t)n;
    said[length] = 0;
    close(pipe_fds[0]);
    int status;
    waitpid(child, &status, 0);
    bool one_line = length > 0 && strchr(said, '\n') == said + length - 1;
    bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 1 && one_line && strstr(said, words) != nullptr;
    if (!ok) printf("expected a refusal with \"%s\", got status %x: %s\n", words, status, said);
    return ok;
}

/* Refused or not, f() ends by itself: exit code 0 or 1, no signal, no report of a sanitizer. */
template<class F>
static bool survives(F f)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        f();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) <= 1;
}
