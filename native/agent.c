/* The sandbox's first process: init, and the host's hand inside. In: requests (protocol.h) from the host. Out: replies.
 *
 * It never waits for anything that lives in the sandbox: files are opened without blocking, pipes are polled. A command that runs
 * alone is the agent's own child; beside others, each has a supervisor process (exec.c), so that each can be killed alone.
 * It reaps every orphan. When the host's end of the socket closes it exits, and the kernel kills the whole pid namespace. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_JOBS = 256, MOST_WORDS = 65536, OWN_OUTPUT = 4 << 20 /* more would make init the largest prey in a memory shortage */ };

static struct job jobs[MOST_JOBS];
int *asked_signal;            /* a guest's supervisor reads here which signal to send: gVisor's signals carry no number along */
static int *asked_signals;
bool guest;
static bool frozen;           /* every process of the sandbox is stopped */
static bool strays;           /* a command of the agent's own ended and left processes behind */
/* The command that the agent supervises itself, because nothing else lived here when it started: no other process to create, and
 * everything that is not below a supervisor is its. */
static struct supervision own;
static struct command own_command;
static unsigned char *own_input;
static int channel, signals, tree_dead;

static void reply(const struct agent_request *request, int status, uint32_t flags, int fd) {
    struct agent_reply answer = {.op = request->op, .id = request->id, .status = status, .flags = flags};
    wire_send(channel, &answer, sizeof answer, NULL, 0, fd);
}

/* Where others live beside us, only what was started here. */
static void kill_everything(void) {
    if (guest) kill_descendants(getpid(), NULL, 0, reap_dead);
    else kill(-1, SIGKILL);
}

static int running_jobs(void) {
    int count = 0;
    for (int i = 0; i < MOST_JOBS; i++) count += jobs[i].supervisor != 0;
    return count;
}

static struct job *find_job(uint32_t id, uint32_t op) {
    for (int i = 0; i < MOST_JOBS; i++)
        if (jobs[i].supervisor && jobs[i].id == id && jobs[i].op == op) return &jobs[i];
    return NULL;
}

static void job_ended(struct job *job, int status) {
    struct agent_reply lost = {.op = job->op, .id = job->id, .status = EIO};
    if (job->op && (!WIFEXITED(status) || WEXITSTATUS(status))) wire_send(channel, &lost, sizeof lost, NULL, 0, -1);
    else if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        /* Killed, perhaps before it could report: do it in its place (the host ignores a second report). Only in-sandbox root can have
         * done that, or the host by AGENT_KILL_ALL; what it watched over can no longer be told from the rest, so everything goes, or
         * the killer would outlive its timeout. */
        struct agent_reply answer = {.op = AGENT_EXIT, .id = job->id, .status = SIGKILL};
        kill_everything();
        wire_send(channel, &answer, sizeof answer, NULL, 0, -1);
    }
    job->supervisor = 0;
}

/* Reaps whatever ended; with flags 0, waits until every process of the sandbox has. */
static void reap(int flags) {
    struct rusage usage;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, flags, &usage)) > 0) {
        if (own.command) supervision_ended(&own, pid, status, &usage);
        for (int i = 0; i < MOST_JOBS; i++)
            if (jobs[i].supervisor == pid) job_ended(&jobs[i], status);
    }
    if (pid < 0 && errno == ECHILD) strays = false;
}

/* Waits for those that are dead already. */
void reap_dead(void) { reap(WNOHANG); }

static void finish_own(int error) {
    siginfo_t child;
    supervision_report(&own, error);
    free(own_command.argv);
    free(own_input);
    own_input = NULL;
    own.command = NULL;
    if (!waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT)) strays = true;
}

/* Kills what the agent's own command started: everything, unless other commands run. */
static void kill_own(void) {
    pid_t spared[MOST_JOBS];
    int count = 0;
    for (int i = 0; i < MOST_JOBS; i++)
        if (jobs[i].supervisor) spared[count++] = jobs[i].supervisor;
    if (count) {
        kill_descendants(getpid(), spared, count, reap_dead);
        return;
    }
    kill(-1, SIGKILL);
    strays = true;
    for (uint64_t deadline = now_us() + GONE_US; reap_dead(), strays && now_us() < deadline;) usleep(GONE_LOOK_US);
}

