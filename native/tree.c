/* Killing one command's process tree while others of the same sandbox live on. In: its supervisor. Out: no descendant left alive.
 *
 * Every descendant has the supervisor (a child subreaper) above it, whatever sessions it made and however often it forked and
 * orphaned itself. They are stopped first and killed afterwards: a stopped process keeps its place under the process limit, so a
 * fork bomb cannot refill the places of its dead, and each round leaves fewer that run. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_PROCESSES = 4096, GUEST_US = 3000000 };

struct table {
    int count;
    struct entry {
        pid_t pid, parent;
        bool below;
    } entries[MOST_PROCESSES];
};

struct victims {
    pid_t pids[MOST_PROCESSES];
    int count;
};

struct place {               /* of a process among the others */
    char state;
    pid_t parent, session;    /* -1 when there is no such process */
};

static struct place place_of(int proc, const char *pid) {
    struct place place = {'X', -1, -1};
    char path[32], text[512];
    snprintf(path, sizeof path, "%.16s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return place;
    text[got] = 0;
    const char *name_end = strrchr(text, ')'); /* a process may have ')' in its name */
    if (!name_end || sscanf(name_end, ") %c %d %*d %d", &place.state, &place.parent, &place.session) != 3) return (struct place){'X', -1, -1};
    return place;
}

static bool contains(const struct victims *victims, pid_t pid) {
    for (int i = 0; i < victims->count; i++)
        if (victims->pids[i] == pid) return true;
    return false;
}

/* Lists all processes with their parents. Known victims are below by definition: their (slow) stat files need no second look. */
static void list_processes(struct table *table, const struct victims *victims) {
    DIR *list = opendir("/proc");
    table->count = 0;
    if (!list) return;
    for (struct dirent *entry; table->count < MOST_PROCESSES && (entry = readdir(list));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        pid_t pid = (pid_t)atoi(entry->d_name);
        bool known = contains(victims, pid);
        pid_t parent = known ? 0 : place_of(dirfd(list), entry->d_name).parent;
        if (parent >= 0) table->entries[table->count++] = (struct entry){pid, parent, known};
    }
    closedir(list);
}

static bool is_below(const struct table *table, pid_t pid, pid_t root) {
    if (pid == root) return true;
    for (int i = 0; i < table->count; i++)
        if (table->entries[i].pid == pid) return table->entries[i].below;
    return false;
}

/* The spared and what is below them are not marked. */
static void mark_descendants(struct table *table, pid_t root, const struct victims *spared) {
    bool changed = true;
    while (changed) {
        changed = false;
        for (int i = 0; i < table->count; i++) {
            struct entry *entry = &table->entries[i];
            if (entry->below || entry->pid == root || contains(spared, entry->pid)) continue;
            if (is_below(table, entry->parent, root)) entry->below = changed = true;
        }
    }
}

/* Stops every descendant of `root` that is not among the victims yet, until a look at the whole table finds no more, or until the
 * deadline. Returns whether it was done by then. */
static bool stop_descendants(pid_t root, struct victims *victims, const struct victims *spared, uint64_t deadline_us) {
    static struct table table;
    int before;
    do {
        before = victims->count;
        list_processes(&table, victims);
        mark_descendants(&table, root, spared);
        for (int i = 0; i < table.count; i++) {
            struct entry *entry = &table.entries[i];
            if (!entry->below || victims->count == MOST_PROCESSES || contains(victims, entry->pid)) continue;
            kill(entry->pid, SIGSTOP);
            victims->pids[victims->count++] = entry->pid;
        }
    } while (victims->count > before && now_us() < deadline_us);
    return victims->count == before;
}

/* Waits, briefly, until none of them is there any more: whoever looks after a command's end must find nothing of it. A dying process is
 * there until its parent has waited for it, and the last parent of all of them is the caller. */
static void await_gone(const struct victims *victims, void (*reap)(void)) {
    uint64_t deadline = now_us() + GONE_US;
    for (int i = 0; i < victims->count; i++) {
        for (reap(); !kill(victims->pids[i], 0) && now_us() < deadline; reap()) usleep(GONE_LOOK_US);
    }
}

/* The same for everybody below the caller, whoever that is. */
static void await_childless(void (*reap)(void)) {
    uint64_t deadline = now_us() + GONE_US;
    siginfo_t child;
    for (reap(); !waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) && now_us() < deadline; reap()) usleep(GONE_LOOK_US);
}

/* Kills everything below `root`, but for the spared and what is below them, and waits for it; `reap` waits for the caller's dead
 * children. When a tree outruns 80 ms, everything in the sandbox but the caller and init dies; of a
 * guest, which has no right to that, the tree is given longer. */
void kill_descendants(pid_t root, const pid_t *spared, int spared_count, void (*reap)(void)) {
    static struct victims victims, kept;
    uint64_t deadline = now_us() + (guest ? GUEST_US : 80000);
    bool done = false;
    victims.count = 0;
    kept.count = 0;
    for (int i = 0; i < spared_count && i < MOST_PROCESSES; i++) kept.pids[kept.count++] = spared[i];
    for (int killed = 0; !done && now_us() < deadline;) {
        if (!stop_descendants(root, &victims, &kept, deadline)) break;
        done = killed == victims.count; /* a further look found nobody: none woke the stopped ones before they were killed */
        for (; killed < victims.count; killed++) kill(victims.pids[killed], SIGKILL);
    }
    if (!done && !guest) {
        kill(-1, SIGKILL);
        await_childless(reap);
    }
    await_gone(&victims, reap);
}

/* Stops everything below `root` but for the spared, and waits, briefly, until it stands still: a signal takes effect when its process
 * leaves the kernel. */
void stop_tree(pid_t root, const pid_t *spared, int spared_count) {
    static struct victims stopped, kept;
    uint64_t deadline = now_us() + GONE_US;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    stopped.count = kept.count = 0;
    for (int i = 0; i < spared_count && i < MOST_PROCESSES; i++) kept.pids[kept.count++] = spared[i];
    stop_descendants(root, &stopped, &kept, deadline);
    for (int i = 0; i < stopped.count && now_us() < deadline;) {
        char pid[16];
        snprintf(pid, sizeof pid, "%d", stopped.pids[i]);
        if (strchr("RS", place_of(proc, pid).state)) usleep(GONE_LOOK_US);
        else i++;
    }
    if (proc >= 0) close(proc);
}

/* Lets everything below `root` go on. */
void resume_tree(pid_t root) {
    static struct table table;
    static const struct victims none;
    list_processes(&table, &none);
    mark_descendants(&table, root, &none);
    for (int i = 0; i < table.count; i++)
        if (table.entries[i].below) kill(table.entries[i].pid, SIGCONT);
}

/* Sends a signal to every process of a session. */
void signal_session(pid_t session, int number) {
    DIR *list = opendir("/proc");
    for (struct dirent *entry; list && (entry = readdir(list));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && place_of(dirfd(list), entry->d_name).session == session)
            kill((pid_t)atoi(entry->d_name), number);
    if (list) closedir(list);
}
