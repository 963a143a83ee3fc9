/* The agent in a sandbox that no warden made: gVisor's, a microVM's, a pod's. In: requests (protocol.h) as frames on standard input.
 * Out: replies as frames on standard output.
 *
 * This process is the relay, and its one child is the agent. Descriptors cannot travel over a stream: a command's output and a file's
 * contents come back as AGENT_OUTPUT, its input goes in as AGENT_INPUT; a terminal's own end stays here. A frame is its length and the
 * message; in text mode, for transports that carry text only, a line of base64. When standard input ends, every process that was
 * started here dies. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MOST_COMMANDS = 256,
    LAST_OUTPUT_US = 50000,      /* a child in the background may hold a pipe for ever */
};

struct streamed {                /* a command whose output goes back as it comes */
    bool used, closing, ended, terminal;
    uint32_t id;
    int out, err, in;            /* our ends, -1 when closed; of a terminal both out and in */
    unsigned char *input;        /* not written yet */
    size_t input_bytes, line_bytes;
    uint64_t taken, deadline_us;
    struct agent_reply exit;
};

static struct streamed commands[MOST_COMMANDS];
static int agent;
static struct buffer parts;

static void shut(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- what the agent says ---- */

static struct streamed *find_command(uint32_t id) {
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (commands[i].used && commands[i].id == id) return &commands[i];
    return NULL;
}

static void from_agent(void) {
    static unsigned char message[sizeof(struct agent_reply) + INLINE_MAX + 512];
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {message, sizeof message};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control};
    struct agent_reply reply;
    int fd = -1;
    ssize_t got = recvmsg(agent, &envelope, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) return;
    if (got < (ssize_t)sizeof reply) guest_give_up("the agent has ended");
    struct cmsghdr *head = CMSG_FIRSTHDR(&envelope);
    if (head && head->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(head), sizeof fd);
    memcpy(&reply, message, sizeof reply);
    struct streamed *command = reply.op == AGENT_EXIT ? find_command(reply.id) : NULL;
    if (reply.op == AGENT_OPEN && reading_opened(&reply, fd)) return;
    if (fd >= 0) close(fd);
    if (!command) return frame_send(&reply, message + sizeof reply, (size_t)got - sizeof reply);
    command->exit = reply;
    command->ended = true;
    command->deadline_us = reply.flags & NOT_STARTED ? 0 : now_us() + LAST_OUTPUT_US;
}

/* ---- what the host says ---- */

static void to_agent(struct agent_request *request, const unsigned char *payload, size_t bytes, const int *fds, int count) {
    int all[4], held = -1;
    union {
        char space[CMSG_SPACE(sizeof all)];
        struct cmsghdr align;
    } control = {0};
    struct iovec pieces[2] = {{request, sizeof *request}, {(void *)payload, bytes}};
    struct msghdr envelope = {.msg_iov = pieces, .msg_iovlen = 2};
    for (int i = 0; i < count; i++) all[i] = fds[i];
    request->flags &= ~(uint32_t)PAYLOAD_IN_FD;
    request->payload_bytes = (uint32_t)bytes;
    if (bytes > INLINE_MAX) {
        if ((held = memfd_create("guest", MFD_CLOEXEC)) < 0) guest_give_up("no memory file");
        for (size_t done = 0; done < bytes;) {
            ssize_t wrote = write(held, payload + done, bytes - done);
            if (wrote <= 0) guest_give_up("out of memory");
            done += (size_t)wrote;
        }
        request->flags |= PAYLOAD_IN_FD;
        envelope.msg_iovlen = 1;
        all[count++] = held;
    }
    if (count) {
        envelope.msg_control = control.space;
        envelope.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *part = CMSG_FIRSTHDR(&envelope);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(part), all, sizeof(int) * (size_t)count);
    }
    while (sendmsg(agent, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno != EAGAIN && errno != EINTR) guest_give_up("the agent has ended");
        /* It may be waiting for us to take its replies. */
        struct pollfd ready = {agent, POLLIN | POLLOUT, 0};
        if (poll(&ready, 1, -1) > 0 && ready.revents & POLLIN) from_agent();
    }
    if (held >= 0) close(held);
}

