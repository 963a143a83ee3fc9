/* The files of a guest on their way to a copy of it. In: the moment since which changes count, or a stream. Out: a stream of what was
 * changed; or the same files here, where everything else is as it was there at first.
 *
 * What was changed is known by ctime, which nobody can set. A folder tells every name in it, so that what is gone there goes here. A
 * renamed folder has a new ctime and what is in it has not: below a folder that is new to a changed one, everything counts. Nobody else
 * changes files meanwhile: there all processes stand still, here none runs yet. Both sides are inside sandboxes of the same owner, and
 * the host only carries the stream. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum {
    DEEPEST = 200,
    KEPT_BITS = 01777,           /* setuid and setgid do not travel */
    LONGEST_LISTING = 64 << 20,
};

struct copied {                  /* one entry of the stream, followed by its path and its data */
    uint32_t mode;               /* as in st_mode */
    uint32_t uid, gid, path_bytes;
    int64_t modified_s, modified_ns;
    uint64_t data_bytes;         /* contents, a link's target, or a folder's names, each ended by NUL; none: the folder is complete */
};

static char path[PATH_MAX];      /* of the entry at hand; where something failed, that is it */

/* ---- out ---- */

static struct timespec since;
static unsigned char piece[65536];

void copying_begin(void) { clock_gettime(CLOCK_REALTIME_COARSE, &since); }

static bool is_changed(const struct stat *info) {
    return info->st_ctim.tv_sec > since.tv_sec || (info->st_ctim.tv_sec == since.tv_sec && info->st_ctim.tv_nsec >= since.tv_nsec);
}

static int put(const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes) {
        ssize_t done = write(1, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return -1;
        at += done;
        bytes -= (size_t)done;
    }
    return 0;
}

static int put_entry(const struct stat *info, uint64_t data_bytes) {
    struct copied entry = {info->st_mode, info->st_uid, info->st_gid, (uint32_t)strlen(path), info->st_mtim.tv_sec, info->st_mtim.tv_nsec, data_bytes};
    return put(&entry, sizeof entry) || put(path, entry.path_bytes) ? -1 : 0;
}

/* As many bytes as were announced, whatever becomes of the file. */
static int put_contents(int dir, const char *name) {
    struct stat info;
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), error = 0;
    if (fd < 0 || fstat(fd, &info)) return fd < 0 ? -1 : (close(fd), -1);
    if (!S_ISREG(info.st_mode) || put_entry(&info, (uint64_t)info.st_size)) error = -1;
    for (off_t left = info.st_size; left && !error;) {
        size_t wanted = left < (off_t)sizeof piece ? (size_t)left : sizeof piece;
        ssize_t got = read(fd, piece, wanted);
        if (got <= 0) memset(piece, 0, wanted), got = (ssize_t)wanted;
        error = put(piece, (size_t)got);
        left -= got;
    }
    close(fd);
    return error;
}

/* Without root, what is another's was not written by this sandbox's commands, and could not be put there. */
static bool is_ours(const struct stat *info) { return !geteuid() || info->st_uid == geteuid(); }

static int put_other(int dir, const char *name, const struct stat *info) {
    char target[PATH_MAX];
    if (!is_ours(info)) return 0;
    if (S_ISREG(info->st_mode)) return put_contents(dir, name);
    if (S_ISFIFO(info->st_mode)) return put_entry(info, 0);
    if (!S_ISLNK(info->st_mode)) return 0;
    ssize_t length = readlinkat(dir, name, target, sizeof target);
    return length < 0 || put_entry(info, (uint64_t)length) || put(target, (size_t)length) ? -1 : 0;
}

static int put_folder(int dir, size_t length, const struct stat *info, bool whole, int depth);

/* What the kernel shows as files, what lives no longer than a boot, and what cannot be written stays behind. */
static bool stays(int inner, dev_t outer_device, int depth, const char *name) {
    static const char *const SHOWN[] = {"proc", "sys", "dev"};
    struct statvfs place;
    struct stat info;
    for (size_t i = 0; !depth && i < COUNT(SHOWN); i++)
        if (!strcmp(name, SHOWN[i])) return true;
    if (fstat(inner, &info) || info.st_dev == outer_device || fstatvfs(inner, &place)) return false;
    return place.f_flag & ST_RDONLY || (!depth && !strcmp(name, "run"));
}

