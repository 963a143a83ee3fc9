/* The agent in a sandbox that no warden made: gVisor's, a microVM's, a pod's. In: requests (protocol.h) as frames on standard input.
 * Out: replies as frames on standard output.
 *
 * This process is the relay, and its one child is the agent. Descriptors cannot travel over a stream: a command's output and a file's
 * contents come back as AGENT_OUTPUT, its input goes in as AGENT_INPUT. A frame is its length and the message; in text mode, for
 * transports that carry text only, a line of base64. When standard input ends, every process that was started here dies. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
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
    LONGEST_FRAME = 1 << 20,     /* a longer payload comes in AGENT_PARTs */
    PIECE = 48 * 1024,
    LAST_OUTPUT_US = 50000,      /* a child in the background may hold a pipe for ever */
    LONGEST_NAME = 256,
    FOLDER = 1,                  /* flag of an OPEN's reply: what came is a listing */
};

struct streamed {                /* a command whose output goes back as it comes */
    bool used, closing, ended;
    uint32_t id;
    int out, err, in;            /* our ends, -1 when closed */
    unsigned char *input;        /* not written yet */
    size_t input_bytes;
    uint64_t taken, deadline_us;
    struct agent_reply exit;
};

struct reading {                 /* a file or folder on its way back */
    bool used;
    uint32_t id;
    int fd;                      /* -1 until the agent has opened it */
    uint64_t left;
};

struct listed {                  /* one entry of a folder, followed by its name */
    uint32_t mode, name_bytes;
    uint64_t size_bytes;
};

static struct streamed commands[MOST_COMMANDS];
static struct reading readings[MOST_COMMANDS];
static bool text;
static int agent;
static struct buffer {
    unsigned char *data;
    size_t bytes, room;
} input, parts;

_Noreturn static void give_up(const char *why) {
    fprintf(stderr, "sandmill guest: %s\n", why);
    exit(1);
}

static void append(struct buffer *buffer, const void *data, size_t bytes) {
    if (buffer->room - buffer->bytes < bytes) {
        size_t room = 2 * (buffer->bytes + bytes);
        if (!(buffer->data = realloc(buffer->data, room))) give_up("out of memory");
        buffer->room = room;
    }
    if (bytes) memcpy(buffer->data + buffer->bytes, data, bytes);
    buffer->bytes += bytes;
}

/* ---- frames out ---- */

static void write_out(const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes) {
        ssize_t done = write(1, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) exit(0);
        at += done;
        bytes -= (size_t)done;
    }
}

static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static size_t to_text(const unsigned char *from, size_t bytes, char *to) {
    char *at = to;
    for (size_t i = 0; i < bytes; i += 3) {
        size_t left = bytes - i;
        uint32_t word = (uint32_t)from[i] << 16 | (left > 1 ? (uint32_t)from[i + 1] << 8 : 0) | (left > 2 ? from[i + 2] : 0);
        *at++ = DIGITS[word >> 18];
        *at++ = DIGITS[word >> 12 & 63];
        *at++ = left > 1 ? DIGITS[word >> 6 & 63] : '=';
        *at++ = left > 2 ? DIGITS[word & 63] : '=';
    }
    *at++ = '\n';
    return (size_t)(at - to);
}

static void emit(const struct agent_reply *reply, const void *data, size_t bytes) {
    static unsigned char frame[4 + sizeof *reply + INLINE_MAX + 512];
    static char line[2 * sizeof frame];
    uint32_t length = (uint32_t)(sizeof *reply + bytes);
    memcpy(frame, &length, 4);
    memcpy(frame + 4, reply, sizeof *reply);
    if (bytes) memcpy(frame + 4 + sizeof *reply, data, bytes);
    if (text) write_out(line, to_text(frame + 4, length, line));
    else write_out(frame, 4 + length);
}

static void emit_output(uint32_t id, bool is_err, const void *data, size_t bytes) {
    struct agent_reply reply = {.op = AGENT_OUTPUT, .id = id};
    *(is_err ? &reply.err_bytes : &reply.out_bytes) = (uint32_t)bytes;
    emit(&reply, data, bytes);
}

