/* folder_lock.h: one run at a time writes into a run folder. RUN/lock is locked by rank 0 before anything else in the
 * folder is read or changed, and stays open and locked until the process ends, however it ends. In it is who has it:
 *   host node1 namespace 4026531836 pid 4711 started 8812345 since 2026-11-29T12:00:00Z
 * A process id means something within a host and a namespace of process ids (a container has its own); `started`, in
 * clock ticks since boot, tells a later process with the same id apart.
 *   folder_lock(out)   makes the folder and takes its lock; refuses if another run has it
 *
 * The lock is that of the open file (F_OFD_SETLK): unlike a POSIX lock it is not released when another descriptor of
 * the same file is closed. Some network file systems keep the lock of a process that is gone; if it was of this host,
 * the folder is taken over. Others have no locks: that is reported, and a second run would not be noticed. */
#pragma once
#include <ctime>
#include "files.h"

typedef struct LockHolder {
    char host[64], since[32];
    unsigned long long pid_namespace, started;
    long pid;
} LockHolder;

/* When a process began, in clock ticks since boot; 0: there is none. Field 22 of /proc/PID/stat; the second field, a
 * name in brackets, may itself have brackets and blanks. */
static inline unsigned long long process_started(long pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return 0;
    ssize_t n = TEMP_FAILURE_RETRY(read(fd, text, sizeof text - 1));
    close(fd);
    text[n > 0 ? n : 0] = 0;
    const char* field = strrchr(text, ')');
    for (int i = 2; field != nullptr && i < 22; i++) field = strchr(field + 1, ' ');
    return field != nullptr ? strtoull(field, nullptr, 10) : 0;
}

static inline LockHolder lock_holder_self(void)
{
    LockHolder h = {};
    struct stat of_pids;
    struct tm utc;
    time_t now = time(nullptr);
    gethostname(h.host, sizeof h.host - 1);
    if (stat("/proc/self/ns/pid", &of_pids) == 0) h.pid_namespace = of_pids.st_ino;
    h.pid = (long)getpid();
    h.started = process_started(h.pid);
    strftime(h.since, sizeof h.since, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    return h;
}

static inline bool lock_holder_read(int fd, LockHolder* h)
{
    char text[256];
    ssize_t n = TEMP_FAILURE_RETRY(pread(fd, text, sizeof text - 1, 0));
    text[n > 0 ? n : 0] = 0;
    return sscanf(text, "host %63s namespace %llu pid %ld started %llu since %31s", h->host, &h->pid_namespace, &h->pid,
                  &h->started, h->since) == 5;
}

/* Overwritten first and cut after, so that a reader finds one holder or the other. On a full disk the lock holds
 * without a name in it. */
static inline void lock_holder_write(int fd)
{
    const LockHolder h = lock_holder_self();
    char text[256];
    int n = snprintf(text, sizeof text, "host %s namespace %llu pid %ld started %llu since %s\n", h.host,
                     h.pid_namespace, h.pid, h.started, h.since);
    const ssize_t written = TEMP_FAILURE_RETRY(pwrite(fd, text, (size_t)n, 0));
    if (TEMP_FAILURE_RETRY(ftruncate(fd, written == n ? n : 0)) != 0) return;
}

/* Another process has the lock: refuses, or returns if that process was of this host and is gone. */
static inline void lock_refuse(int fd, const char* out)
{
    LockHolder h, self = lock_holder_self();
    if (!lock_holder_read(fd, &h))
        die("-o %s: another run is writing there: wait until it ends, or take another -o", out);
    const bool visible = strcmp(h.host, self.host) == 0 && h.pid_namespace == self.pid_namespace;
    if (visible && process_started(h.pid) != h.started) return;
    die("-o %s: another run is writing there, process %ld on host %s, since %s: wait until it ends, end it with "
        "kill -TERM %ld, or take another -o", out, h.pid, h.host, h.since, h.pid);
}

/* 0 or errno. */
static inline int lock_try(int fd)
{
    struct flock whole = {};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    int error;
    while ((error = fcntl(fd, F_OFD_SETLK, &whole) == 0 ? 0 : errno) == EINTR) continue;
    return error == EACCES ? EAGAIN : error;
}

static inline void folder_lock(const char* out)
{
    char path[4200];
    folder_make(out);
    snprintf(path, sizeof path, "%s/lock", out);
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    ENSURE(fd >= 0, "%s: cannot be written: %s", path, strerror(errno));
    int error = lock_try(fd);
    // A second: the name is that of the holder before, if the new one has not yet written its own.
    for (int tries = 0; error == EAGAIN && tries < 10; tries++) {
        lock_refuse(fd, out);
        usleep(100 * 1000);
        error = lock_try(fd);
    }
    if (error == EAGAIN)
        say("lock    %s was left locked by a process of this host that is gone: taken over\n", path);
    else if (error == ENOLCK || error == ENOSYS || error == EINVAL || error == EOPNOTSUPP)
        say("lock    %s: this file system has no locks (%s): a second run in this folder would not be noticed\n",
            path, strerror(error));
    else
        ENSURE(error == 0, "%s: cannot be locked: %s", path, strerror(error));
    lock_holder_write(fd);      // fd stays open: the lock ends with the process
}
