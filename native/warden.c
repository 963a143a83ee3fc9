/* The warden of one node: started once by the host process, makes and removes sandboxes for it, and outlives it by a moment.
 *
 * In: `warden CONTROL_FD STATE_FD UID_BASE CGROUP_VERSION CGROUP_FD...`, then messages (protocol.h) on the control socket.
 * Out: sandboxes. When the host process ends, however it ends, the warden kills every sandbox, removes their cgroups and the
 * host process's state folder, and exits. It holds no file of the host: its mount namespace has only what sandboxes may see. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    EXPIRY_US = 2000000, /* what could serve the next sandbox waits once to twice as long for it */
    MOST_DESCRIPTORS = 1 << 20
};

static struct node node;
static struct sandbox *sandboxes;
static uint32_t slots;
static bool keeps_something;

int write_text(int dir, const char *path, const char *text) {
    int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t done = write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return done < 0 ? -1 : 0;
}

static uint32_t free_slot(void) {
    for (uint32_t i = 0; i < slots; i++)
        if (!sandboxes[i].pid) return i;
    uint32_t more = slots ? 2 * slots : 64;
    struct sandbox *grown = reallocarray(sandboxes, more, sizeof *grown);
    if (!grown) return UINT32_MAX;
    memset(grown + slots, 0, (more - slots) * sizeof *grown);
    sandboxes = grown;
    uint32_t slot = slots;
    slots = more;
    return slot;
}

/* Removes what an ended sandbox leaves, answers its DESTROY, and frees the slot. */
static void account_for(uint32_t slot) {
    struct sandbox *sandbox = &sandboxes[slot];
    struct warden_reply reply = {.op = WARDEN_DESTROY, .sequence = sandbox->sequence, .slot = slot, .wait_status = sandbox->wait_status};
    cgroup_release(&node, slot, &reply, &sandbox->group);
    network_release(sandbox->network);
    if (sandbox->sequence) wire_send(node.control, &reply, sizeof reply, NULL, 0, -1);
    *sandbox = (struct sandbox){.group = sandbox->group};
    keeps_something = true;
}

/* Removes what was kept and not used again. Returns how long until the next look, in milliseconds: -1 when nothing is kept. */
static int expire(void) {
    static uint64_t due_us;
    uint64_t now = now_us();
    if (keeps_something && now >= due_us) {
        keeps_something = network_expire();
        for (uint32_t slot = 0; slot < slots; slot++)
            if (!sandboxes[slot].pid && cgroup_expire(&node, slot, &sandboxes[slot].group)) keeps_something = true;
        due_us = now + EXPIRY_US;
    }
    return keeps_something ? (int)((due_us - now) / 1000) + 1 : -1;
}

static void reap(int flags) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, flags)) > 0)
        for (uint32_t slot = 0; slot < slots; slot++)
            if (sandboxes[slot].pid == pid) {
                close(sandboxes[slot].pidfd);
                sandboxes[slot].ended = true;
                sandboxes[slot].wait_status = status;
                if (sandboxes[slot].wanted) account_for(slot);
                break;
            }
}

static void create(const struct warden_request *request, const struct message *message) {
    uint32_t slot = free_slot();
    if (slot == UINT32_MAX) {
        struct warden_reply reply = {.op = WARDEN_CREATE, .sequence = request->sequence, .error = ENOMEM, .stage = "slots"};
        wire_send(node.control, &reply, sizeof reply, NULL, 0, -1);
        return;
    }
    spawn_sandbox(&node, request, message, slot, &sandboxes[slot]);
}

static void destroy(const struct warden_request *request) {
    struct sandbox *sandbox = request->slot < slots ? &sandboxes[request->slot] : NULL;
    if (!sandbox || !sandbox->pid) {
        struct warden_reply reply = {.op = WARDEN_DESTROY, .sequence = request->sequence, .slot = request->slot, .error = ESRCH};
        wire_send(node.control, &reply, sizeof reply, NULL, 0, -1);
        return;
    }
    sandbox->sequence = request->sequence;
    sandbox->wanted = true;
    if (sandbox->ended) account_for(request->slot);
    else syscall(SYS_pidfd_send_signal, sandbox->pidfd, SIGKILL, NULL, 0);
}

static void hurry(const struct warden_request *request) {
    if (request->slot >= slots) return;
    sandboxes[request->slot].group.touched = true;
    cgroup_hurry(&node, request->slot, request->flags & HURRY, request->cpu_us);
}

static int become_rootless(void) {
    char map[32];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) return -1;
    snprintf(map, sizeof map, "0 %u 1", uid);
    if (write_text(AT_FDCWD, "/proc/self/uid_map", map) || write_text(AT_FDCWD, "/proc/self/setgroups", "deny")) return -1;
    snprintf(map, sizeof map, "0 %u 1", gid);
    return write_text(AT_FDCWD, "/proc/self/gid_map", map);
}

