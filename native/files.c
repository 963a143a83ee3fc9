/* Files inside a root: opening a path, unpacking a batch, removing a tree. In: paths that whoever lives in the root may have
 * surrounded with links and special files. Out: descriptors and errno. Everything runs with the caller's file-system identity. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Opens without waiting (a FIFO planted at `path` must not stop us), never through a magic link, and nothing of procfs: our own
 * /proc/self/mem would be reachable by a planted link. Returns a descriptor or -1 with errno. */
int open_inside(const char *path, int flags, mode_t mode) {
    struct open_how how = {.flags = (uint64_t)(flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), .resolve = RESOLVE_NO_MAGICLINKS};
    if (flags & O_CREAT) how.mode = mode & 07777;
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0 && errno == ENOSYS) fd = open(path, (int)how.flags, (mode_t)how.mode); /* gVisor: what it opens is checked below */
    struct statfs kind;
    if (fd >= 0 && (fstatfs(fd, &kind) || kind.f_type == PROC_SUPER_MAGIC)) {
        close(fd);
        errno = EACCES;
        return -1;
    }
    return fd;
}

/* Creates every missing folder above the last component of an absolute path. */
int make_parents(const char *path) {
    char copy[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof copy) return errno = ENAMETOOLONG, -1;
    memcpy(copy, path, length + 1);
    for (char *slash = copy + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(copy, 0755) && errno != EEXIST) return -1;
        *slash = '/';
    }
    return 0;
}

static int write_all(int fd, const unsigned char *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t done = write(fd, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return -1;
        data += done;
        bytes -= (size_t)done;
    }
    return 0;
}

static int put_file(const char *path, mode_t mode, uint32_t modified, const unsigned char *data, size_t bytes) {
    const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = modified}};
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    int fd = open_inside(path, flags, mode);
    if (fd < 0 && errno == ENOENT && !make_parents(path)) fd = open_inside(path, flags, mode);
    if (fd < 0) return errno;
    struct stat info;
    int error = fstat(fd, &info) ? errno : !S_ISREG(info.st_mode) ? EINVAL : write_all(fd, data, bytes) ? errno : 0;
    if (!error && modified && futimens(fd, times)) error = errno;
    close(fd);
    return error;
}

static int put_folder(const char *path, mode_t mode) {
    if (!mkdir(path, mode & 07777) || (errno == ENOENT && !make_parents(path) && !mkdir(path, mode & 07777))) return 0;
    return errno == EEXIST ? 0 : errno;
}

static int put_link(const char *path, const unsigned char *target, size_t bytes) {
    char text[PATH_MAX];
    if (bytes >= sizeof text) return ENAMETOOLONG;
    memcpy(text, target, bytes);
    text[bytes] = 0;
    if (!symlink(text, path) || (errno == ENOENT && !make_parents(path) && !symlink(text, path))) return 0;
    return errno;
}

/* Unpacks a batch, stopping at the first entry that fails; the result names it. A malformed batch is EBADMSG. */
struct batch_result batch_unpack(const unsigned char *at, size_t bytes) {
    struct batch_result result = {0};
    const unsigned char *end = at + bytes;
    mode_t mask = umask(0);
    while (at < end && !result.error) {
        struct batch_entry entry;
        char path[PATH_MAX];
        if ((size_t)(end - at) < sizeof entry) break;
        memcpy(&entry, at, sizeof entry);
        at += sizeof entry;
        if (entry.path_bytes >= sizeof path || (size_t)(end - at) < (size_t)entry.path_bytes + entry.data_bytes) break;
        memcpy(path, at, entry.path_bytes);
        path[entry.path_bytes] = 0;
        const unsigned char *data = at + entry.path_bytes;
        at = data + entry.data_bytes;
        if (S_ISREG(entry.mode)) result.error = put_file(path, entry.mode, entry.modified, data, entry.data_bytes);
        else if (S_ISDIR(entry.mode)) result.error = put_folder(path, entry.mode);
        else if (S_ISLNK(entry.mode)) result.error = put_link(path, data, entry.data_bytes);
        else result.error = EINVAL;
        if (result.error) memcpy(result.path, path, strnlen(path, sizeof result.path - 1));
    }
    if (at != end && !result.error) result.error = EBADMSG;
    umask(mask);
    return result;
}

static bool is_folder(int dir, const struct dirent *entry) {
    struct stat info;
    if (entry->d_type != DT_UNKNOWN) return entry->d_type == DT_DIR;
    return !fstatat(dir, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) && S_ISDIR(info.st_mode);
}

/* Removes what can be removed of the folder open at `dir` in one pass. Returns a descriptor of the first subfolder that is not
 * empty, or -1 when the folder is empty now. */
static int sweep(int dir, int *error) {
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    int down = -1;
    struct dirent *entry;
    if (!list) return *error = errno, -1;
    while (down < 0 && !*error && (entry = readdir(list))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        bool folder = is_folder(dir, entry);
        if (!unlinkat(dir, entry->d_name, folder ? AT_REMOVEDIR : 0) || errno == ENOENT) continue;
        if (!folder || (errno != ENOTEMPTY && errno != EEXIST)) *error = errno;
        else if ((down = openat(dir, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0) *error = errno;
    }
    closedir(list);
    return down;
}

struct path_down {            /* which folders lie above the present one */
    ino_t *inodes;
    size_t depth, room;
};

static bool push(struct path_down *above, int dir) {
    struct stat info;
    if (above->depth == above->room) {
        size_t room = above->room ? 2 * above->room : 64;
        ino_t *grown = reallocarray(above->inodes, room, sizeof *grown);
        if (!grown) return false;
        above->inodes = grown;
        above->room = room;
    }
    if (fstat(dir, &info)) return false;
    above->inodes[above->depth++] = info.st_ino;
    return true;
}

/* The folder above; fails if someone moved the present one meanwhile, or we would empty what we were not asked to. */
static int climb(struct path_down *above, int dir) {
    struct stat info;
    int up = openat(dir, "..", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (up >= 0 && !fstat(up, &info) && info.st_ino == above->inodes[--above->depth]) return up;
    if (up >= 0) close(up);
    errno = EBUSY;
    return -1;
}

/* Removes a file, or a folder with everything in it, without recursion: a tree nested a million deep costs three descriptors. */
int remove_tree(const char *path) {
    struct path_down above = {0};
    int error = 0, here, next;
    if (!unlink(path)) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    here = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (here < 0) return -1;
    while (here >= 0) {
        next = sweep(here, &error);
        if (next >= 0 && !push(&above, here)) error = errno;
        if (next < 0 && !error && above.depth && (next = climb(&above, here)) < 0) error = errno;
        close(here);
        if (error && next >= 0) close(next);
        here = error ? -1 : next;
    }
    free(above.inodes);
    if (!error && rmdir(path)) error = errno;
    return error ? (errno = error, -1) : 0;
}
