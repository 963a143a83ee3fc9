/* Rights of the agent and of commands. In: a process with every capability over its own user namespace. Out: one with few, or none. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What in-sandbox root keeps: owning files and changing identity. Nothing that configures a kernel or a network. */
static const int KEPT[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP};

static int lower_limit(int resource, rlim_t value) {
    struct rlimit limit;
    if (getrlimit(resource, &limit)) return -1;
    if (limit.rlim_max > value) limit.rlim_max = value;
    if (limit.rlim_cur > limit.rlim_max) limit.rlim_cur = limit.rlim_max;
    return setrlimit(resource, &limit);
}

/* What commands may have open. Once the agent's own descriptors have their low numbers: among thousands of sandboxes the inherited ones
 * have none. */
int privileges_limit_descriptors(void) {
    struct rlimit files = {1024, 65536};
    if (lower_limit(RLIMIT_NOFILE, files.rlim_max) || getrlimit(RLIMIT_NOFILE, &files)) return -1;
    if (files.rlim_cur > 1024) files.rlim_cur = 1024;
    return setrlimit(RLIMIT_NOFILE, &files);
}

static int set_limits(const struct node *node, const struct warden_request *limits) {
    if (lower_limit(RLIMIT_CORE, 0)) return -1;
    /* Counted per user namespace, and so per sandbox, because it is set inside of it. */
    if (lower_limit(RLIMIT_NPROC, limits->processes)) return -1;
    /* Without control groups this is the only bound on memory there is, and it holds per process. */
    return node->cgroup_version == 0 ? lower_limit(RLIMIT_AS, limits->memory_bytes) : 0;
}

/* The agent's own: limits, KEPT as bounding set, unreadable memory, no new privileges. */
int privileges_reduce_agent(const struct node *node, const struct warden_request *limits) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    uint32_t given = ~0u;
    if (set_limits(node, limits)) return -1;
    if (guest && !syscall(SYS_capget, &header, data)) given = data[0].permitted; /* whoever made its sandbox may have kept some back */
    data[0] = data[1] = (struct __user_cap_data_struct){0};
    for (size_t i = 0; i < COUNT(KEPT); i++) data[0].effective |= 1u << KEPT[i];
    for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
        if (capability > 31 || !(data[0].effective & 1u << capability)) prctl(PR_CAPBSET_DROP, capability);
    data[0].permitted = data[0].effective &= given;
    if (syscall(SYS_capset, &header, data)) return -1;
    if (prctl(PR_SET_DUMPABLE, 0)) return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

/* A command's, just before execve: another identity and an empty bounding set. Raw system calls: the caller shares our memory. */
int privileges_become(uint32_t uid, uint32_t gid) {
    for (size_t i = 0; i < COUNT(KEPT); i++)
        if (uid || KEPT[i] == CAP_SETPCAP) prctl(PR_CAPBSET_DROP, KEPT[i]);
    if (uid == getuid() && gid == getgid()) return 0;
    if (syscall(SYS_setgroups, 0, NULL) || syscall(SYS_setresgid, gid, gid, gid)) return -1;
    return (int)syscall(SYS_setresuid, uid, uid, uid);
}

/* Ties the agent's life to the warden's and keeps its memory unreadable. Every change of identity undoes both. */
int privileges_bind_to_parent(void) {
    return prctl(PR_SET_DUMPABLE, 0) || prctl(PR_SET_PDEATHSIG, SIGKILL) ? -1 : 0;
}

/* Whose rights file operations use; dropping root's also drops its capabilities over files until it comes back. */
int filesystem_identity(uint32_t uid, uint32_t gid) {
    if (guest) return uid == geteuid() && gid == getegid() ? 0 : privileges_become(uid, gid); /* in a process of its own (agent.c) */
    syscall(SYS_setfsgid, gid);
    syscall(SYS_setfsuid, uid);
    return syscall(SYS_setfsuid, -1) == (long)uid ? 0 : (errno = EPERM, -1);
}

/* The agent's own again. */
void own_identity(void) {
    filesystem_identity(getuid(), getgid());
    privileges_bind_to_parent();
}
