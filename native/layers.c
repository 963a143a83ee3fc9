/* Sandboxes that start from an image. In: names of layers in the owner's image store. Out: a root of which they are the read-only
 * lower layers, shared with every other sandbox that uses them; nothing is copied.
 *
 * The store's folder is kept open as a detached mount from before the warden leaves the host's tree, and attached to the warden's own
 * when the first image is asked for: sandboxes without one pay nothing. On disk, layers are owned by ids from 0 on, whatever range of
 * ids sandboxes get; the mount maps one to the other.
 *
 * An image is hostile. All its links point where they like, so nothing is mounted or made below its root by a path that could pass
 * through one: mount points are made folders first, and the workdir is looked up inside the root. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STORE "/../../images/layers" /* from the owner's state folder */
static int held = -1;
static bool attached;

/* Before the warden leaves the host's tree. Without a store, images are refused later. By name: the descriptor of the state folder
 * belongs to the host's mount namespace, whose mounts cannot be cloned from here. */
void layers_hold(const struct node *node) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", node->state);
    ssize_t length = readlink(link, path, sizeof path - sizeof STORE);
    if (length <= 0) return;
    memcpy(path + length, STORE, sizeof STORE);
    held = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
}

/* A user namespace with the ids of sandboxes, held by nobody but the returned descriptor. */
static int id_range(const struct node *node) {
    char path[64], map[64], byte;
    int ready[2], fd = -1, status;
    if (pipe2(ready, O_CLOEXEC)) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWUSER) || prctl(PR_SET_PDEATHSIG, SIGKILL) || write(ready[1], "", 1) != 1) _exit(1);
        for (;;) pause();
    }
    close(ready[1]);
    snprintf(map, sizeof map, "0 %u 65536", node->uid_base);
    bool made = pid > 0 && read(ready[0], &byte, 1) == 1;
    static const char *const files[] = {"uid_map", "gid_map"};
    for (size_t i = 0; i < COUNT(files) && made; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        made = !write_text(AT_FDCWD, path, map);
    }
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (made) fd = open(path, O_RDONLY | O_CLOEXEC);
    int error = errno;
    close(ready[0]);
    if (pid > 0) {
        kill(pid, SIGKILL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    }
    errno = error;
    return fd;
}

static int close_for_writing(const struct node *node) {
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
    int range = -1;
    if (!node->rootless) {
        if ((range = id_range(node)) < 0) return -1;
        attributes.attr_set |= MOUNT_ATTR_IDMAP;
        attributes.userns_fd = (uint64_t)range;
    }
    long failed = syscall(SYS_mount_setattr, held, "", AT_EMPTY_PATH, &attributes, sizeof attributes);
    int error = errno;
    if (range >= 0) close(range);
    errno = error;
    return (int)failed;
}

/* Makes the store visible to sandboxes that are created from now on. Returns NULL, or what failed with errno set. */
const char *layers_attach(const struct node *node) {
    if (attached) return NULL;
    if (held < 0) return errno = ENOENT, "image store";
    if (close_for_writing(node)) return "image store's ids";
    if (mkdir("/layers", 0755) && errno != EEXIST) return "image store";
    if (syscall(SYS_move_mount, held, "", AT_FDCWD, "/layers", MOVE_MOUNT_F_EMPTY_PATH)) return "image store";
    attached = true;
    return NULL;
}

/* The option of an overlay whose lower layers are `layers` (names joined by ':', the topmost first), above the skeleton if asked.
 * Returns NULL, or what is wrong with them. */
const char *layers_option(const char *layers, bool on_skeleton, char *option, size_t room) {
    size_t length = strlen(layers);
    if (!length || strspn(layers, "0123456789abcdef:") != length) return errno = EBADMSG, "layers";
    int used = snprintf(option, room, "userxattr,lowerdir=%s%s,upperdir=/scratch/upper,workdir=/scratch/work", layers,
                        on_skeleton ? ":/skeleton" : "");
    return used < 0 || (size_t)used >= room ? (errno = E2BIG, "layers") : NULL;
}

/* In the image's root, which nobody else is in yet: a folder at `name` for a mount, whatever the image has there. */
static int make_mount_point(const char *name) {
    struct stat info;
    if (!lstat(name, &info) && S_ISDIR(info.st_mode)) return 0;
    if (unlink(name) && errno != ENOENT) return -1;
    return mkdir(name, 0755);
}

const char *layers_mount_points(void) {
    static const char *const names[] = {"proc", "dev", "sys"};
    for (size_t i = 0; i < COUNT(names); i++)
        if (make_mount_point(names[i])) return names[i];
    return NULL;
}

static int find_folder(const char *path) {
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* Inside the new root: makes the folders of `path` that are missing, through whatever links the image has. What was there already
 * keeps its owner. */
const char *layers_make_workdir(const char *path, uint32_t who) {
    char part[PATH_MAX];
    int above = find_folder("/"), here = -1;
    if (strlen(path) >= sizeof part) return errno = ENAMETOOLONG, "workdir";
    for (size_t end = 1; above >= 0 && path[1]; end++) {
        if (path[end] && path[end] != '/') continue;
        memcpy(part, path, end);
        part[end] = 0;
        bool made = false;
        if ((here = find_folder(part)) < 0 && errno == ENOENT) {
            made = !mkdirat(above, strrchr(part, '/') + 1, 0755);
            here = find_folder(part);
        }
        close(above);
        above = here;
        if (here >= 0 && made && !path[end] && who && fchown(here, UID_OF(who), GID_OF(who))) return close(here), "workdir";
        if (!path[end]) break;
    }
    if (above < 0) return "workdir";
    close(above);
    return NULL;
}