/* ---- what the agent says ---- */

static struct streamed *find_command(uint32_t id) {
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (commands[i].used && commands[i].id == id) return &commands[i];
    return NULL;
}

static struct reading *find_reading(uint32_t id) {
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (readings[i].used && readings[i].id == id) return &readings[i];
    return NULL;
}

static void shut(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void opened(struct reading *reading, struct agent_reply *reply, int fd) {
    struct stat info;
    if (!reply->status && (fd < 0 || fstat(fd, &info))) reply->status = EIO;
    if (!reply->status && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) reply->status = EINVAL;
    if (!reply->status) {
        reading->fd = fd;
        return;
    }
    if (fd >= 0) close(fd);
    reading->used = false;
    emit(reply, NULL, 0);
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
    if (got < (ssize_t)sizeof reply) give_up("the agent has ended");
    struct cmsghdr *head = CMSG_FIRSTHDR(&envelope);
    if (head && head->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(head), sizeof fd);
    memcpy(&reply, message, sizeof reply);
    struct reading *reading = reply.op == AGENT_OPEN ? find_reading(reply.id) : NULL;
    struct streamed *command = reply.op == AGENT_EXIT ? find_command(reply.id) : NULL;
    if (reading) return opened(reading, &reply, fd);
    if (fd >= 0) close(fd);
    if (!command) return emit(&reply, message + sizeof reply, (size_t)got - sizeof reply);
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
        if ((held = memfd_create("guest", MFD_CLOEXEC)) < 0) give_up("no memory file");
        for (size_t done = 0; done < bytes;) {
            ssize_t wrote = write(held, payload + done, bytes - done);
            if (wrote <= 0) give_up("out of memory");
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
        if (errno != EAGAIN && errno != EINTR) give_up("the agent has ended");
        /* It may be waiting for us to take its replies. */
        struct pollfd ready = {agent, POLLIN | POLLOUT, 0};
        if (poll(&ready, 1, -1) > 0 && ready.revents & POLLIN) from_agent();
    }
    if (held >= 0) close(held);
}

static void refuse(const struct agent_request *request, int error) {
    struct agent_reply reply = {.op = request->op, .id = request->id, .status = error};
    if (request->op == AGENT_EXEC) reply.op = AGENT_EXIT, reply.flags = NOT_STARTED;
    emit(&reply, NULL, 0);
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

static void start_streamed(struct agent_request *request, const unsigned char *payload, size_t bytes) {
    struct streamed *command = NULL;
    int theirs[3] = {-1, -1, -1}, error;
    for (int i = 0; i < MOST_COMMANDS && !command; i++)
        if (!commands[i].used) command = &commands[i];
    if (!command) return refuse(request, EAGAIN);
    *command = (struct streamed){.used = true, .id = request->id};
    if ((error = make_pipes(command, request->flags & EXEC_INPUT, theirs))) {
        command->used = false;
        return refuse(request, error);
    }
    request->flags &= ~(uint32_t)EXEC_INPUT;
    to_agent(request, payload, bytes, theirs, 3);
    for (int i = 0; i < 3; i++) close(theirs[i]);
}

static void start_reading(struct agent_request *request, const unsigned char *payload, size_t bytes) {
    struct reading *reading = NULL;
    for (int i = 0; i < MOST_COMMANDS && !reading; i++)
        if (!readings[i].used) reading = &readings[i];
    if (!reading) return refuse(request, EAGAIN);
    *reading = (struct reading){.used = true, .id = request->id, .fd = -1, .left = request->max_output};
    request->max_output = 0;
    to_agent(request, payload, bytes, NULL, 0);
}

static void take_input(const struct agent_request *request, const unsigned char *data, size_t bytes) {
    struct streamed *command = find_command(request->id);
    if (!command || command->in < 0) {
        struct agent_reply reply = {.op = AGENT_INPUT, .id = request->id, .status = EPIPE};
        if (command) emit(&reply, NULL, 0);
        return;
    }
    struct buffer held = {command->input, command->input_bytes, command->input_bytes};
    append(&held, data, bytes);
    command->input = held.data;
    command->input_bytes = held.bytes;
    if (!bytes) command->closing = true;
}

static void take_frame(const unsigned char *frame, size_t bytes) {
    struct agent_request request;
    if (bytes < sizeof request) give_up("a frame that is too short");
    memcpy(&request, frame, sizeof request);
    const unsigned char *payload = frame + sizeof request;
    bytes -= sizeof request;
    if (request.op == AGENT_PART) {
        if (parts.bytes + bytes > PAYLOAD_LIMIT) give_up("a message that is too long");
        return append(&parts, payload, bytes);
    }
    if (request.op == AGENT_INPUT) return take_input(&request, payload, bytes);
    if (parts.bytes) {
        append(&parts, payload, bytes);
        payload = parts.data;
        bytes = parts.bytes;
    }
    if (request.op == AGENT_EXEC && !(request.flags & EXEC_CAPTURE)) start_streamed(&request, payload, bytes);
    else if (request.op == AGENT_OPEN) start_reading(&request, payload, bytes);
    else to_agent(&request, payload, bytes, NULL, 0);
    if (parts.bytes) {
        free(parts.data);
        parts = (struct buffer){0};
    }
}

static int digit(unsigned char letter) {
    const char *at = letter ? strchr(DIGITS, letter) : NULL;
    return at ? (int)(at - DIGITS) : -1;
}

/* In place: what comes out is shorter. */
static size_t from_text(unsigned char *data, size_t bytes) {
    size_t out = 0;
    uint32_t word = 0;
    int have = 0;
    for (size_t i = 0; i < bytes && data[i] != '='; i++) {
        int value = digit(data[i]);
        if (value < 0) continue;
        word = word << 6 | (uint32_t)value;
        if (++have % 4 == 0) data[out++] = (unsigned char)(word >> 16), data[out++] = (unsigned char)(word >> 8), data[out++] = (unsigned char)word;
    }
    if (have % 4 == 2) data[out++] = (unsigned char)(word >> 4);
    if (have % 4 == 3) data[out++] = (unsigned char)(word >> 10), data[out++] = (unsigned char)(word >> 2);
    return out;
}

/* Takes the first frame that is there whole, at `at`. Returns the bytes that it took, 0 when there is none. */
static size_t next_frame(size_t at) {
    size_t left = input.bytes - at;
    unsigned char *start = input.data + at;
    if (text) {
        unsigned char *end = memchr(start, '\n', left);
        if (!end) return left > 2 * LONGEST_FRAME ? (give_up("a frame that is too long"), 0) : 0;
        size_t length = from_text(start, (size_t)(end - start));
        if (length) take_frame(start, length);
        return (size_t)(end - start) + 1;
    }
    uint32_t length;
    if (left < sizeof length) return 0;
    memcpy(&length, start, sizeof length);
    if (length > LONGEST_FRAME) give_up("a frame that is too long");
    if (left - sizeof length < length) return 0;
    take_frame(start + sizeof length, length);
    return sizeof length + length;
}

/* Returns false at the end. */
static bool from_host(void) {
    static unsigned char fresh[65536];
    ssize_t got = read(0, fresh, sizeof fresh);
    size_t at = 0, took;
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    if (got <= 0) return false;
    append(&input, fresh, (size_t)got);
    while ((took = next_frame(at))) at += took;
    memmove(input.data, input.data + at, input.bytes - at);
    input.bytes -= at;
    return true;
}

/* ---- streams ---- */

static void forward(struct streamed *command, int *fd) {
    static unsigned char piece[PIECE];
    ssize_t got = read(*fd, piece, sizeof piece);
    if (got > 0) emit_output(command->id, fd == &command->err, piece, (size_t)got);
    else if (got == 0 || (errno != EAGAIN && errno != EINTR)) shut(fd);
}

static void feed(struct streamed *command) {
    ssize_t done = command->input_bytes ? write(command->in, command->input, command->input_bytes) : 0;
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
    emit(&reply, NULL, 0);
    if (done < 0 || (command->closing && !command->input_bytes)) shut(&command->in);
}

static void finish(struct streamed *command) {
    emit(&command->exit, NULL, 0);
    shut(&command->out);
    shut(&command->err);
    shut(&command->in);
    free(command->input);
    *command = (struct streamed){0};
}

static void end_reading(struct reading *reading, int status, uint32_t flags) {
    struct agent_reply reply = {.op = AGENT_OPEN, .id = reading->id, .status = status, .flags = flags};
    emit(&reply, NULL, 0);
    shut(&reading->fd);
    reading->used = false;
}

static void send_listing(struct reading *reading) {
    DIR *list = fdopendir(reading->fd);
    struct buffer out = {0};
    struct dirent *entry;
    while (list && (entry = readdir(list))) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (fstatat(dirfd(list), entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
        struct listed one = {info.st_mode, (uint32_t)strnlen(entry->d_name, LONGEST_NAME), (uint64_t)info.st_size};
        append(&out, &one, sizeof one);
        append(&out, entry->d_name, one.name_bytes);
    }
    for (size_t at = 0; at < out.bytes; at += PIECE)
        emit_output(reading->id, false, out.data + at, out.bytes - at < PIECE ? out.bytes - at : PIECE);
    free(out.data);
    int status = list ? 0 : errno;
    if (list) closedir(list), reading->fd = -1;
    end_reading(reading, status, FOLDER);
}

/* A piece at a time, so that a large file delays no other command. */
static void send_piece(struct reading *reading) {
    static unsigned char piece[PIECE];
    struct stat info;
    if (fstat(reading->fd, &info)) return end_reading(reading, errno, 0);
    if (S_ISDIR(info.st_mode)) return send_listing(reading);
    if (!reading->left) return end_reading(reading, 0, 0);
    ssize_t got = read(reading->fd, piece, reading->left < PIECE ? (size_t)reading->left : PIECE);
    if (got > 0) {
        emit_output(reading->id, false, piece, (size_t)got);
        reading->left -= (uint64_t)got;
    } else end_reading(reading, got < 0 ? errno : 0, 0);
}

/* Whether all of a command that has ended is sent. */
static bool is_over(const struct streamed *command) {
    return command->ended && ((command->out < 0 && command->err < 0) || now_us() >= command->deadline_us);
}

/* When to look again, whatever happens: -1 never. */
static int patience_ms(void) {
    int patience = -1;
    for (int i = 0; i < MOST_COMMANDS; i++) {
        if (readings[i].used && readings[i].fd >= 0) return 0;
        if (commands[i].used && commands[i].ended) patience = 10;
    }
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
        if (poll(watched, (nfds_t)(2 + count), patience_ms()) < 0 && errno != EINTR) give_up("poll");
        for (int i = 0; i < count; i++) {
            if (!watched[2 + i].revents || *owners[i].fd < 0) continue;
            if (owners[i].fd == &owners[i].command->in) feed(owners[i].command);
            else forward(owners[i].command, owners[i].fd);
        }
        for (int i = 0; i < MOST_COMMANDS; i++) {
            if (commands[i].used && is_over(&commands[i])) finish(&commands[i]);
            if (readings[i].used && readings[i].fd >= 0) send_piece(&readings[i]);
        }
        if (watched[1].revents) from_agent();
        if (watched[0].revents && !from_host()) return;
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
    text = !strcmp(argv[0], "text");
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
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) give_up("no socket");
    pid_t pid = fork();
    if (pid == 0) close(ends[0]), be_agent(ends[1]);
    if (pid < 0) give_up("no process");
    close(ends[1]);
    agent = ends[0];
    prctl(PR_SET_DUMPABLE, 0);
    emit(&ready, error ? argv[1] : who, error ? strlen(argv[1]) : (size_t)length);
    if (!error) relay();
    if (getpid() == 1) return 0; /* and everything with us */
    close(agent); /* the agent kills what runs and ends */
    for (int tries = 0; tries < 1000 && !waitpid(pid, &status, WNOHANG); tries++) usleep(5000);
    return 0;
}
