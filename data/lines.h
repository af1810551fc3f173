/* lines.h: lines of a file, a pipe or a terminal, and whether there is one yet.
 *
 *   Lines in = lines_open("-")                     standard input; else a path
 *   lines_ready(&in)                               a line, or the end, can be had without waiting
 *   char* line = lines_next(&in, &length)          waits; without its newline, to be freed; null at the end
 *   lines_close(&in) */
#pragma once
#include <poll.h>
#include "files.h"

typedef struct {
    const char* name;            // for messages
    int fd;
    char* text;                  // read and not yet asked for: length bytes
    size_t length, room;
    bool ended;
} Lines;

static inline Lines lines_open(const char* path)
{
    bool is_stdin = strcmp(path, "-") == 0;
    return Lines{is_stdin ? "stdin" : path, is_stdin ? 0 : file_open(path), nullptr, 0, 0, false};
}

static inline void lines_close(Lines* in)
{
    if (in->fd > 0) close(in->fd);
    free(in->text);
    *in = Lines{};
}

/* Takes what there is; waits for at least a byte, or the end. */
static inline void lines_read(Lines* in)
{
    if (in->room - in->length < 4096) {
        in->room = 2 * in->room + 8192;
        in->text = (char*)realloc(in->text, in->room);
        ENSURE(in->text != nullptr, "out of host memory: a line of %s has %zu bytes", in->name, in->length);
    }
    ssize_t n = TEMP_FAILURE_RETRY(read(in->fd, in->text + in->length, in->room - in->length));
    ENSURE(n >= 0, "%s: cannot be read: %s", in->name, strerror(errno));
    in->length += (size_t)n;
    in->ended = n == 0;
}

static inline bool lines_has(const Lines* in)
{
    return in->ended || (in->length > 0 && memchr(in->text, '\n', in->length) != nullptr);
}

static inline bool lines_ready(Lines* in)
{
    struct pollfd one = {in->fd, POLLIN, 0};
    while (!lines_has(in) && poll(&one, 1, 0) > 0) lines_read(in);
    return lines_has(in);
}

static inline char* lines_next(Lines* in, size_t* length)
{
    while (!lines_has(in)) lines_read(in);
    if (in->length == 0) return nullptr;
    char* end = (char*)memchr(in->text, '\n', in->length);
    *length = end != nullptr ? (size_t)(end - in->text) : in->length;
    size_t used = *length + (end != nullptr);
    char* line = (char*)malloc_checked(*length + 1);
    memcpy(line, in->text, *length);
    line[*length] = 0;
    memmove(in->text, in->text + used, in->length -= used);
    return line;
}
