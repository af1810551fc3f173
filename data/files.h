/* files.h: files and folders: opened, read, written, synced, copied, removed.
 *   file_exists(path)              is there a file or folder of this name?
 *   file_kind(path)                S_IFREG, S_IFDIR ...; 0: there is none
 *   file_open(path)                to read from
 *   file_read(path, &length)       the whole file, with a zero byte after it
 *   file_write(path, data, n)      the whole file, or nothing of it
 *   pread_full, write_full         as many bytes as are asked for
 *   folder_open, folder_next       the names in a folder
 *   folder_make folder_sync folder_remove
 * A call that a signal interrupts is called again (TEMP_FAILURE_RETRY), here and wherever else files are touched. A
 * file is absent only if the system says so: whatever else stands in the way of looking is an error, not an absence. */
#pragma once
#include <cassert>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include "error.h"

#define PROBE ".probe."          // see probes_remove

static inline bool error_is_absence(int error) { return error == ENOENT || error == ENOTDIR; }

static inline mode_t file_kind(const char* path)
{
    struct stat info;
    if (TEMP_FAILURE_RETRY(stat(path, &info)) == 0) return info.st_mode & S_IFMT;
    ENSURE(error_is_absence(errno), "%s: cannot be examined: %s", path, strerror(errno));
    return 0;
}

static inline bool file_exists(const char* path) { return file_kind(path) != 0; }

// ------------------------------------------------------------------------------------------------------------ read
/* A file that is asked for and not there counts as damage, as one that is too short does (error.h). */
static inline int file_open(const char* path)
{
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    ENSURE_INTACT(fd >= 0 || !error_is_absence(errno), "%s: cannot be opened: %s", path, strerror(errno));
    ENSURE(fd >= 0, "%s: cannot be opened: %s", path, strerror(errno));
    return fd;
}

static inline void close_held(void* fd) { close((int)(intptr_t)fd); }
static inline int file_hold(int fd) { return (int)(intptr_t)hold((void*)(intptr_t)fd, close_held); }
static inline void file_give_back(int fd) { give_back((void*)(intptr_t)fd); }

/* pread until `size_bytes` are there. Returns what it got: less only at the end of the file or, with errno set, after
 * an error. */
static inline size_t pread_full(int fd, void* out, size_t size_bytes, size_t offset)
{
    size_t done = 0;
    errno = 0;
    while (done < size_bytes) {
        ssize_t n = pread(fd, (char*)out + done, size_bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) { errno = 0; continue; }
        if (n <= 0) break;
        done += (size_t)n;
    }
    return done;
}

static inline char* file_read(const char* path, size_t* length)
{
    int fd = file_hold(file_open(path));
    struct stat info;
    ENSURE(fstat(fd, &info) == 0, "%s: cannot be examined: %s", path, strerror(errno));
    ENSURE_INTACT(S_ISREG(info.st_mode), "%s: is not a plain file", path);
    size_t size = (size_t)info.st_size;
    char* text = (char*)hold(malloc_checked(size + 1));
    *length = pread_full(fd, text, size, 0);
    ENSURE(*length == size, "%s: reading failed at byte %zu of %zu: %s", path, *length, size,
           errno ? strerror(errno) : "the file became shorter");
    text[size] = 0;
    hand_over(text);
    file_give_back(fd);
    return text;
}

// --------------------------------------------------------------------------------------------------------- folders
static inline void closedir_held(void* dir) { closedir((DIR*)dir); }

/* Null if there is none; else held until folder_close. */
static inline DIR* folder_open(const char* path)
{
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0 && error_is_absence(errno)) return nullptr;
    DIR* dir = fd >= 0 ? fdopendir(fd) : nullptr;
    ENSURE(dir != nullptr, "%s: cannot be listed: %s", path, strerror(errno));
    return (DIR*)hold(dir, closedir_held);
}

static inline void folder_close(DIR* dir) { give_back(dir); }

/* The next name, null after the last. */
static inline const char* folder_next(DIR* dir, const char* path)
{
    errno = 0;
    const struct dirent* entry = readdir(dir);
    ENSURE(entry != nullptr || errno == 0, "%s: cannot be listed: %s", path, strerror(errno));
    return entry != nullptr ? entry->d_name : nullptr;
}

/* Two things cannot be synced and are not an error: a folder that may be written to but not listed, and those of a file
 * system that does not know how. */
static inline void folder_sync(const char* path)
{
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0 && errno == EACCES) return;
    ENSURE(fd >= 0, "%s: cannot be synced: %s", path, strerror(errno));
    file_hold(fd);
    ENSURE(TEMP_FAILURE_RETRY(fsync(fd)) == 0 || errno == EINVAL, "%s: cannot be synced: %s", path, strerror(errno));
    file_give_back(fd);
}

/* Syncs the folder that holds `path`: its name is then on the disk. */
static inline void folder_sync_of(const char* path)
{
    char folder[4096];
    const char* slash = strrchr(path, '/');
    size_t n = slash == nullptr ? 0 : slash == path ? 1 : (size_t)(slash - path);
    ENSURE(n < sizeof folder, "%s: the name is too long", path);
    memcpy(folder, n > 0 ? path : ".", n > 0 ? n : 1);
    folder[n > 0 ? n : 1] = 0;
    folder_sync(folder);
}

