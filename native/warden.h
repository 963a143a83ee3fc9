/* What the warden's parts offer one another. */
#pragma once
#include "protocol.h"
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/types.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* One node: how this machine isolates. Fixed after start. */
struct node {
    int control;              /* socket to the host process */
    int state;                /* the owner's folder, removed when everything is over; -1 when none */
    bool rootless;
    uint32_t uid_base;        /* host uid of in-sandbox root (rootful) or the host user's own uid (rootless) */
    int cgroup_version;       /* 0: none */
    int cgroup_roots[3];      /* v1: cpu, memory, pids; v2: the first only */
    int cgroup_count;
    int outer_cpu_tasks;      /* v1: task list of the cpu group that the host process is in; -1 when there is none */
};

/* A received message. `payload` is inside the message or mapped from its memfd. */
struct message {
    unsigned char *payload;
    size_t payload_bytes;
    int fds[4];
    int fd_count;
    bool mapped;
};

/* wire.c */
ssize_t wire_receive(int socket, void *header, size_t header_bytes, struct message *message);
void wire_release(struct message *message);
int wire_send(int socket, const void *header, size_t header_bytes, const void *data, size_t data_bytes, int fd);

/* files.c: all act with the caller's file-system identity */
struct batch_result {
    int error;
    char path[200];
};
struct batch_result batch_unpack(const unsigned char *payload, size_t bytes);
int open_inside(const char *path, int flags, mode_t mode);
int make_parents(const char *path);
int remove_tree(const char *path);

/* cgroups.c */
struct cgroup {
    int dirs[3];              /* folders of this sandbox, -1 when absent */
    int tasks[3];             /* v1: where the child joins by writing "0" */
};
struct kept_group {           /* a slot's folders, which outlive its sandbox for a moment */
    bool exists;
    bool touched;             /* not as they were made: not for another sandbox */
    bool recent;
    uint64_t memory_bytes;
    uint32_t processes, cpu_us;
    uint64_t spent_us;        /* v2: processor time of former sandboxes */
};
int cgroup_make(const struct node *node, uint32_t slot, const struct warden_request *limits, struct cgroup *group, struct kept_group *kept);
void cgroup_close(struct cgroup *group);
void cgroup_release(const struct node *node, uint32_t slot, struct warden_reply *account, struct kept_group *kept);
bool cgroup_expire(const struct node *node, uint32_t slot, struct kept_group *kept);
void cgroup_remove(const struct node *node, uint32_t slot);
void cgroup_hurry(const struct node *node, uint32_t slot, bool hurry, uint32_t cpu_us);
void cgroup_hurry_all(const struct node *node);
void cgroup_remove_roots(const struct node *node);

/* network.c */
const char *network_raise_loopback(void);
int network_enter(void);
int network_enter_own(void);
void network_leave(void);
void network_release(int fd);
bool network_expire(void);

/* netlink.c, egress.c: in a network namespace that the caller has CAP_NET_ADMIN over */
int netlink_make_everything_local(bool both);
int netlink_redirect_tcp(uint16_t port);
const char *egress_open(int socket, uint32_t flags);
int egress_name_server(void);

/* mounts.c */
const char *mounts_prepare_node(const struct node *node, const struct message *skeleton);
struct root {                 /* what a sandbox's root is made of */
    const char *layers;       /* names of layers, NULL: this machine's own base */
    bool on_host;             /* the layers lie above that base */
    const char *workdir;
    uint32_t who;             /* its owner */
    int written;              /* out: the folder of all that the sandbox writes */
};
const char *mounts_enter_sandbox(uint64_t disk_bytes, uint64_t memory_bytes, struct root *root);
const char *mounts_mask_proc(void);

/* layers.c */
void layers_hold(const struct node *node);
const char *layers_attach(const struct node *node);
const char *layers_option(const char *layers, bool on_skeleton, char *option, size_t room);
const char *layers_mount_points(void);
const char *layers_make_workdir(const char *path, uint32_t who);

/* freeze.c */
void freeze_processes(void);
void thaw_processes(void);

/* filter.c */
void filter_prepare(void);
int filter_install(void);

