/* One sandbox from nothing. In: a CREATE request. Out: a child in six fresh namespaces that becomes the sandbox's init and agent,
 * and an answer with the agent's socket. The warden goes on as soon as the child is on its way; the child reports by AGENT_READY.
 *
 * The last part of its work happens while that report travels: where a sandbox of this node has come up whole before, the child
 * reports once its files are in place, and only then masks what /proc says of the host, gives up its rights and installs its filter.
 * No request is read before all of that is done. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const uint64_t NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;

/* Joins all groups and leaves the one for cpu time (version 1) again: commands join that, each for itself, while the agent and its
 * supervisors stay outside, where no fork bomb can keep them from being scheduled. */
static const char *join_cgroups(const struct node *node, struct cgroup *group) {
    for (size_t i = 0; i < COUNT(group->tasks); i++)
        if (group->tasks[i] >= 0 && write(group->tasks[i], "0", 1) != 1) return "cgroups";
    if (unshare(CLONE_NEWCGROUP)) return "cgroup namespace"; /* its root is where we are now: commands see "/" */
    return node->outer_cpu_tasks >= 0 && write(node->outer_cpu_tasks, "0", 1) != 1 ? "cgroups" : NULL;
}

/* From clone to a root of its own, in which files can be placed. Returns what failed, with errno set, or NULL. */
static const char *enter(const struct node *node, const struct warden_request *request, struct root *root, struct cgroup *group, int egress) {
    const char *failed;
    if ((failed = join_cgroups(node, group))) return failed;
    if (!node->rootless && (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))) return "identity";
    umask(022);
    root->who = node->rootless ? 0 : request->who;
    if ((failed = mounts_enter_sandbox(request->disk_bytes, request->memory_bytes, root))) return failed;
    if (sethostname("sandbox", 7)) return "hostname";
    if (node->rootless && (failed = network_raise_loopback())) return failed;
    if (egress >= 0 && node->rootless && (failed = egress_open(egress, request->flags))) return failed;
    return egress >= 0 && egress_name_server() ? "resolv.conf" : NULL;
}

/* The descriptor over which the host process gets the ways out, -1 when there are none to be. */
static int egress_socket(const struct warden_request *request, const struct message *message) {
    return request->flags & (EGRESS_ALLOW | EGRESS_OPEN) && message->fd_count ? message->fds[0] : -1;
}

/* Enters the network in which a sandbox will be born. `network` becomes its descriptor where another sandbox may get it afterwards. */
static const char *enter_network(const struct warden_request *request, const struct message *message, int *network) {
    int egress = egress_socket(request, message);
    if (egress >= 0) return network_enter_own() ? "network namespace" : egress_open(egress, request->flags);
    return (*network = network_enter()) < 0 ? "network namespace" : NULL;
}

static struct batch_result place_files(uint32_t who, const unsigned char *payload, size_t bytes) {
    if (filesystem_identity(UID_OF(who), GID_OF(who))) return (struct batch_result){.error = errno};
    struct batch_result result = batch_unpack(payload, bytes);
    own_identity();
    return result;
}