static void refuse(const struct agent_request *request, int error) {
    struct agent_reply reply = {.op = request->op, .id = request->id, .status = error};
    if (request->op == AGENT_EXEC) reply.op = AGENT_EXIT, reply.flags = NOT_STARTED;
    frame_send(&reply, NULL, 0);
}

/* Three pipes, or /dev/null as standard input when nothing will come. */
static int make_pipes(struct streamed *command, bool with_input, int theirs[3]) {
    int out[2] = {-1, -1}, err[2] = {-1, -1}, in[2] = {-1, -1};
    if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || (with_input && pipe2(in, O_CLOEXEC)) ||
        (!with_input && (in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)) {
        int error = errno;
        for (int i = 0; i < 2; i++) shut(&out[i]), shut(&err[i]), shut(&in[i]);
        return error;
    }
    command->out = out[0], command->err = err[0], command->in = in[1];
    theirs[0] = in[0], theirs[1] = out[1], theirs[2] = err[1];
    fcntl(command->out, F_SETFL, O_NONBLOCK);
    fcntl(command->err, F_SETFL, O_NONBLOCK);
    if (command->in >= 0) fcntl(command->in, F_SETFL, O_NONBLOCK);
    return 0;
}

/* A terminal; input may end before output does. */
static int make_terminal(struct streamed *command, uint32_t who, int theirs[3]) {
    int terminal = terminal_open(who, &theirs[0]), input = terminal < 0 ? -1 : fcntl(terminal, F_DUPFD_CLOEXEC, 0);
    if (input < 0) {
        int error = errno;
        shut(&terminal), shut(&theirs[0]);
        return error;
    }
    command->terminal = true;
    command->out = terminal, command->err = -1, command->in = input;
    theirs[1] = theirs[2] = theirs[0];
    return 0;
}

static void start_streamed(struct agent_request *request, const unsigned char *payload, size_t bytes) {
    struct streamed *command = NULL;
    int theirs[3] = {-1, -1, -1}, error;
    for (int i = 0; i < MOST_COMMANDS && !command; i++)
        if (!commands[i].used) command = &commands[i];
    if (!command) return refuse(request, EAGAIN);
    *command = (struct streamed){.used = true, .id = request->id};
    if (request->flags & EXEC_TTY) error = make_terminal(command, request->who, theirs);
    else error = make_pipes(command, request->flags & EXEC_INPUT, theirs);
    if (error) {
        command->used = false;
        return refuse(request, error);
    }
    request->flags &= ~(uint32_t)EXEC_INPUT;
    to_agent(request, payload, bytes, theirs, 3);
    for (int i = 0; i < (command->terminal ? 1 : 3); i++) close(theirs[i]);
}

static void open_path(struct agent_request *request, const unsigned char *payload, size_t bytes) {
    if (!reading_begin(request->id, request->max_output)) return refuse(request, EAGAIN);
    request->max_output = 0;
    to_agent(request, payload, bytes, NULL, 0);
}

static void take_input(const struct agent_request *request, const unsigned char *data, size_t bytes) {
    struct streamed *command = find_command(request->id);
    if (!command || command->in < 0) {
        struct agent_reply reply = {.op = AGENT_INPUT, .id = request->id, .status = EPIPE};
        if (command) frame_send(&reply, NULL, 0);
        return;
    }
    struct buffer held = {command->input, command->input_bytes, command->input_bytes};
    buffer_append(&held, data, bytes);
    command->input = held.data;
    command->input_bytes = held.bytes;
    if (!bytes) command->closing = true;
}

static void resize(const struct agent_request *request) {
    const struct streamed *command = find_command(request->id);
    struct agent_request tell = {.op = AGENT_SIGNAL, .id = request->id, .first = SIGWINCH};
    if (!command || !command->terminal || command->out < 0) return;
    if (!terminal_resize(command->out, request->first, request->second)) to_agent(&tell, NULL, 0, NULL, 0);
}