/* Points `count` words of the payload into `words`; returns the position after them, or NULL when the payload ends before. */
static char *take_words(char *at, const char *end, char **words, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        char *stop = memchr(at, 0, (size_t)(end - at));
        if (!stop) return NULL;
        words[i] = at;
        at = stop + 1;
    }
    words[count] = NULL;
    return at;
}

static int parse_command(const struct agent_request *request, const struct message *message, struct command *command) {
    char *at = (char *)message->payload, *end = at + message->payload_bytes, *cwd[2];
    *command = (struct command){.id = request->id, .who = request->who, .flags = request->flags, .max_output = request->max_output};
    bool capture = request->flags & EXEC_CAPTURE;
    if (!request->first || request->first > MOST_WORDS || request->second > MOST_WORDS) return E2BIG;
    if (request->stdin_bytes > message->payload_bytes || (!capture && message->fd_count != 3)) return EBADMSG;
    end -= request->stdin_bytes;
    command->argv = malloc((request->first + request->second + 2) * sizeof(char *));
    if (!command->argv) return ENOMEM;
    command->env = command->argv + request->first + 1;
    if (!(at = take_words(at, end, cwd, 1)) || !(at = take_words(at, end, command->argv, request->first)) ||
        take_words(at, end, command->env, request->second) != end)
        return EBADMSG;
    command->cwd = cwd[0];
    command->input = (unsigned char *)end;
    command->input_bytes = request->stdin_bytes;
    for (int i = 0; i < 3 && !capture; i++) command->fds[i] = message->fds[i];
    return 0;
}

static void start_own(struct command *command) {
    int error = 0;
    own_command = *command;
    if (command->input_bytes) { /* it lies in the message, which ends before it is fed */
        if ((own_input = malloc(command->input_bytes))) memcpy(own_input, command->input, command->input_bytes);
        else error = ENOMEM;
        own_command.input = own_input;
    }
    if (!error) error = supervision_begin(&own, channel, &own_command);
    if (error) finish_own(error);
}

/* A supervisor starts without the pipes of the agent's own command, or its reader would never see their end. */
_Noreturn static void become_supervisor(const struct command *command) {
    if (own.command) {
        close(own.out.fd);
        close(own.err.fd);
        close(own.input);
    }
    supervise(channel, signals, tree_dead, command);
}

static struct job *free_job(void) {
    for (int i = 0; i < MOST_JOBS; i++)
        if (!jobs[i].supervisor) return &jobs[i];
    return NULL;
}

static int start_supervised(const struct command *command) {
    struct job *job = free_job();
    if (!job) return EAGAIN;
    if (guest) asked_signal = &asked_signals[job - jobs];
    pid_t pid = fork();
    if (pid == 0) become_supervisor(command);
    if (pid < 0) return errno;
    *job = (struct job){pid, command->id, 0};
    return 0;
}

/* A guest's files go out or come in over a command's pipes; what moves them ends with no word but its own. */
_Noreturn static void become_copier(const struct command *command) {
    struct agent_reply started = {.op = AGENT_STARTED, .id = command->id}, ended = {.op = AGENT_EXIT, .id = command->id};
    wire_send(channel, &started, sizeof started, NULL, 0, -1);
    for (int i = 0; i < 3; i++) dup2(command->fds[i], i);
    ended.status = W_EXITCODE(filesystem_identity(UID_OF(command->who), GID_OF(command->who)) ? errno : copy_files(command->argv[0]), 0);
    wire_send(channel, &ended, sizeof ended, NULL, 0, -1);
    _exit(0);
}

static int start_copier(const struct command *command) {
    struct job *job = free_job();
    pid_t pid = job ? fork() : (errno = EAGAIN, -1);
    if (pid == 0) become_copier(command);
    if (pid > 0) *job = (struct job){pid, command->id, AGENT_EXIT};
    return pid < 0 ? errno : 0;
}