static inline void folder_make(const char* path)
{
    char part[4096];
    size_t n = strlen(path);
    ENSURE(n > 0 && n < sizeof part, "folder name of %zu bytes, have room for %zu", n, sizeof part - 1);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        bool is_new = TEMP_FAILURE_RETRY(mkdir(part, 0777)) == 0;
        ENSURE(is_new || errno == EEXIST, "%s: cannot be made: %s", part, strerror(errno));
        if (is_new) folder_sync_of(part);
    }
    struct stat info;
    ENSURE(stat(path, &info) == 0 && S_ISDIR(info.st_mode), "%s: is not a folder: take another name", path);
}

/* Removes what this program has made: a link, or a folder of plain files. Links are unlinked, never followed. Folders
 * in it and names that begin with a dot are not ours, and stay. False if something stays, with a sentence in `why`. */
static inline bool folder_remove(const char* path, char (&why)[1024])
{
    if (TEMP_FAILURE_RETRY(unlink(path)) == 0 || error_is_absence(errno)) return true;
    int error = errno;                               // of a folder: EISDIR
    int fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    DIR* dir = fd >= 0 ? fdopendir(fd) : nullptr;
    char kept[256] = "";
    if (dir == nullptr && error == EISDIR) error = errno;
    for (const struct dirent* entry; dir != nullptr && (entry = readdir(dir)) != nullptr; ) {
        const char* name = entry->d_name;
        bool ours = name[0] != '.' || strncmp(name, PROBE, strlen(PROBE)) == 0;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
        if (ours && TEMP_FAILURE_RETRY(unlinkat(fd, name, 0)) == 0) continue;
        error = ours ? errno : EPERM;
        snprintf(kept, sizeof kept, "%s", name);
    }
    if (dir != nullptr) closedir(dir);
    else if (fd >= 0) close(fd);
    if (dir != nullptr && TEMP_FAILURE_RETRY(rmdir(path)) == 0) return true;
    if (kept[0] == 0 && dir != nullptr) error = errno;
    snprintf(why, sizeof why, "%.600s%s%s: cannot be removed and stays: %s", path, kept[0] ? "/" : "", kept,
             error == EPERM || error == EISDIR ? "it is not ours" : strerror(error));
    return false;
}

/* Removes what starts that were killed have left of the test whether all ranks see a folder (zero/weights.h). One that
 * is younger may be in use by another start. */
static inline void probes_remove(const char* folder, double min_age_s)
{
    struct stat info;
    DIR* dir = opendir(folder);
    if (dir == nullptr) return;
    while (const struct dirent* entry = readdir(dir)) {
        char path[4400];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (strncmp(entry->d_name, PROBE, strlen(PROBE)) == 0 && lstat(path, &info) == 0 &&
            difftime(time(nullptr), info.st_mtime) >= min_age_s) unlink(path);
    }
    closedir(dir);
}

// ----------------------------------------------------------------------------------------------------------- write
/* What to do about a write that failed, to follow its sentence: room helps only where it is missing. */
static inline const char* write_advice(int error)
{
    if (error == ENOSPC || error == EDQUOT) return "; make room, or write to another folder";
    return error == EFBIG ? "; raise the limit on file sizes (ulimit -f), or write to another folder" : "";
}

/* False, with errno set, if not all could be written; then *done bytes are. */
static inline bool write_full(int fd, const void* data, size_t size_bytes, size_t* done)
{
    for (*done = 0; *done < size_bytes; ) {
        ssize_t n = TEMP_FAILURE_RETRY(write(fd, (const char*)data + *done, size_bytes - *done));
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;
        *done += (size_t)n;
    }
    return true;
}

/* Under another name first, and renamed when it is on the disk: a kill, a full disk or a power cut at any moment leaves
 * the old file or the new one, whole. */
static inline void file_write(const char* path, const void* data, size_t size_bytes)
{
    char temporary[4400];
    size_t done;
    int n = snprintf(temporary, sizeof temporary, "%s.tmp", path);
    ENSURE(n < (int)sizeof temporary, "%s: the name is too long", path);
    int fd = (int)TEMP_FAILURE_RETRY(open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    ENSURE(fd >= 0, "%s: cannot be created: %s", temporary, strerror(errno));
    bool well = write_full(fd, data, size_bytes, &done) && TEMP_FAILURE_RETRY(fsync(fd)) == 0;
    int error = errno;
    close(fd);                                       // after fsync there is nothing left to fail
    if (well) {
        well = TEMP_FAILURE_RETRY(rename(temporary, path)) == 0;
        error = errno;
    }
    if (!well) unlink(temporary);
    ENSURE(well, "%s: %zu bytes cannot be written: %s%s", path, size_bytes, strerror(error), write_advice(error));
    folder_sync_of(path);
}

/* The same, unless the file is so already. */
static inline void file_update(const char* path, const void* data, size_t size_bytes)
{
    size_t old_bytes = 0;
    char* old = (char*)hold(file_exists(path) ? file_read(path, &old_bytes) : nullptr);
    if (old == nullptr || old_bytes != size_bytes || memcmp(old, data, size_bytes) != 0)
        file_write(path, data, size_bytes);
    give_back(old);
}