static void take_frame(const unsigned char *frame, size_t bytes) {
    struct agent_request request;
    if (bytes < sizeof request) guest_give_up("a frame that is too short");
    memcpy(&request, frame, sizeof request);
    const unsigned char *payload = frame + sizeof request;
    bytes -= sizeof request;
    if (request.op == AGENT_PART) {
        if (parts.bytes + bytes > PAYLOAD_LIMIT) guest_give_up("a message that is too long");
        return buffer_append(&parts, payload, bytes);
    }
    if (request.op == AGENT_INPUT) return take_input(&request, payload, bytes);
    if (request.op == AGENT_RESIZE) return resize(&request);
    if (parts.bytes) {
        buffer_append(&parts, payload, bytes);
        payload = parts.data;
        bytes = parts.bytes;
    }
    if (request.op == AGENT_EXEC && !(request.flags & EXEC_CAPTURE)) start_streamed(&request, payload, bytes);
    else if (request.op == AGENT_OPEN) open_path(&request, payload, bytes);
    else to_agent(&request, payload, bytes, NULL, 0);
    if (parts.bytes) {
        free(parts.data);
        parts = (struct buffer){0};
    }
}

/* ---- streams ---- */

static void forward(struct streamed *command, int *fd) {
    static unsigned char piece[OUTPUT_CHUNK];
    ssize_t got = read(*fd, piece, sizeof piece);
    if (got > 0) output_send(command->id, fd == &command->err, piece, (size_t)got);
    else if (got == 0 || (errno != EAGAIN && errno != EINTR)) shut(fd);
}

static void feed(struct streamed *command) {
    ssize_t done = 0;
    if (command->input_bytes && command->terminal) done = terminal_type(command->in, command->input, command->input_bytes, &command->line_bytes);
    else if (command->input_bytes) done = write(command->in, command->input, command->input_bytes);
    struct agent_reply reply = {.op = AGENT_INPUT, .id = command->id};
    if (done < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (done < 0) {
        reply.status = EPIPE;
        command->input_bytes = 0;
    } else {
        command->input_bytes -= (size_t)done;
        memmove(command->input, command->input + done, command->input_bytes);
    }
    reply.user_us = command->taken += done > 0 ? (uint64_t)done : 0;
    frame_send(&reply, NULL, 0);
    if (done < 0 || (command->closing && !command->input_bytes)) shut(&command->in);
}

static void finish(struct streamed *command) {
    frame_send(&command->exit, NULL, 0);
    shut(&command->out);
    shut(&command->err);
    shut(&command->in);
    free(command->input);
    *command = (struct streamed){0};
}

/* Whether all of a command that has ended is sent. */
static bool is_over(const struct streamed *command) {
    return command->ended && ((command->out < 0 && command->err < 0) || now_us() >= command->deadline_us);
}

/* When to look again, whatever happens: -1 never. */
static int patience_ms(void) {
    int patience = readings_wait() ? 0 : -1;
    for (int i = 0; i < MOST_COMMANDS && patience; i++)
        if (commands[i].used && commands[i].ended) patience = 10;
    return patience;
}

static void relay(void) {
    struct pollfd watched[2 + 3 * MOST_COMMANDS];
    struct { struct streamed *command; int *fd; } owners[3 * MOST_COMMANDS];
    for (;;) {
        int count = 0;
        watched[0] = (struct pollfd){0, POLLIN, 0};
        watched[1] = (struct pollfd){agent, POLLIN, 0};
        for (int i = 0; i < MOST_COMMANDS; i++) {
            struct streamed *command = &commands[i];
            if (!command->used) continue;
            bool eager = command->input_bytes || command->closing;
            int *const ends[] = {&command->out, &command->err, &command->in};
            for (int end = 0; end < 3; end++) {
                if (*ends[end] < 0 || (end == 2 && !eager)) continue;
                watched[2 + count] = (struct pollfd){*ends[end], end == 2 ? POLLOUT : POLLIN, 0};
                owners[count].command = command;
                owners[count++].fd = ends[end];
            }
        }
        if (poll(watched, (nfds_t)(2 + count), patience_ms()) < 0 && errno != EINTR) guest_give_up("poll");
        for (int i = 0; i < count; i++) {
            if (!watched[2 + i].revents || *owners[i].fd < 0) continue;
            if (owners[i].fd == &owners[i].command->in) feed(owners[i].command);
            else forward(owners[i].command, owners[i].fd);
        }
        for (int i = 0; i < MOST_COMMANDS; i++)
            if (commands[i].used && is_over(&commands[i])) finish(&commands[i]);
        readings_move();
        if (watched[1].revents) from_agent();
        if (watched[0].revents && !frames_take(take_frame)) return;
    }
}

/* ---- beginning and end ---- */

/* Makes a folder for whoever commands run as, if it is missing. */
static int own_folder(const char *path, uid_t uid, gid_t gid) {
    if (make_parents(path)) return errno;
    if (mkdir(path, 0755)) return errno == EEXIST ? 0 : errno;
    return !geteuid() && chown(path, uid, gid) ? errno : 0;
}

_Noreturn static void be_agent(int socket) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    setpgid(0, 0);
    umask(022);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), high = fcntl(socket, F_DUPFD_CLOEXEC, 16), tasks = fcntl(null, F_DUPFD_CLOEXEC, 16);
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    int signals = signal_descriptor();
    copying_begin();
    if (null < 0 || high < 0 || tasks < 0 || signals < 0) _exit(1);
    if (dup3(high, 3, O_CLOEXEC) < 0 || (signals != 4 && dup3(signals, 4, O_CLOEXEC) < 0)) _exit(1);
    if (dup3(tasks, CPU_TASKS, O_CLOEXEC) < 0 || dup3(tasks, WRITTEN, O_CLOEXEC) < 0) _exit(1);
    for (int fd = WRITTEN + 1; fd < 64; fd++) close(fd);
    agent_serve(3, 4);
}