static int put_below(int dir, const char *name, size_t length, const struct stat *above, bool changed, bool whole, int depth) {
    struct stat info;
    size_t more = strlen(name);
    int error = 0;
    if (length + 1 + more >= sizeof path) return errno = ENAMETOOLONG, -1;
    path[length] = '/';
    memcpy(path + length + 1, name, more + 1);
    if (fstatat(dir, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;
    if (!S_ISDIR(info.st_mode)) return whole || is_changed(&info) ? put_other(dir, name, &info) : 0;
    int inner = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (inner < 0) return errno == EACCES && geteuid() ? 0 : -1;
    if (!stays(inner, above->st_dev, depth, name))
        error = put_folder(inner, length + 1 + more, &info, whole || (changed && is_changed(&info)), depth + 1);
    close(inner);
    return error;
}

static int list_names(int dir, struct buffer *names) {
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (!list) return -1;
    for (struct dirent *entry; (entry = readdir(list));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) buffer_append(names, entry->d_name, strlen(entry->d_name) + 1);
    closedir(list);
    return 0;
}

static int put_folder(int dir, size_t length, const struct stat *info, bool whole, int depth) {
    bool changed = whole || is_changed(info);
    struct buffer names = {0};
    int error = depth > DEEPEST ? (errno = ELOOP, -1) : list_names(dir, &names);
    bool told = changed && is_ours(info);
    if (!error && told && names.bytes) error = put_entry(info, names.bytes) || put(names.data, names.bytes);
    else if (!error && told) error = put_entry(info, 1) || put("", 1); /* no name at all */
    for (size_t at = 0; at < names.bytes && !error; at += strlen((char *)names.data + at) + 1)
        error = put_below(dir, (char *)names.data + at, length, info, changed, whole, depth);
    free(names.data);
    if (error) return -1;
    path[length] = 0;
    return told ? put_entry(info, 0) : 0;
}

static int copy_out(void) {
    struct stat info;
    int top = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return top < 0 || fstat(top, &info) ? -1 : put_folder(top, 0, &info, false, 0);
}

/* ---- in ---- */

/* Returns 1 when all of it came, 0 at the end of the stream before its first byte, -1 otherwise. */
static int take(void *data, size_t bytes) {
    unsigned char *at = data;
    for (size_t got = 0; got < bytes;) {
        ssize_t done = read(0, at + got, bytes - got);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0 && !got) return 0;
        if (done <= 0) return errno = done ? errno : EBADMSG, -1;
        got += (size_t)done;
    }
    return 1;
}

static int compare(const void *one, const void *other) { return strcmp(*(char *const *)one, *(char *const *)other); }

/* Removes what is here and not among the names. What is in use, such as a file that a pod has mounted there, stays. */
static int keep_only(char *names, size_t bytes) {
    size_t count = 0, length = strlen(path);
    for (size_t i = 0; i < bytes; i++) count += !names[i];
    char **sorted = calloc(count + 1, sizeof *sorted), *at = names;
    struct buffer here = {0};
    int dir = open(length ? path : "/", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), error = 0;
    if (!sorted || dir < 0 || list_names(dir, &here)) error = -1;
    for (size_t i = 0; !error && i < count; at += strlen(at) + 1) sorted[i++] = at;
    if (!error) qsort(sorted, count, sizeof *sorted, compare);
    for (size_t i = 0; !error && i < here.bytes; i += strlen((char *)here.data + i) + 1) {
        char *name = (char *)here.data + i;
        if (bsearch(&name, sorted, count, sizeof *sorted, compare) || length + strlen(name) + 2 > sizeof path) continue;
        sprintf(path + length, "/%s", name);
        if (remove_tree(path) && errno != EBUSY && errno != EROFS && errno != EACCES && errno != EPERM) error = -1;
        path[error ? strlen(path) : length] = 0;
    }
    if (dir >= 0) close(dir);
    free(here.data);
    free(sorted);
    return error;
}

static int take_folder(const struct copied *entry) {
    const char *place = *path ? path : "/";
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {entry->modified_s, entry->modified_ns}};
    struct stat info;
    if (!entry->data_bytes) {
        if (lchown(place, entry->uid, entry->gid) && !geteuid()) return -1;
        return chmod(place, entry->mode & KEPT_BITS) || utimensat(AT_FDCWD, place, times, 0) ? geteuid() ? 0 : -1 : 0;
    }
    if (entry->data_bytes > LONGEST_LISTING) return errno = EBADMSG, -1;
    char *names = malloc(entry->data_bytes);
    if (!names || take(names, entry->data_bytes) != 1) return -1;
    names[entry->data_bytes - 1] = 0;
    bool there = !lstat(place, &info), folder = there && S_ISDIR(info.st_mode);
    int error = there && !folder && unlink(place) ? -1 : 0;
    if (!error) error = folder ? keep_only(names, entry->data_bytes) : mkdir(place, 0700);
    free(names);
    return error;
}