/* Blocks the signals that an agent and its supervisors read, and returns where they read them. */
int signal_descriptor(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    sigprocmask(SIG_SETMASK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Leaves only the agent's descriptors open: 0-2 on /dev/null, 3 its socket, 4 its signals, 5 the task list of the commands' cpu
 * group (/dev/null without one), 6 the folder of all that is written. */
static int settle_descriptors(int socket, int cpu_tasks, int written) {
    int tasks = fcntl(cpu_tasks, F_DUPFD_CLOEXEC, 16);
    if ((written = fcntl(written, F_DUPFD_CLOEXEC, 16)) < 0) return -1;
    if (socket != 3 && dup3(socket, 3, O_CLOEXEC) < 0) return -1;
    if (tasks < 0 && (tasks = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0) return -1;
    if (tasks != CPU_TASKS && dup3(tasks, CPU_TASKS, O_CLOEXEC) < 0) return -1;
    if (dup3(written, WRITTEN, O_CLOEXEC) < 0) return -1;
    if (syscall(SYS_close_range, WRITTEN + 1, ~0u, 0)) return -1;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0) return -1;
    if (null > WRITTEN) close(null);
    int signals = signal_descriptor();
    return signals < 0 || (signals != 4 && dup3(signals, 4, O_CLOEXEC) < 0) || (signals > WRITTEN && close(signals)) ? -1 : 0;
}

/* From there to a process that may serve: nothing of the host to read, few rights, few system calls, the agent's descriptors only. */
static const char *close_in(const struct node *node, const struct warden_request *request, const struct root *root,
                            const struct cgroup *group, int *socket) {
    const char *failed;
    if ((failed = mounts_mask_proc())) return failed;
    if (privileges_reduce_agent(node, request)) return "privileges";
    if (settle_descriptors(*socket, group->tasks[0], root->written) || privileges_limit_descriptors()) return "descriptors";
    *socket = 3;
    if (filter_install()) return "system-call filter";
    return privileges_bind_to_parent() ? "parent death signal" : NULL;
}

static void report(int socket, int error, const char *text, uint32_t flags) {
    struct agent_reply ready = {.op = AGENT_READY, .status = error, .flags = flags};
    wire_send(socket, &ready, sizeof ready, text, strlen(text), -1);
}

static void place_and_report(int socket, uint32_t who, const unsigned char *files, size_t bytes) {
    struct batch_result result = place_files(who, files, bytes);
    report(socket, result.error, result.path, 0);
}

_Noreturn static void child(const struct node *node, const struct warden_request *request, const struct message *message,
                            struct cgroup *group, int socket, int go) {
    struct root root = {.workdir = (const char *)message->payload, .on_host = request->flags & CREATE_ON_HOST};
    size_t head_bytes = strlen(root.workdir) + 1;
    if (request->flags & CREATE_IMAGE) {
        root.layers = root.workdir + head_bytes;
        head_bytes += strlen(root.layers) + 1;
    }
    const unsigned char *files = message->payload + head_bytes;
    size_t bytes = message->payload_bytes - head_bytes;
    bool early = request->flags & CREATE_PROVEN;
    char byte;
    if (read(go, &byte, 1) != 1) _exit(1);
    const char *failed = enter(node, request, &root, group, egress_socket(request, message));
    if (!failed && early) place_and_report(socket, request->who, files, bytes);
    if (!failed) failed = close_in(node, request, &root, group, &socket);
    if (failed) {
        report(socket, errno, failed, NOT_STARTED);
        _exit(1);
    }
    if (!early) place_and_report(socket, request->who, files, bytes);
    agent_serve(3, 4);
}

static int write_maps(const struct node *node, uint32_t who, pid_t pid) {
    char path[64], map[64];
    snprintf(map, sizeof map, "0 %u 65536", node->uid_base);
    static const char *const files[] = {"setgroups", "gid_map", "uid_map"};
    for (size_t i = node->rootless ? 0 : 1; i < COUNT(files); i++) {
        if (node->rootless) snprintf(map, sizeof map, "%u 0 1", i == 1 ? GID_OF(who) : UID_OF(who));
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        if (write_text(AT_FDCWD, path, i ? map : "deny")) return -1;
    }
    return 0;
}

/* Whether the texts at the start of the payload end within it. */
static bool whole(const struct warden_request *request, const struct message *message) {
    const unsigned char *end = message->payload + message->payload_bytes, *at = message->payload;
    for (int texts = request->flags & CREATE_IMAGE ? 2 : 1; texts; texts--, at++)
        if (at >= end || !(at = memchr(at, 0, (size_t)(end - at)))) return false;
    return message->payload_bytes >= 2;
}

/* Starts a sandbox and answers the request, with an error or with the agent's socket. */
void spawn_sandbox(struct node *node, const struct warden_request *request, const struct message *message, uint32_t slot,
                   struct sandbox *sandbox) {
    struct warden_reply reply = {.op = WARDEN_CREATE, .sequence = request->sequence, .slot = slot};
    struct cgroup group;
    int ends[2] = {-1, -1}, go[2] = {-1, -1};
    const char *failed = NULL;
    long pid = -1;
    int network = -1;
    bool begun = false;
    if (!whole(request, message)) failed = "request", errno = EBADMSG;
    else if (request->flags & CREATE_IMAGE && (failed = layers_attach(node))) {
    } else if (cgroup_make(node, slot, request, &group, &sandbox->group)) failed = "cgroups";
    else {
        begun = true;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) || pipe2(go, O_CLOEXEC)) failed = "descriptors";
        struct clone_args args = {.flags = NAMESPACES | CLONE_PIDFD, .pidfd = (uintptr_t)&sandbox->pidfd, .exit_signal = SIGCHLD};
        if (node->cgroup_version == 2) {
            args.flags |= CLONE_INTO_CGROUP;
            args.cgroup = (uint64_t)group.dirs[0];
        }
        if (node->rootless) args.flags |= CLONE_NEWNET;
        else if (!failed) failed = enter_network(request, message, &network);
        if (!failed && (pid = syscall(SYS_clone3, &args, sizeof args)) < 0) failed = "namespaces";
        if (pid == 0) {
            close(go[1]);
            close(ends[0]);
            child(node, request, message, &group, ends[1], go[0]);
        }
        if (!node->rootless) {
            int error = errno;
            network_leave();
            errno = error;
        }
        if (!failed && write_maps(node, request->who, (pid_t)pid)) failed = "id maps";
        if (!failed && write(go[1], "", 1) != 1) failed = "start";
        int error = errno;
        cgroup_close(&group);
        errno = error;
    }
    if (failed) {
        reply.error = errno;
        snprintf(reply.stage, sizeof reply.stage, "%s", failed);
        if (pid > 0) kill((pid_t)pid, SIGKILL);
        else if (begun) {
            cgroup_remove(node, slot);
            sandbox->group = (struct kept_group){0};
        }
    }
    reply.pid = (int32_t)pid;
    if (pid <= 0) network_release(network);
    *sandbox = (struct sandbox){
        .pid = pid > 0 ? (pid_t)pid : 0, .pidfd = sandbox->pidfd, .network = network, .wanted = failed && pid > 0, .group = sandbox->group};
    wire_send(node->control, &reply, sizeof reply, NULL, 0, failed ? -1 : ends[0]);
    for (int i = 0; i < 2; i++) {
        if (ends[i] >= 0) close(ends[i]);
        if (go[i] >= 0) close(go[i]);
    }
}
