/* run_log.h: OUT/log.jsonl, what plots and tables are made from. One JSON object a line:
 *   {"run": {"version": ..., "model": ..., one member per flag}}      first, and again at each resume
 *   {"step": 12, "loss": 3.28251214, "norm": ..., ...}                one a step; units are in the names
 *   {"step": 12, "val_loss": ..., "val_tokens": ...}                  after a validation
 * What is in a line is a table of rows beside the values: STEP_FIELDS (run/report.cuh), VALIDATION_FIELDS and
 * SAMPLE_FIELDS (run/evaluate.cuh), RUN_FIELDS (run/folder.cuh). A field without a row does not compile: see LogKey.
 *   F(name, type, unit, when, value, docs)   type: int, real or text; written where `when` holds; docs/looking.md has
 *                                            unit and docs of each row, which a test compares
 * A number that is not finite is written null. A line is put together in memory and written at once, so that a kill
 * leaves no half of one. Where the disk is full lines wait in memory, and training does not. On resume from step s the
 * lines of later steps are dropped, so that the log never holds a step twice. */
#pragma once
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include "error.h"

typedef struct RunLog {
    FILE* f;            // to `text`; null: nothing is logged
    char* text;         // what is not in the file yet
    size_t length;
    int fd;
    bool waits;         // the newest write failed
    char path[4096];
    bool first_member;  // of the object being written
} RunLog;

/* The name of a field. Made from a row of a table by LOG_FIELD, not from any string. */
typedef struct LogKey {
    const char* name;
    explicit constexpr LogKey(const char* s) : name(s) {}
} LogKey;
#define LOG_FIELD(name, type, unit, when, value, docs) if (when) log_##type(log, LogKey(#name), value);

static void log_begin(RunLog* log)
{
    if (log->f == nullptr) return;
    fputc('{', log->f);
    log->first_member = true;
}

static void log_key(RunLog* log, LogKey key)
{
    fprintf(log->f, "%s\"%s\": ", log->first_member ? "" : ", ", key.name);
    log->first_member = false;
}

static void log_int(RunLog* log, LogKey key, long long value)
{
    if (log->f == nullptr) return;
    log_key(log, key);
    fprintf(log->f, "%lld", value);
}

/* Nine significant digits: enough to tell any two fp32 apart. */
static void log_real(RunLog* log, LogKey key, double value)
{
    if (log->f == nullptr) return;
    log_key(log, key);
    if (std::isfinite(value)) fprintf(log->f, "%.9g", value);
    else fputs("null", log->f);
}

static void log_text(RunLog* log, LogKey key, const char* value)
{
    if (log->f == nullptr) return;
    log_key(log, key);
    fputc('"', log->f);
    for (const unsigned char* p = (const unsigned char*)value; *p; p++) {
        if (*p == '"' || *p == '\\') fprintf(log->f, "\\%c", *p);
        else if (*p < 32) fprintf(log->f, "\\u%04x", *p);
        else fputc(*p, log->f);
    }
    fputc('"', log->f);
}

/* All that waits, or nothing of it. */
static void log_write(RunLog* log)
{
    struct stat before;
    ENSURE(fflush(log->f) == 0, "out of host memory for the lines of %s", log->path);
    ENSURE(fstat(log->fd, &before) == 0, "%s: cannot be examined: %s", log->path, strerror(errno));
    ssize_t n = write(log->fd, log->text, log->length);
    bool done = n == (ssize_t)log->length;
    if (!done && !log->waits)
        fprintf(stderr, "train_gpt: %s: cannot be written: %s; its lines wait in memory until it can\n", log->path,
                n < 0 ? strerror(errno) : "there is room for a part only");
    log->waits = !done;
    if (done) rewind(log->f);
    else if (n > 0)
        ENSURE(ftruncate(log->fd, before.st_size) == 0, "%s: cannot be cut: %s", log->path, strerror(errno));
}

static void log_end(RunLog* log)
{
    if (log->f == nullptr) return;
    fputs("}\n", log->f);
    log_write(log);
}

/* Opens OUT/log.jsonl to append. Lines of steps after `last_step` are dropped first (a resume goes back to a
 * checkpoint); with last_step < 0 an existing log is refused: nothing is overwritten unasked. */
static void log_open(RunLog* log, const char* out, long long last_step)
{
    *log = RunLog{};
    snprintf(log->path, sizeof log->path, "%s/log.jsonl", out);
    FILE* old = fopen(log->path, "r");
    if (old != nullptr) {
        ENSURE(last_step >= 0,
               "%s exists: -o names a run that was; take another folder, or --resume %s to go on with it", log->path,
               out);
        char kept_path[4200];
        snprintf(kept_path, sizeof kept_path, "%s.tmp", log->path);
        FILE* kept = fopen(kept_path, "w");
        ENSURE(kept != nullptr, "%s: cannot be written: %s", kept_path, strerror(errno));
        char* line = nullptr;
        size_t size = 0;
        for (ssize_t length; (length = getline(&line, &size, old)) > 0;) {
            long long step = -1;
            bool complete = line[length - 1] == '\n' && strlen(line) == (size_t)length;   // no zeros of a lost write
            if (complete && (sscanf(line, "{\"step\": %lld", &step) != 1 || step <= last_step)) fputs(line, kept);
        }
        free(line);
        fclose(old);
        ENSURE(fclose(kept) == 0 && rename(kept_path, log->path) == 0, "%s: cannot be written: %s", log->path,
               strerror(errno));
    }
    log->fd = open(log->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    ENSURE(log->fd >= 0, "%s: cannot be written: %s", log->path, strerror(errno));
    log->f = open_memstream(&log->text, &log->length);
    ENSURE(log->f != nullptr, "out of host memory for the lines of %s", log->path);
}

static void log_close(RunLog* log)
{
    if (log->f == nullptr) return;
    if (log->waits) log_write(log);
    fclose(log->f);
    free(log->text);
    close(log->fd);
    log->f = nullptr;
}