static void start_command(const struct agent_request *request, const struct message *message) {
    struct command command;
    int error = parse_command(request, message, &command);
    if (!error && !guest && !own.command && !running_jobs() && !strays && request->max_output <= OWN_OUTPUT) return start_own(&command);
    if (!error) error = guest && command.flags & EXEC_COPY ? start_copier(&command) : start_supervised(&command);
    free(command.argv);
    if (error) {
        struct agent_reply answer = {.op = AGENT_EXIT, .id = request->id, .status = error, .flags = NOT_STARTED};
        wire_send(channel, &answer, sizeof answer, NULL, 0, -1);
    }
}

/* Waits, briefly, until a supervisor has dealt its blow: a command started meanwhile would be hit by it. */
static void await_tree_dead(void) {
    struct pollfd watched[] = {{tree_dead, POLLIN, 0}, {signals, POLLIN, 0}};
    uint64_t count;
    if (poll(watched, COUNT(watched), 200) > 0 && read(tree_dead, &count, sizeof count) < 0) return;
}

static void kill_tree(const struct agent_request *request) {
    struct job *job = find_job(request->id, 0), *copier = find_job(request->id, AGENT_EXIT);
    union sigval none = {0};
    if (copier) kill(copier->supervisor, SIGKILL);
    if (own.command && own_command.id == request->id) kill_own();
    else if (job && !sigqueue(job->supervisor, SIGUSR1, none)) {
        if (frozen) kill(job->supervisor, SIGCONT); /* it cannot deal the blow while it is stopped itself */
        await_tree_dead();
    }
}

static void send_signal(const struct agent_request *request) {
    struct job *job = find_job(request->id, 0);
    union sigval number = {.sival_int = (int)request->first};
    if (request->first < 1 || request->first > 64) return;
    if (own.command && own_command.id == request->id && !own.exited) kill(-own.child, (int)request->first);
    else if (job) {
        if (guest) asked_signals[job - jobs] = (int)request->first;
        sigqueue(job->supervisor, SIGUSR2, number);
    }
}

static void kill_all(const struct agent_request *request) {
    kill_everything();
    reap(0);
    reply(request, 0, 0, -1);
}

/* A guest acts on files in a process of its own: gVisor has no file-system identity apart from the real one. Returns whether we are that
 * process, or need none. */
static bool step_aside(const struct agent_request *request) {
    struct job *job = free_job();
    if (!guest) return true;
    pid_t pid = job ? fork() : -1;
    if (pid == 0) return true;
    if (pid > 0) *job = (struct job){pid, request->id, request->op};
    else reply(request, EAGAIN, 0, -1);
    return false;
}

static void step_back(void) {
    if (guest) _exit(0);
    own_identity();
}

/* File operations, with the identity of whom they are for. Returns an errno, and a descriptor for AGENT_OPEN. */
static int act_on_path(const struct agent_request *request, const char *path, int *fd) {
    switch (request->op) {
    case AGENT_OPEN:
        *fd = open_inside(path, (int)request->first, request->second);
        if (*fd < 0 && errno == ENOENT && request->flags & OPEN_PARENTS && !make_parents(path))
            *fd = open_inside(path, (int)request->first, request->second);
        return *fd < 0 ? errno : 0;
    case AGENT_MKDIR:
        return make_parents(path) || mkdir(path, request->second & 07777) ? errno : 0;
    default:
        return unlink(path) && (errno != EISDIR || rmdir(path)) ? errno : 0;
    }
}

static void use_path(const struct agent_request *request, const struct message *message) {
    int fd = -1, error = EBADMSG;
    const char *path = (const char *)message->payload;
    if (!step_aside(request)) return;
    if (message->payload_bytes && path[message->payload_bytes - 1] == 0 && path[0] == '/')
        error = filesystem_identity(UID_OF(request->who), GID_OF(request->who)) ? errno : act_on_path(request, path, &fd);
    reply(request, error, 0, fd);
    if (fd >= 0) close(fd);
    step_back();
}

