/* Limits by control groups. In: the node's cgroup folders and a sandbox's limits. Out: one folder per controller (v1: cpu, memory,
 * pids; v2: one for all), joined by the sandbox's first process. After its last the folders wait a moment for the slot's next sandbox,
 * unless something happened in them that it could notice: making and removing folders costs 3 % of all time in a training step. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CPU, MEMORY, PIDS }; /* order of a v1 node's folders */

static int write_number(int dir, const char *file, unsigned long long number) {
    char text[32];
    snprintf(text, sizeof text, "%llu", number);
    return write_text(dir, file, text);
}

static int limit_v1(const struct warden_request *limits, const struct cgroup *group) {
    if (limits->cpu_us && write_number(group->dirs[CPU], "cpu.cfs_quota_us", limits->cpu_us)) return -1;
    if (write_number(group->dirs[MEMORY], "memory.limit_in_bytes", limits->memory_bytes)) return -1;
    return write_number(group->dirs[PIDS], "pids.max", limits->processes);
}

static int limit_v2(const struct warden_request *limits, const struct cgroup *group) {
    char quota[48];
    snprintf(quota, sizeof quota, "%u 100000", limits->cpu_us);
    if (limits->cpu_us && write_text(group->dirs[0], "cpu.max", quota)) return -1;
    if (write_number(group->dirs[0], "memory.max", limits->memory_bytes)) return -1;
    write_text(group->dirs[0], "memory.swap.max", "0"); /* absent without swap accounting */
    return write_number(group->dirs[0], "pids.max", limits->processes);
}

static bool same_limits(const struct kept_group *kept, const struct warden_request *limits) {
    return kept->exists && kept->memory_bytes == limits->memory_bytes && kept->processes == limits->processes && kept->cpu_us == limits->cpu_us;
}

/* Makes the folders of `slot`, or takes the ones that were kept, and limits them. Returns 0, or -1 with errno and nothing left behind. */
int cgroup_make(const struct node *node, uint32_t slot, const struct warden_request *limits, struct cgroup *group, struct kept_group *kept) {
    char name[16];
    bool fresh = !same_limits(kept, limits);
    if (kept->exists && fresh) cgroup_remove(node, slot);
    snprintf(name, sizeof name, "%u", slot);
    for (size_t i = 0; i < COUNT(group->dirs); i++) group->dirs[i] = group->tasks[i] = -1;
    *kept = (struct kept_group){.memory_bytes = limits->memory_bytes, .processes = limits->processes, .cpu_us = limits->cpu_us,
                                .spent_us = fresh ? 0 : kept->spent_us};
    for (int i = 0; i < node->cgroup_count; i++) {
        if (fresh && mkdirat(node->cgroup_roots[i], name, 0755) && errno != EEXIST) goto fail;
        group->dirs[i] = openat(node->cgroup_roots[i], name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (group->dirs[i] < 0) goto fail;
        if (node->cgroup_version == 1 && (group->tasks[i] = openat(group->dirs[i], "tasks", O_WRONLY | O_CLOEXEC)) < 0) goto fail;
    }
    kept->exists = node->cgroup_count > 0;
    if (!fresh || node->cgroup_version == 0 || !(node->cgroup_version == 1 ? limit_v1 : limit_v2)(limits, group)) return 0;
fail:;
    int error = errno;
    cgroup_close(group);
    cgroup_remove(node, slot);
    kept->exists = false;
    errno = error;
    return -1;
}

void cgroup_close(struct cgroup *group) {
    for (size_t i = 0; i < COUNT(group->dirs); i++) {
        if (group->dirs[i] >= 0) close(group->dirs[i]);
        if (group->tasks[i] >= 0) close(group->tasks[i]);
        group->dirs[i] = group->tasks[i] = -1;
    }
}

/* The number after `key` (or the file's first number when NULL) in a small cgroup file; 0 when there is none. */
static uint64_t read_number(int root, const char *name, const char *file, const char *key) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "%s/%s", name, file);
    int fd = openat(root, path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    const char *at = key ? strstr(text, key) : text;
    return at ? strtoull(at + (key ? strlen(key) : 0), NULL, 10) : 0;
}