/* Contents that have no place, because one that is in use lies there, are read all the same. */
static int take_file(const struct copied *entry, bool wanted) {
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {entry->modified_s, entry->modified_ns}};
    int fd = wanted ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1, error = 0;
    if (wanted && fd < 0) return -1;
    for (uint64_t left = entry->data_bytes; left && !error;) {
        size_t part = left < sizeof piece ? (size_t)left : sizeof piece;
        if (take(piece, part) != 1) error = -1;
        for (size_t done = 0; !error && wanted && done < part;) {
            ssize_t wrote = write(fd, piece + done, part - done);
            if (wrote <= 0 && errno != EINTR) error = -1;
            else if (wrote > 0) done += (size_t)wrote;
        }
        left -= part;
    }
    if (!error && wanted && fchown(fd, entry->uid, entry->gid) && !geteuid()) error = -1;
    if (!error && wanted && (fchmod(fd, entry->mode & KEPT_BITS) || futimens(fd, times))) error = -1;
    if (fd >= 0) close(fd);
    return error;
}

static int take_link(const struct copied *entry, bool wanted) {
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {entry->modified_s, entry->modified_ns}};
    char target[PATH_MAX] = {0};
    if (!entry->data_bytes || entry->data_bytes >= sizeof target || take(target, entry->data_bytes) != 1) return errno = EBADMSG, -1;
    if (!wanted) return 0;
    if (symlink(target, path) || (lchown(path, entry->uid, entry->gid) && !geteuid())) return -1;
    return utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

static int take_entry(const struct copied *entry) {
    if (S_ISDIR(entry->mode)) return take_folder(entry);
    bool busy = remove_tree(path) && errno != ENOENT;
    if (busy && errno != EBUSY && errno != EROFS) return -1;
    if (S_ISREG(entry->mode)) return take_file(entry, !busy);
    if (S_ISLNK(entry->mode)) return take_link(entry, !busy);
    if (!S_ISFIFO(entry->mode) || entry->data_bytes) return errno = EBADMSG, -1;
    if (busy) return 0;
    return mkfifo(path, entry->mode & KEPT_BITS) || (lchown(path, entry->uid, entry->gid) && !geteuid()) ? -1 : 0;
}

static int copy_in(void) {
    struct copied entry;
    int more;
    umask(0);
    while ((more = take(&entry, sizeof entry)) == 1) {
        if (entry.path_bytes >= sizeof path || (entry.path_bytes && take(path, entry.path_bytes) != 1)) return errno = EBADMSG, -1;
        path[entry.path_bytes] = 0;
        if ((*path != '/' && !S_ISDIR(entry.mode)) || take_entry(&entry)) return -1;
    }
    return more;
}

/* "out" or "in", over standard output or input. Returns an errno; standard error gets the path that it was about. */
int copy_files(const char *direction) {
    errno = 0;
    int error = !strcmp(direction, "out") ? copy_out() : copy_in();
    if (!error) return 0;
    error = errno ? errno : EIO;
    if (write(2, path, strlen(path)) < 0) return error;
    return error;
}
