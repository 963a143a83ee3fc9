/* One command from start to end. In: argv, env, cwd, who, and where output goes. Out: an exit message with status, usage, and the
 * captured output up to its limit.
 *
 * Whoever supervises it (a process of its own, or the agent itself when nothing else runs in the sandbox) is its parent, adopts
 * whatever it orphans, so that its tree can be killed as a whole, and reads its output, so that a flood ends here, in constant
 * memory. The end of a command is the end of its first process; after that, output is read for DRAIN_US more at most, because
 * children left in the background may hold the pipes for ever. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_TRIES = 100, TRY_US = 2000 };
enum { DRAIN_US = 50000, FLOOD_BYTES = 64 << 20 /* dropped output after which the command is killed */ };

uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* In the vforked child, which shares our memory until execve: only system calls and locals. Returns an errno by not returning it. */
_Noreturn static void become_command(const struct command *command, const int fds[3], volatile int *error) {
    setsid();
    for (int fd = 0; fd < 3; fd++)
        if (dup2(fds[fd], fd) < 0) goto fail;
    if (command->flags & EXEC_TTY && ioctl(0, TIOCSCTTY, 0)) goto fail;
    setpriority(PRIO_PROCESS, 0, 0);
    if (write(CPU_TASKS, "0", 1) != 1) goto fail;
    if (privileges_become(UID_OF(command->who), GID_OF(command->who))) goto fail;
    if (chdir(command->cwd) && (!(command->flags & EXEC_HOME) || chdir("/"))) goto fail;
    signal(SIGPIPE, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execvp(command->argv[0], command->argv);
fail:
    *error = errno;
    _exit(127);
}

static int start(struct supervision *s, const int fds[3]) {
    volatile int error = 0;
    environ = s->command->env; /* execvp looks up the command's own PATH */
    s->started_us = now_us();
    for (volatile int tries = 0;; tries++) {
        s->child = vfork();
        if (s->child == 0) become_command(s->command, fds, &error);
        if (s->child >= 0 || errno != EAGAIN || tries == MOST_TRIES) break;
        reap_dead(); /* what a kill has left holds its places until it is dead and waited for: the next command must not fail for it */
        usleep(TRY_US);
    }
    environ = NULL;
    if (s->child < 0) return errno;
    if (error) waitpid(s->child, NULL, 0);
    return error;
}

static int open_stream(struct stream *stream, size_t limit, int *write_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return errno;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    stream->fd = ends[0];
    *write_end = ends[1];
    void *kept = mmap(NULL, limit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (kept == MAP_FAILED) return errno;
    stream->kept = kept;
    return 0;
}

static void close_stream(const struct supervision *s, struct stream *stream) {
    if (stream->fd >= 0) close(stream->fd);
    if (stream->kept) munmap(stream->kept, s->command->max_output);
    *stream = (struct stream){.fd = -1};
}

static int open_input(struct supervision *s, int *read_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return errno;
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    *read_end = ends[0];
    s->input = ends[1];
    return 0;
}

/* Connects the command's descriptors and starts it. Returns 0 or an errno, and then nothing runs. */
static int launch(struct supervision *s) {
    const struct command *command = s->command;
    int fds[3] = {command->fds[0], command->fds[1], command->fds[2]}, error = 0;
    if (command->flags & EXEC_CAPTURE) { /* fds are 0 so far: /dev/null */
        if (command->input_bytes) error = open_input(s, &fds[0]);
        if (!error) error = open_stream(&s->out, command->max_output, &fds[1]);
        fds[2] = fds[1];
        if (!error && !(command->flags & EXEC_MERGE)) error = open_stream(&s->err, command->max_output, &fds[2]);
    }
    if (!error) error = start(s, fds);
    if (command->flags & EXEC_CAPTURE) {
        if (fds[0] > 0) close(fds[0]);
        if (fds[1] > 0) close(fds[1]);
        if (fds[2] > 0 && fds[2] != fds[1]) close(fds[2]);
    }
    return error;
}

static void feed(struct supervision *s) {
    const struct command *command = s->command;
    ssize_t done = write(s->input, command->input + s->fed, command->input_bytes - s->fed);
    if (done > 0) s->fed += (size_t)done;
    if (s->fed == command->input_bytes || (done < 0 && errno != EAGAIN && errno != EINTR)) {
        close(s->input);
        s->input = -1;
    }
}

/* Returns true when the stream has just become a flood. */
static bool drain(struct supervision *s, struct stream *stream) {
    static unsigned char waste[65536];
    size_t room = s->command->max_output - stream->bytes;
    ssize_t got = read(stream->fd, room ? stream->kept + stream->bytes : waste, room && room < sizeof waste ? room : sizeof waste);
    if (got > 0 && room) stream->bytes += (size_t)got;
    else if (got > 0) stream->dropped += (uint64_t)got;
    else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        close(stream->fd);
        stream->fd = -1;
    }
    if (stream->dropped <= FLOOD_BYTES || s->flooded) return false;
    return s->flooded = true;
}

/* Takes note of a child's end, if it is the command's first process. */
void supervision_ended(struct supervision *s, pid_t pid, int status, const struct rusage *usage) {
    if (pid != s->child || s->exited) return;
    s->exited = true;
    s->exited_us = now_us();
    s->status = status;
    s->usage = *usage;
}

/* How long to wait for more of it: -1 as long as it runs, 0 when it is over. */
int supervision_patience_ms(const struct supervision *s) {
    if (!s->exited) return -1;
    if (s->out.fd < 0 && s->err.fd < 0) return 0;
    uint64_t end = s->exited_us + DRAIN_US, now = now_us();
    return now >= end ? 0 : (int)((end - now) / 1000) + 1;
}

/* What to poll for. */
void supervision_watch(const struct supervision *s, struct pollfd watched[3]) {
    watched[0] = (struct pollfd){s->out.fd, POLLIN, 0};
    watched[1] = (struct pollfd){s->err.fd, POLLIN, 0};
    watched[2] = (struct pollfd){s->input, POLLOUT, 0};
}

/* Moves whatever is ready. Returns true when the command has just flooded: its tree must die. */
bool supervision_move(struct supervision *s, const struct pollfd watched[3]) {
    bool flooded = false;
    if (watched[0].revents) flooded |= drain(s, &s->out);
    if (watched[1].revents) flooded |= drain(s, &s->err);
    if (watched[2].revents) feed(s);
    return flooded;
}

/* Sends all but the last chunk of a stream; the exit message carries the rest. */
static size_t send_most(const struct supervision *s, const struct stream *stream, bool is_err, size_t leave) {
    size_t sent = 0;
    while (stream->bytes - sent > leave) {
        size_t chunk = stream->bytes - sent < OUTPUT_CHUNK ? stream->bytes - sent : OUTPUT_CHUNK;
        struct agent_reply reply = {.op = AGENT_OUTPUT, .id = s->command->id};
        *(is_err ? &reply.err_bytes : &reply.out_bytes) = (uint32_t)chunk;
        if (wire_send(s->socket, &reply, sizeof reply, stream->kept + sent, chunk, -1)) break;
        sent += chunk;
    }
    return sent;
}

static uint64_t microseconds(struct timeval time) { return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_usec; }

/* Reports the end, or with `error` that nothing was started, and lets go of everything. */
void supervision_report(struct supervision *s, int error) {
    static unsigned char tail[OUTPUT_CHUNK];
    size_t out = send_most(s, &s->out, false, OUTPUT_CHUNK / 2), err = send_most(s, &s->err, true, OUTPUT_CHUNK / 2);
    struct agent_reply reply = {.op = AGENT_EXIT, .id = s->command->id, .status = error ? error : s->status,
                                .out_bytes = (uint32_t)(s->out.bytes - out), .err_bytes = (uint32_t)(s->err.bytes - err),
                                .user_us = microseconds(s->usage.ru_utime), .system_us = microseconds(s->usage.ru_stime),
                                .max_rss_kib = (uint64_t)s->usage.ru_maxrss, .duration_us = s->exited_us - s->started_us};
    if (error) reply.flags |= NOT_STARTED;
    if (s->out.dropped || s->err.dropped) reply.flags |= OUTPUT_TRUNCATED;
    if (s->flooded) reply.flags |= OUTPUT_FLOODED;
    if (reply.out_bytes) memcpy(tail, s->out.kept + out, reply.out_bytes);
    if (reply.err_bytes) memcpy(tail + reply.out_bytes, s->err.kept + err, reply.err_bytes);
    wire_send(s->socket, &reply, sizeof reply, tail, reply.out_bytes + reply.err_bytes, -1);
    close_stream(s, &s->out);
    close_stream(s, &s->err);
    if (s->input >= 0) close(s->input);
    s->input = -1;
}

/* Starts a command. Returns 0, or an errno, and then nothing runs. */
int supervision_begin(struct supervision *s, int socket, const struct command *command) {
    *s = (struct supervision){.command = command, .socket = socket, .out.fd = -1, .err.fd = -1, .input = -1};
    int error = launch(s);
    if (!error && !(command->flags & EXEC_CAPTURE)) {
        struct agent_reply started = {.op = AGENT_STARTED, .id = command->id};
        wire_send(socket, &started, sizeof started, NULL, 0, -1);
    }
    return error;
}

/* What a supervisor process supervises. */
static struct supervision supervised;

static void reap_supervised(void) {
    struct rusage usage;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) supervision_ended(&supervised, pid, status, &usage);
}