static void remove_folder(int root, const char *name) {
    for (int tries = 0; unlinkat(root, name, AT_REMOVEDIR) && errno == EBUSY && tries < 200; tries++) usleep(1000);
}

/* Notes what the sandbox in `slot` used, which is over. */
static void note_usage(const struct node *node, const char *name, struct warden_reply *account, struct kept_group *kept) {
    if (node->cgroup_version == 1)
        account->oom_kills = read_number(node->cgroup_roots[MEMORY], name, "memory.oom_control", "oom_kill ");
    if (node->cgroup_version == 2) {
        account->oom_kills = read_number(node->cgroup_roots[0], name, "memory.events", "oom_kill ");
        uint64_t spent_us = read_number(node->cgroup_roots[0], name, "cpu.stat", "usage_usec ");
        account->cpu_us = spent_us - kept->spent_us;
        kept->spent_us = spent_us;
    }
}

/* The sandbox in `slot` is over: notes what it used, and keeps its folders when nothing was ever killed or hurried in them. */
void cgroup_release(const struct node *node, uint32_t slot, struct warden_reply *account, struct kept_group *kept) {
    char name[16];
    snprintf(name, sizeof name, "%u", slot);
    note_usage(node, name, account, kept);
    if (kept->exists && !kept->touched && !account->oom_kills) {
        kept->recent = true;
        return;
    }
    cgroup_remove(node, slot);
    *kept = (struct kept_group){0};
}

/* Removes the folders of `slot`, if they were kept and nobody came for them since the last call. Returns whether there still are some. */
bool cgroup_expire(const struct node *node, uint32_t slot, struct kept_group *kept) {
    if (!kept->exists) return false;
    if (kept->recent) return kept->recent = false, true;
    cgroup_remove(node, slot);
    *kept = (struct kept_group){0};
    return false;
}

/* Removes the folders of `slot`. */
void cgroup_remove(const struct node *node, uint32_t slot) {
    char name[16];
    snprintf(name, sizeof name, "%u", slot);
    for (int i = 0; i < node->cgroup_count; i++) remove_folder(node->cgroup_roots[i], name);
}

/* Lets a sandbox's processes die without waiting for cpu time (no quota, a large share), or holds it to its quota again. */
void cgroup_hurry(const struct node *node, uint32_t slot, bool hurry, uint32_t cpu_us) {
    char path[64], quota[48];
    bool v1 = node->cgroup_version == 1;
    if (node->cgroup_version == 0) return;
    if (hurry || !cpu_us) snprintf(quota, sizeof quota, v1 ? "-1" : "max 100000");
    else snprintf(quota, sizeof quota, v1 ? "%u" : "%u 100000", cpu_us);
    snprintf(path, sizeof path, "%u/%s", slot, v1 ? "cpu.cfs_quota_us" : "cpu.max");
    write_text(node->cgroup_roots[0], path, quota);
    snprintf(path, sizeof path, "%u/%s", slot, v1 ? "cpu.shares" : "cpu.weight");
    write_text(node->cgroup_roots[0], path, hurry ? (v1 ? "262144" : "10000") : (v1 ? "1024" : "100"));
}

/* All sandboxes are dying: together they get what cpu time they need for that, however busy the machine is. */
void cgroup_hurry_all(const struct node *node) {
    if (node->cgroup_version == 1) write_text(node->cgroup_roots[0], "cpu.shares", "262144");
    if (node->cgroup_version == 2) write_text(node->cgroup_roots[0], "cpu.weight", "10000");
}

/* Removes the node's own folders, which are empty by now. A folder is removed through its parent. */
void cgroup_remove_roots(const struct node *node) {
    for (int i = 0; i < node->cgroup_count; i++) {
        char path[64], target[4096];
        snprintf(path, sizeof path, "/proc/self/fd/%d", node->cgroup_roots[i]);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length <= 0) continue;
        target[length] = 0;
        const char *name = strrchr(target, '/');
        int parent = openat(node->cgroup_roots[i], "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (name && parent >= 0) remove_folder(parent, name + 1);
        if (parent >= 0) close(parent);
    }
}
