/* Freezing a sandbox. In: nothing. Out: every process but init stopped, or going on again.
 *
 * By SIGSTOP rather than by the freezer control group: what that one (version 1) has frozen cannot be killed, so a sandbox whose owner
 * and warden die would stay for ever. One kill(-1) reaches all at once; a process that forks meanwhile restarts its fork first. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATIENCE_US = 200000, LOOK_US = 500 };

/* A state in which a process does nothing by itself: stopped, traced, dead, or waiting in the kernel for one that is. */
static bool rests(int proc, const char *pid) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.16s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return true;
    text[got] = 0;
    const char *name_end = strrchr(text, ')'); /* a process may have ')' in its name */
    return name_end && strlen(name_end) > 2 && strchr("TtZXx", name_end[2]);
}

static bool all_rest(void) {
    bool resting = true;
    DIR *list = opendir("/proc");
    if (!list) return true;
    for (struct dirent *entry; resting && (entry = readdir(list));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && strcmp(entry->d_name, "1")) resting = rests(dirfd(list), entry->d_name);
    closedir(list);
    return resting;
}

/* A signal takes effect when its process leaves the kernel: a long write goes on for a moment. */
void freeze_processes(void) {
    uint64_t deadline = now_us() + PATIENCE_US;
    kill(-1, SIGSTOP);
    while (!all_rest() && now_us() < deadline) usleep(LOOK_US);
}

void thaw_processes(void) { kill(-1, SIGCONT); }