/* To the command's process group. A changed terminal concerns its whole session: whoever is in the foreground there. */
static void pass_on(const struct supervision *s, int number) {
    if (guest && number == SIGWINCH && s->command->flags & EXEC_TTY) signal_session(s->child, number);
    else kill(-s->child, number);
}

static void handle_signals(int signals, int tree_dead) {
    struct supervision *s = &supervised;
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {
        uint64_t one = 1;
        if (info.ssi_signo == SIGUSR2 && !s->exited) pass_on(s, guest ? *asked_signal : info.ssi_int);
        if (info.ssi_signo != SIGUSR1) continue;
        kill_descendants(getpid(), NULL, 0, reap_supervised);
        if (write(tree_dead, &one, sizeof one) < 0) break;
    }
    reap_supervised();
}

/* The life of a supervisor process. After the command's end it stays with the children that were left in the background, which are
 * so never mistaken for another command's. */
_Noreturn void supervise(int socket, int signals, int tree_dead, const struct command *command) {
    struct supervision *s = &supervised;
    struct pollfd watched[4];
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (guest) signals = signal_descriptor(); /* gVisor's tells only of the signals of whoever made it */
    int error = supervision_begin(s, socket, command);
    for (int i = 0; i < 3 && !(command->flags & EXEC_CAPTURE); i++) close(command->fds[i]);
    while (!error && supervision_patience_ms(s)) {
        supervision_watch(s, watched);
        watched[3] = (struct pollfd){signals, POLLIN, 0};
        if (poll(watched, COUNT(watched), supervision_patience_ms(s)) < 0) continue;
        if (supervision_move(s, watched)) kill_descendants(getpid(), NULL, 0, reap_supervised);
        if (watched[3].revents) handle_signals(signals, tree_dead);
    }
    supervision_report(s, error);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) {}
    _exit(0);
}
