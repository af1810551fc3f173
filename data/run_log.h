/* run_log.h: OUT/log.jsonl, what plots and tables are made from. One JSON object a line:
 *   {"run": {"version": ..., "model": ..., one member per flag}}      first, and again at each resume
 *   {"step": 12, "loss": 3.28251214, "norm": ..., ...}                one a step; units are in the names
 *   {"step": 12, "val_loss": ..., "val_tokens": ...}                  after a validation
 *   {"step": 12, "saved": "step_00000012"}                            when a checkpoint is complete
 * What is in a line is a table of rows beside the values: STEP_FIELDS (run/report.cuh), VALIDATION_FIELDS and
 * SAMPLE_FIELDS (run/evaluate.cuh), RUN_FIELDS and SAVE_FIELDS (run/folder.cuh). A field without a row does not
 * compile: see LogKey.
 *   F(name, type, unit, when, value, docs)   type: int, real or text; written where `when` holds; docs/looking.md has
 *                                            unit and docs of each row, which a test compares
 * A number that is not finite is written null. A line is put together in memory and written at once, so that a kill
 * leaves no half of one. Where the disk is full lines wait in memory, and training does not. On resume from step s the
 * lines of later steps are dropped, so that the log never holds a step twice. */
#pragma once
#include <cmath>
#include "files.h"

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
    size_t done;
    ENSURE(fflush(log->f) == 0, "out of host memory for the lines of %s", log->path);
    ENSURE(fstat(log->fd, &before) == 0, "%s: cannot be examined: %s", log->path, strerror(errno));
    bool well = write_full(log->fd, log->text, log->length, &done);
    if (!well && !log->waits)
        say_to(stderr, "train_gpt: %s: cannot be written: %s; its lines wait in memory until it can\n", log->path,
               strerror(errno));
    log->waits = !well;
    if (well) rewind(log->f);
    else if (done > 0)
        ENSURE(TEMP_FAILURE_RETRY(ftruncate(log->fd, before.st_size)) == 0, "%s: cannot be cut: %s", log->path,
               strerror(errno));
}

static void log_end(RunLog* log)
{
    if (log->f == nullptr) return;
    fputs("}\n", log->f);
    log_write(log);
}

static void log_path(char (&path)[4096], const char* out)
{
    int n = snprintf(path, sizeof path, "%s/log.jsonl", out);
    ENSURE(n < (int)sizeof path, "%s: the name is too long", out);
}

/* The step of a line, -1 if it is of none. */
static long long log_line_step(const char* line)
{
    const char* key = "{\"step\": ";
    return strncmp(line, key, strlen(key)) == 0 ? strtoll(line + strlen(key), nullptr, 10) : -1;
}

/* The newest step of which the log says that there was a checkpoint: saved, or the one that the log's first step
 * followed. 0 if it says of none. */
static long long log_checkpoint_step(const char* out)
{
    char path[4096];
    size_t length;
    long long newest = 0;
    log_path(path, out);
    if (!file_exists(path)) return 0;
    char* text = file_read(path, &length);
    bool is_first = true;
    for (char* line = text, *end; (end = (char*)memchr(line, '\n', text + length - line)) != nullptr; line = end + 1) {
        long long step = log_line_step(line);
        if (step < 0) continue;
        *end = 0;
        bool saved = strstr(line, "\"saved\": ") != nullptr;
        if (is_first && !saved) newest = step - 1;
        if (saved && step > newest) newest = step;
        is_first = false;
    }
    free(text);
    return newest;
}

/* Drops the lines of steps after last_step, and those that a power cut has torn. */
static void log_cut(const char* path, long long last_step)
{
    size_t length, kept = 0;
    char* text = file_read(path, &length);
    for (char* line = text, *end; (end = (char*)memchr(line, '\n', text + length - line)) != nullptr; line = end + 1) {
        size_t line_bytes = (size_t)(end + 1 - line);
        if (log_line_step(line) > last_step || memchr(line, 0, line_bytes) != nullptr) continue;
        memmove(text + kept, line, line_bytes);
        kept += line_bytes;
    }
    if (kept < length) file_write(path, text, kept);
    free(text);
}

/* A run that begins anew where another had no checkpoint yet: the log of that one is kept beside it. */
static void log_put_by(const char* path)
{
    char other[4200];
    snprintf(other, sizeof other, "%s.1", path);
    for (int k = 2; file_exists(other); k++) snprintf(other, sizeof other, "%s.%d", path, k);
    ENSURE(TEMP_FAILURE_RETRY(rename(path, other)) == 0, "%s: cannot be renamed to %s: %s", path, other,
           strerror(errno));
    say("log     of a start without a checkpoint: kept as %s\n", other);
}

/* Opens OUT/log.jsonl to append. Lines of steps after `last_step` are dropped first (a resume goes back to a
 * checkpoint); with last_step < 0 an existing log is refused: nothing is overwritten unasked. */
static void log_open(RunLog* log, const char* out, long long last_step)
{
    *log = RunLog{};
    log_path(log->path, out);
    if (file_exists(log->path)) {
        ENSURE(last_step >= 0,
               "%s exists: -o names a run that was; take another folder, or --resume %s to go on with it", log->path,
               out);
        if (last_step > 0) log_cut(log->path, last_step);
        else log_put_by(log->path);
    }
    log->fd = (int)TEMP_FAILURE_RETRY(open(log->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
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