/* privileges.c */
int privileges_reduce_agent(const struct node *node, const struct warden_request *limits);
int privileges_become(uint32_t uid, uint32_t gid);
int privileges_bind_to_parent(void);
int privileges_limit_descriptors(void);
int filesystem_identity(uint32_t uid, uint32_t gid);
void own_identity(void);

/* spawn.c */
struct sandbox {
    pid_t pid;                /* 0: free slot */
    int pidfd;
    int network;              /* its network namespace where the warden owns it, else -1 */
    bool ended;               /* reaped; kept until the host asks for its account */
    bool wanted;              /* DESTROY was asked and not answered */
    uint32_t sequence;
    int wait_status;
    struct kept_group group;  /* stays when the sandbox goes */
};
int signal_descriptor(void);
void spawn_sandbox(struct node *node, const struct warden_request *request, const struct message *message, uint32_t slot,
                   struct sandbox *sandbox);

/* agent.c, exec.c */
enum {                        /* descriptors of the agent */
    CPU_TASKS = 5,            /* the task list of the commands' cpu group */
    WRITTEN = 6,              /* the folder of all that the sandbox writes */
};
extern int *asked_signal;
extern bool guest;            /* the agent shares its pid namespace with processes that are not its own (guest.c) */
_Noreturn void agent_serve(int socket, int signals);
void reap_dead(void);
struct job {
    pid_t supervisor;         /* 0: free. It may outlive its command */
    uint32_t id;
    uint32_t op;              /* what else than a command the process does */
};
struct command {
    uint32_t id, who, flags;
    char *cwd, **argv, **env;
    const unsigned char *input;
    size_t input_bytes;
    uint64_t max_output;
    int fds[3];
};
struct stream {
    int fd;                   /* -1 when closed */
    unsigned char *kept;
    size_t bytes;
    uint64_t dropped;
};
struct supervision {
    const struct command *command; /* NULL: none */
    int socket;
    pid_t child;
    bool exited;
    int status;
    struct rusage usage;
    uint64_t started_us, exited_us;
    struct stream out, err;
    int input;                /* the command's standard input, fed from command->input; -1 when done */
    size_t fed;
    bool flooded;
};
int supervision_begin(struct supervision *s, int socket, const struct command *command);
int supervision_patience_ms(const struct supervision *s);
void supervision_watch(const struct supervision *s, struct pollfd watched[3]);
bool supervision_move(struct supervision *s, const struct pollfd watched[3]);
void supervision_ended(struct supervision *s, pid_t pid, int status, const struct rusage *usage);
void supervision_report(struct supervision *s, int error);
_Noreturn void supervise(int socket, int signals, int tree_dead, const struct command *command);

/* frames.c */
struct buffer {
    unsigned char *data;
    size_t bytes, room;
};
void frames_begin(bool as_text);
bool frames_take(void (*take)(const unsigned char *frame, size_t bytes));
void frame_send(const struct agent_reply *reply, const void *data, size_t bytes);
void output_send(uint32_t id, bool is_err, const void *data, size_t bytes);
void buffer_append(struct buffer *buffer, const void *data, size_t bytes);
_Noreturn void guest_give_up(const char *why);

/* reading.c */
bool reading_begin(uint32_t id, uint64_t limit);
bool reading_opened(struct agent_reply *reply, int fd);
bool readings_wait(void);
void readings_move(void);

/* copying.c */
void copying_begin(void);
int copy_files(const char *direction);

/* terminal.c */
int terminal_open(uint32_t who, int *end);
bool terminal_resize(int terminal, uint32_t rows, uint32_t columns);
ssize_t terminal_type(int terminal, const unsigned char *keys, size_t bytes, size_t *line_bytes);

/* guest.c */
int guest_main(int argc, char **argv);

/* tree.c */
/* How long the killed are waited for, and how often it is looked. They are gone at once, unless nothing gets the processor. */
enum { GONE_US = 1000000, GONE_LOOK_US = 200 };
void kill_descendants(pid_t root, const pid_t *spared, int spared_count, void (*reap)(void));
void signal_session(pid_t session, int number);
void stop_tree(pid_t root, const pid_t *spared, int spared_count);
void resume_tree(pid_t root);

/* small wrappers of system calls that libc lacks */
int write_text(int dir, const char *path, const char *text);
uint64_t now_us(void);
