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
#include <unistd.h>

enum { MOST_PROCESSES = 4096 };

struct table {
    int count;
    struct entry {
        pid_t pid, parent;
        bool below;
    } entries[MOST_PROCESSES];
};

static pid_t parent_of(int proc, const char *pid) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.16s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return -1;
    text[got] = 0;
    const char *name_end = strrchr(text, ')'); /* a process may have ')' in its name */
    return name_end && strlen(name_end) > 4 ? (pid_t)strtol(name_end + 4, NULL, 10) : -1;
}

static void list_processes(struct table *table) {
    DIR *list = opendir("/proc");
    table->count = 0;
    if (!list) return;
    for (struct dirent *entry; table->count < MOST_PROCESSES && (entry = readdir(list));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        pid_t parent = parent_of(dirfd(list), entry->d_name);
        if (parent > 0) table->entries[table->count++] = (struct entry){(pid_t)atoi(entry->d_name), parent, false};
    }
    closedir(list);
}

static bool is_below(const struct table *table, pid_t pid, pid_t root) {
    if (pid == root) return true;
    for (int i = 0; i < table->count; i++)
        if (table->entries[i].pid == pid) return table->entries[i].below;
    return false;
}

static void mark_descendants(struct table *table, pid_t root) {
    bool changed = true;
    while (changed) {
        changed = false;
        for (int i = 0; i < table->count; i++) {
            struct entry *entry = &table->entries[i];
            if (!entry->below && entry->pid != root && is_below(table, entry->parent, root)) entry->below = changed = true;
        }
    }
}

static bool contains(const pid_t *pids, int count, pid_t pid) {
    for (int i = 0; i < count; i++)
        if (pids[i] == pid) return true;
    return false;
}

/* Signals every descendant of `root`, until a look at the whole table finds none that was not signalled before. Gives up after
 * `deadline_us`; returns whether it was done by then. */
static bool signal_descendants(pid_t root, int signal, uint64_t deadline_us) {
    static struct table table;
    static pid_t done[MOST_PROCESSES];
    int count = 0, before;
    do {
        before = count;
        list_processes(&table);
        mark_descendants(&table, root);
        for (int i = 0; i < table.count; i++) {
            struct entry *entry = &table.entries[i];
            if (!entry->below || count == MOST_PROCESSES || contains(done, count, entry->pid)) continue;
            kill(entry->pid, signal);
            done[count++] = entry->pid;
        }
    } while (count > before && now_us() < deadline_us);
    return count == before;
}

/* Kills everything below `root`, which stays. When a tree outruns 60 ms, everything in the sandbox but `root` and init dies. */
void kill_descendants(pid_t root) {
    uint64_t deadline = now_us() + 60000;
    signal_descendants(root, SIGSTOP, deadline);
    if (!signal_descendants(root, SIGKILL, deadline)) kill(-1, SIGKILL);
}