static bool can_change_identity(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    uint32_t needed = 1u << CAP_SETUID | 1u << CAP_SETGID;
    return !syscall(SYS_capget, &header, data) && (data[0].effective & needed) == needed;
}

/* guest binary|text WORKDIR UID GID PROCESSES: reports with AGENT_READY, whose text is the uid and gid that commands can have, and
 * "root" when that of root is among them. */
int guest_main(int argc, char **argv) {
    int ends[2], status;
    char who[64];
    if (argc != 5) return fprintf(stderr, "the guest is started by sandmill, not by hand\n"), 2;
    frames_begin(!strcmp(argv[0], "text"));
    uid_t uid = (uid_t)strtoul(argv[2], NULL, 10);
    gid_t gid = (gid_t)strtoul(argv[3], NULL, 10);
    struct node node = {.cgroup_version = 1};
    struct warden_request limits = {.processes = (uint32_t)strtoul(argv[4], NULL, 10)};
    signal(SIGPIPE, SIG_IGN);
    int error = own_folder(argv[1], uid, gid);
    if (!error && own_folder("/home/user", uid, gid)) errno = 0; /* a read-only one will do without */
    guest = true;
    bool root = !geteuid() && !privileges_reduce_agent(&node, &limits) && can_change_identity();
    if (!root) uid = geteuid(), gid = getegid();
    int length = snprintf(who, sizeof who, "%u %u%s", uid, gid, root ? " root" : "");
    struct agent_reply ready = {.op = AGENT_READY, .status = error, .flags = error ? NOT_STARTED : 0};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) guest_give_up("no socket");
    pid_t pid = fork();
    if (pid == 0) close(ends[0]), be_agent(ends[1]);
    if (pid < 0) guest_give_up("no process");
    close(ends[1]);
    agent = ends[0];
    prctl(PR_SET_DUMPABLE, 0);
    frame_send(&ready, error ? argv[1] : who, error ? strlen(argv[1]) : (size_t)length);
    if (!error) relay();
    if (getpid() == 1) return 0; /* and everything with us */
    close(agent); /* the agent kills what runs and ends */
    for (int tries = 0; tries < 1000 && !waitpid(pid, &status, WNOHANG); tries++) usleep(5000);
    return 0;
}