/* A whole tree is removed by a process of its own: it may be of any size. */
static void remove_folder(const struct agent_request *request, const struct message *message) {
    const char *path = (const char *)message->payload;
    if (!message->payload_bytes || path[message->payload_bytes - 1] || path[0] != '/') return reply(request, EBADMSG, 0, -1);
    pid_t pid = guest ? !step_aside(request) : fork();
    if (pid < 0) return reply(request, errno, 0, -1);
    if (pid > 0) return;
    int error = filesystem_identity(UID_OF(request->who), GID_OF(request->who)) || remove_tree(path) ? errno : 0;
    reply(request, error, 0, -1);
    _exit(0);
}

static void write_batch(const struct agent_request *request, const struct message *message) {
    struct batch_result result = {.error = EPERM};
    if (!step_aside(request)) return;
    if (!filesystem_identity(UID_OF(request->who), GID_OF(request->who))) result = batch_unpack(message->payload, message->payload_bytes);
    struct agent_reply answer = {.op = AGENT_WRITE, .id = request->id, .status = result.error};
    wire_send(channel, &answer, sizeof answer, result.path, strlen(result.path), -1);
    step_back();
}

/* Everything but what acts for the host: it would wait for the answer. */
static void stop_commands(void) {
    pid_t spared[MOST_JOBS];
    int count = 0;
    for (int i = 0; i < MOST_JOBS; i++)
        if (jobs[i].supervisor && jobs[i].op) spared[count++] = jobs[i].supervisor;
    stop_tree(getpid(), spared, count);
}

static void freeze(const struct agent_request *request) {
    frozen = request->op == AGENT_FREEZE;
    if (guest && frozen) stop_commands();
    else if (guest) resume_tree(getpid());
    else if (frozen) freeze_processes();
    else thaw_processes();
    reply(request, 0, 0, -1);
}

static void dispatch(const struct agent_request *request, const struct message *message) {
    switch (request->op) {
    case AGENT_EXEC: return start_command(request, message);
    case AGENT_SIGNAL: return send_signal(request);
    case AGENT_KILL_TREE: return kill_tree(request);
    case AGENT_KILL_ALL: return kill_all(request);
    case AGENT_FREEZE:
    case AGENT_THAW: return freeze(request);
    case AGENT_WRITTEN: return reply(request, 0, 0, WRITTEN);
    case AGENT_WRITE: return write_batch(request, message);
    case AGENT_REMOVE:
        if (request->flags & REMOVE_TREE) return remove_folder(request, message);
        return use_path(request, message);
    case AGENT_OPEN:
    case AGENT_MKDIR: return use_path(request, message);
    default: return reply(request, request->op == AGENT_PING ? 0 : ENOSYS, 0, -1);
    }
}

static void receive(void) {
    struct agent_request request;
    struct message message;
    ssize_t got = wire_receive(channel, &request, sizeof request, &message);
    if (got == 0 || (got < 0 && errno != EBADMSG && errno != EINTR)) {
        if (guest) kill_everything(); /* elsewhere the pid namespace goes, and all with it */
        _exit(0);
    }
    if (got < 0) return;
    dispatch(&request, &message);
    wire_release(&message);
}

_Noreturn void agent_serve(int socket, int signal_fd) {
    struct pollfd watched[5];
    channel = socket;
    signals = signal_fd;
    tree_dead = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    prctl(PR_SET_NAME, "init");
    if (guest) asked_signals = mmap(NULL, MOST_JOBS * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (asked_signals == MAP_FAILED) _exit(1);
    for (;;) {
        int patience_ms = own.command ? supervision_patience_ms(&own) : -1;
        if (patience_ms == 0) {
            finish_own(0);
            continue;
        }
        if (own.command) supervision_watch(&own, watched);
        else watched[0].fd = watched[1].fd = watched[2].fd = -1;
        watched[3] = (struct pollfd){channel, POLLIN, 0};
        watched[4] = (struct pollfd){signals, POLLIN, 0};
        if (poll(watched, COUNT(watched), patience_ms) < 0) continue;
        if (own.command && supervision_move(&own, watched)) kill_own();
        if (watched[4].revents) {
            struct signalfd_siginfo info[16];
            while (read(signals, info, sizeof info) > 0);
            reap(WNOHANG);
        }
        if (watched[3].revents) receive();
    }
}