static void setup(const struct warden_request *request, const struct message *message) {
    struct warden_reply reply = {.op = WARDEN_SETUP, .sequence = request->sequence};
    const char *failed = NULL;
    if (node.rootless ? become_rootless() : unshare(CLONE_NEWNS)) failed = "namespaces";
    else failed = mounts_prepare_node(&node, message);
    if (failed) {
        reply.error = errno;
        snprintf(reply.stage, sizeof reply.stage, "%s", failed);
    }
    filter_prepare();
    wire_send(node.control, &reply, sizeof reply, NULL, 0, -1);
}

static void remove_state_folder(void) {
    int copy = node.state < 0 ? -1 : openat(node.state, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (!list) return;
    char path[64], target[4096];
    for (struct dirent *entry; (entry = readdir(list));) unlinkat(node.state, entry->d_name, 0);
    closedir(list);
    snprintf(path, sizeof path, "/proc/self/fd/%d", node.state);
    ssize_t length = readlink(path, target, sizeof target - 1);
    int parent = openat(node.state, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (length <= 0 || parent < 0) return;
    target[length] = 0;
    unlinkat(parent, strrchr(target, '/') + 1, AT_REMOVEDIR);
}

/* The host process is gone: nothing of it may stay. */
_Noreturn static void leave(void) {
    close(node.control);
    node.control = -1;
    cgroup_hurry_all(&node);
    for (uint32_t slot = 0; slot < slots; slot++)
        if (sandboxes[slot].pid && !sandboxes[slot].ended) kill(sandboxes[slot].pid, SIGKILL);
    reap(0);
    for (uint32_t slot = 0; slot < slots; slot++)
        if (sandboxes[slot].pid || sandboxes[slot].group.exists) cgroup_remove(&node, slot);
    cgroup_remove_roots(&node);
    remove_state_folder();
    exit(0);
}

static void serve(void) {
    struct warden_request request;
    struct message message;
    ssize_t got = wire_receive(node.control, &request, sizeof request, &message);
    if (got == 0 || (got < 0 && errno != EINTR)) leave();
    if (got < 0) return;
    if (request.op == WARDEN_SETUP) setup(&request, &message);
    else if (request.op == WARDEN_CREATE) create(&request, &message);
    else if (request.op == WARDEN_DESTROY) destroy(&request);
    else if (request.op == WARDEN_HURRY) hurry(&request);
    wire_release(&message);
}

/* A pidfd and some of its control groups per sandbox: thousands of them need more than most machines allow by default. */
static void raise_descriptor_limit(void) {
    struct rlimit limit, most = {MOST_DESCRIPTORS, MOST_DESCRIPTORS};
    if (!setrlimit(RLIMIT_NOFILE, &most) || getrlimit(RLIMIT_NOFILE, &limit)) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/* Every sandbox's /proc/1/cmdline shows this memory: no path of the host may stay in it. */
static void hide_arguments(int argc, char **argv) {
    size_t bytes = (size_t)(argv[argc - 1] + strlen(argv[argc - 1]) - argv[0]);
    memset(argv[0], 0, bytes);
    snprintf(argv[0], bytes, "sandmill");
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "guest")) return guest_main(argc - 2, argv + 2);
    if (argc < 5) return fprintf(stderr, "the warden is started by sandmill, not by hand\n"), 2;
    node.control = atoi(argv[1]);
    node.state = atoi(argv[2]);
    node.uid_base = (uint32_t)strtoul(argv[3], NULL, 10);
    node.rootless = geteuid() != 0;
    node.cgroup_version = atoi(argv[4]);
    for (int i = 5; i < argc && node.cgroup_count < 3; i++) node.cgroup_roots[node.cgroup_count++] = atoi(argv[i]);
    node.outer_cpu_tasks = node.cgroup_version == 1 ? openat(node.cgroup_roots[0], "../tasks", O_WRONLY | O_CLOEXEC) : -1;
    hide_arguments(argc, argv);
    raise_descriptor_limit();
    /* Agents and supervisors inherit it, commands give it back: a kill must not queue behind 256 processes that spin. */
    setpriority(PRIO_PROCESS, 0, -10);
    signal(SIGPIPE, SIG_IGN);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    /* A forked copy of the host process may hold the socket's other end open: its own end is what counts. */
    int owner = (int)syscall(SYS_pidfd_open, getppid(), 0);
    struct pollfd watched[] = {{node.control, POLLIN, 0}, {signals, POLLIN, 0}, {owner, POLLIN, 0}};
    while (poll(watched, COUNT(watched), expire()) >= 0 || errno == EINTR) {
        struct signalfd_siginfo info[32];
        if (watched[1].revents) {
            while (read(signals, info, sizeof info) > 0);
            reap(WNOHANG);
        }
        if (watched[2].revents) leave();
        if (watched[0].revents) serve();
    }
    leave();
}
