/* folder.h: folders and whole files: made, synced, copied, removed. */
#pragma once
#include <dirent.h>
#include <sys/stat.h>
#include "json.h"

static inline void folder_make(const char* path)
{
    char part[4096];
    size_t n = strlen(path);
    ENSURE(n > 0 && n < sizeof part, "folder name of %zu bytes, have room for %zu", n, sizeof part - 1);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        ENSURE(mkdir(part, 0777) == 0 || errno == EEXIST, "%s: cannot be made: %s", part, strerror(errno));
    }
    struct stat info;
    ENSURE(stat(path, &info) == 0 && S_ISDIR(info.st_mode), "%s: is not a folder: take another name", path);
}

static inline void folder_sync(const char* path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ENSURE(fd >= 0 && fsync(fd) == 0, "%s: cannot be synced: %s", path, strerror(errno));
    close(fd);
}

/* Removes a folder of plain files: only ever one of our own step_*.tmp. */
static inline void folder_remove(const char* path)
{
    DIR* dir = opendir(path);
    if (dir == nullptr) return;
    for (struct dirent* entry; (entry = readdir(dir)) != nullptr; ) {
        char file[4096 + 600];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.') unlink(file);
    }
    closedir(dir);
    ENSURE(rmdir(path) == 0, "%s: what an interrupted save left cannot be removed: %s", path, strerror(errno));
}
