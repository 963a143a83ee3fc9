/* What a sandbox sees. In: this machine's own programs. Out: a private tree of mounts with nothing else of the host in it.
 *
 * The node is prepared once: the warden leaves the host's tree for a small one of its own,
 *     /programs/{usr,...}  the host's program folders, read-only through an overlay (unlike a bind mount, an overlay never
 *                          connects anyone to a unix socket that lies in it), shared by all sandboxes: one dentry cache
 *     /dev                 six devices, shared and read-only
 *     /skeleton            /etc cut down, and empty folders: the lower layer of every sandbox's root
 *     /proc                the host's, because the kernel grants a new procfs only to those who can see a full one
 * and each sandbox then adds a size-limited tmpfs, one overlay, its own procfs and its own devpts, and pivots into them. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define STAGE "/tmp" /* covered by the warden's own tmpfs in its private mount namespace; any folder would do */
static const char *const PROGRAMS[] = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"};
static const struct {
    const char *name;
    unsigned major, minor;
} DEVICES[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
/* Configuration and sources that an administrator keeps below /usr: not programs. */
static const char *const HIDDEN[] = {"local/etc", "local/src", "src"};

/* World-readable parts of procfs that speak of the host. What only the host's root may read is closed by ownership already. */
static const char *const PROC_FILES[] = {
    "bootconfig", "buddyinfo", "cgroups", "cmdline", "config.gz", "consoles", "crypto", "devices", "diskstats", "dma",
    "execdomains", "interrupts", "iomem", "ioports", "kallsyms", "kcore", "key-users", "keys", "kmsg", "locks", "mdstat", "misc",
    "modules", "mtrr", "partitions", "sched_debug", "schedstat", "softirqs", "swaps", "sysrq-trigger", "timer_list", "vmstat",
    "zoneinfo", "sys/kernel/random/boot_id"};
static const char *const PROC_FOLDERS[] = {"acpi", "asound", "bus", "driver", "dynamic_debug", "fs", "irq", "pressure", "scsi", "tty"};

static int bind(const char *from, const char *to, unsigned long more) {
    return mount(from, to, NULL, MS_BIND | more, NULL);
}

static int seal(const char *at) { /* a bind mount takes flags only in a second step */
    return mount(NULL, at, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

static void hide_below_usr(const char *mask) {
    char path[PATH_MAX];
    for (size_t i = 0; i < COUNT(HIDDEN); i++) {
        snprintf(path, sizeof path, "%s/%s", mask, HIDDEN[i]);
        if (!make_parents(path)) mknod(path, S_IFCHR, makedev(0, 0)); /* an overlay whiteout */
    }
}

static int offer_programs(const struct node *node, const char *name) {
    char from[64], to[64], mask[64], options[256];
    struct stat info;
    snprintf(from, sizeof from, "/%s", name);
    snprintf(to, sizeof to, STAGE "/programs/%s", name);
    snprintf(mask, sizeof mask, STAGE "/mask/%s", name);
    if (lstat(from, &info) || !S_ISDIR(info.st_mode)) return 0; /* a link: the skeleton has the same link */
    if (mkdir(to, 0755) || mkdir(mask, 0755)) return -1;
    if (!strcmp(name, "usr")) hide_below_usr(mask);
    snprintf(options, sizeof options, "lowerdir=%s:%s%s", mask, from, node->rootless ? ",userxattr" : "");
    if (!mount("overlay", to, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, options)) return 0;
    /* Without root, a program folder with another mount below it cannot be a layer. */
    return bind(from, to, MS_REC) || mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) ? -1 : 0;
}

/* A node of our own where the kernel lets us, else the host's, bound. */
static int offer_device(const char *name, unsigned major, unsigned minor, bool rootless) {
    char from[64], to[64];
    snprintf(from, sizeof from, "/dev/%s", name);
    snprintf(to, sizeof to, STAGE "/dev/%s", name);
    if (!rootless && !mknod(to, S_IFCHR | 0666, makedev(major, minor))) return 0;
    int fd = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    close(fd);
    return bind(from, to, 0);
}

static int offer_devices(bool rootless) {
    char to[64];
    if (mount("tmpfs", STAGE "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755")) return -1;
    for (size_t i = 0; i < COUNT(DEVICES); i++)
        if (offer_device(DEVICES[i].name, DEVICES[i].major, DEVICES[i].minor, rootless)) return -1;
    static const char *const links[][2] = {{"pts/ptmx", "ptmx"}, {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"},
                                           {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}};
    for (size_t i = 0; i < COUNT(links); i++) {
        snprintf(to, sizeof to, STAGE "/dev/%s", links[i][1]);
        if (symlink(links[i][0], to)) return -1;
    }
    if (mkdir(STAGE "/dev/pts", 0755) || mkdir(STAGE "/dev/shm", 01777)) return -1;
    return mount(NULL, STAGE "/dev", NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755");
}

static int put_text(const char *path, const char *text) {
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0444);
    if (fd < 0) return -1;
    ssize_t done = write(fd, text, strlen(text));
    close(fd);
    return done < 0 ? -1 : 0;
}

static int put_statistics(void) { /* what ps and top insist on reading, with the host's load left out */
    char text[256];
    struct timespec wall, up;
    clock_gettime(CLOCK_REALTIME, &wall);
    clock_gettime(CLOCK_BOOTTIME, &up);
    snprintf(text, sizeof text, "cpu  0 0 0 1 0 0 0 0 0 0\ncpu0 0 0 0 1 0 0 0 0 0 0\nintr 0\nctxt 0\nbtime %lld\nprocesses 1\n",
             (long long)(wall.tv_sec - up.tv_sec));
    return put_text("/stat", text) || put_text("/loadavg", "0.00 0.00 0.00 1/1 1\n") ? -1 : 0;
}

static int fill_skeleton(const struct node *node, const struct message *skeleton) {
    filesystem_identity(node->uid_base, node->uid_base);
    struct batch_result result = batch_unpack(skeleton->payload, skeleton->payload_bytes);
    filesystem_identity(0, 0);
    if (result.error) return errno = result.error, -1;
    return node->rootless ? 0 : chown("/skeleton/home/user", node->uid_base + 1000, node->uid_base + 1000);
}

/* Leaves the host's tree for the warden's own. Returns NULL, or what failed with errno set. */
const char *mounts_prepare_node(const struct node *node, const struct message *skeleton) {
    static const char *const folders[] = {"programs", "mask", "dev", "proc", "skeleton", "new", "scratch", "void"};
    char path[64];
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return "private mounts";
    layers_hold(node);
    if (mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755")) return "tmpfs";
    umask(0);
    for (size_t i = 0; i < COUNT(folders); i++) {
        snprintf(path, sizeof path, STAGE "/%s", folders[i]);
        if (mkdir(path, 0755)) return "folders";
    }
    for (size_t i = 0; i < COUNT(PROGRAMS); i++)
        if (offer_programs(node, PROGRAMS[i])) return "programs";
    if (offer_devices(node->rootless)) return "devices";
    if (bind("/proc", STAGE "/proc", MS_REC)) return "proc";
    if (chdir(STAGE) || syscall(SYS_pivot_root, ".", ".")) return "pivot_root";
    if (umount2(".", MNT_DETACH) || chdir("/")) return "leaving the host's tree";
    if (put_statistics()) return "statistics";
    if (!node->rootless && chown("/skeleton", node->uid_base, node->uid_base)) return "skeleton";
    return fill_skeleton(node, skeleton) ? "skeleton" : NULL;
}

/* What the node's own tree is needed for. */
static const char *mask_folders(uint64_t memory_bytes) {
    char path[64], text[256];
    unsigned long long kib = memory_bytes / 1024;
    snprintf(text, sizeof text, "MemTotal: %14llu kB\nMemFree: %15llu kB\nMemAvailable: %10llu kB\nBuffers: %15d kB\nCached: %16d kB\n"
             "SwapTotal: %13d kB\nSwapFree: %14d kB\n", kib, kib, kib, 0, 0, 0, 0);
    if (put_text("/scratch/meminfo", text)) return "meminfo";
    if (bind("/scratch/meminfo", "proc/meminfo", 0) || bind("/loadavg", "proc/loadavg", 0) || bind("/stat", "proc/stat", 0))
        return "proc statistics";
    for (size_t i = 0; i < COUNT(PROC_FOLDERS); i++) {
        snprintf(path, sizeof path, "proc/%s", PROC_FOLDERS[i]);
        if (bind("/void", path, 0) && errno != ENOENT) return PROC_FOLDERS[i];
    }
    return NULL;
}

/* In the sandbox's own root: hides the files of procfs that speak of the host, and makes the kernel's settings unwritable. Returns NULL,
 * or what failed with errno set. */
const char *mounts_mask_proc(void) {
    char path[64];
    struct stat info;
    if (stat("/dev/null", &info)) return "dev/null"; /* below, a missing source would look like a file that this kernel lacks */
    if (bind("/proc/sys", "/proc/sys", MS_REC) || seal("/proc/sys")) return "proc/sys";
    for (size_t i = 0; i < COUNT(PROC_FILES); i++) {
        snprintf(path, sizeof path, "/proc/%s", PROC_FILES[i]);
        if (bind("/dev/null", path, 0) && errno != ENOENT) return PROC_FILES[i];
    }
    return NULL;
}

static const char *make_workdir(const char *workdir, uint32_t who) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "/new%s", workdir) >= sizeof path) return errno = ENAMETOOLONG, "workdir";
    if (make_parents(path) || (mkdir(path, 0755) && errno != EEXIST)) return "workdir";
    return who && chown(path, UID_OF(who), GID_OF(who)) ? "workdir" : NULL;
}

static int mount_root(const struct root *root) {
    char option[4096];
    if (!root->layers)
        return mount("overlay", "/new", "overlay", MS_NOSUID | MS_NODEV,
                     "userxattr,lowerdir=/skeleton,upperdir=/scratch/upper,workdir=/scratch/work");
    if (chdir("/layers") || layers_option(root->layers, root->on_host, option, sizeof option)) return -1;
    return mount("overlay", "/new", "overlay", MS_NOSUID | MS_NODEV, option);
}

static const char *bind_programs(bool trusted) {
    for (size_t i = 0; i < COUNT(PROGRAMS); i++) {
        char from[64];
        struct stat info;
        snprintf(from, sizeof from, "/programs/%s", PROGRAMS[i]);
        if (!trusted && (lstat(PROGRAMS[i], &info) || !S_ISDIR(info.st_mode))) continue; /* a link that a layer put there */
        if (bind(from, PROGRAMS[i], 0) && errno != ENOENT) return PROGRAMS[i];
    }
    return NULL;
}

/* In a fresh mount namespace: builds the sandbox's root in /new and pivots into it; what the sandbox writes stays reachable through
 * root->written. Returns NULL, or what failed with errno set. */
const char *mounts_enter_sandbox(uint64_t disk_bytes, uint64_t memory_bytes, struct root *root) {
    char text[128];
    const char *failed;
    snprintf(text, sizeof text, "size=%llu,nr_inodes=%llu,mode=755", (unsigned long long)disk_bytes + 4096 /* meminfo */,
             (unsigned long long)(disk_bytes / 4096 + 1024));
    if (mount("tmpfs", "/scratch", "tmpfs", MS_NOSUID | MS_NODEV, text)) return "disk";
    if (mkdir("/scratch/upper", 0755) || mkdir("/scratch/work", 0755) || mkdir("/scratch/shm", 0700) ||
        chmod("/scratch/shm", 01777))
        return "disk folders";
    if (mount_root(root)) return "overlay";
    if (chdir("/new")) return "root";
    if (root->layers && (failed = layers_mount_points())) return failed;
    if ((!root->layers || root->on_host) && (failed = bind_programs(!root->layers))) return failed;
    if (bind("/dev", "dev", MS_REC)) return "dev";
    if (mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")) return "dev/pts";
    if (bind("/scratch/shm", "dev/shm", 0)) return "dev/shm";
    if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return "proc";
    if ((failed = mask_folders(memory_bytes))) return failed;
    if (!root->layers && (failed = make_workdir(root->workdir, root->who))) return failed;
    root->written = open("/scratch/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root->written < 0 || syscall(SYS_pivot_root, ".", ".")) return "pivot_root";
    if (umount2(".", MNT_DETACH) || chdir("/")) return "leaving the node's tree";
    return root->layers ? layers_make_workdir(root->workdir, root->who) : NULL;
}
