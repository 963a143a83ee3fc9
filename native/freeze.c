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

enum { PATIENCE_US = 200000, SHORT_WAIT_US = 5000, LOOK_US = 500 };

/* A state in which a process does nothing by itself: stopped, traced, dead. One that waits in the kernel (D) may go on in a moment; after
 * a while it is one whose vforked child was stopped, and rests with it. */
static bool rests(int proc, const char *pid, const char *states) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.16s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return true;
    text[got] = 0;
    const char *name_end = strrchr(text, ')'); /* a process may have ')' in its name */
    return name_end && strlen(name_end) > 2 && strchr(states, name_end[2]);
}

static bool all_rest(const char *states) {
    bool resting = true;
    DIR *list = opendir("/proc");
    if (!list) return true;
    for (struct dirent *entry; resting && (entry = readdir(list));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && strcmp(entry->d_name, "1")) resting = rests(dirfd(list), entry->d_name, states);
    closedir(list);
    return resting;
}

/* A signal takes effect when its process leaves the kernel: a long write goes on for a moment. */
void freeze_processes(void) {
    uint64_t began = now_us(), now = began;
    kill(-1, SIGSTOP);
    while (!all_rest(now < began + SHORT_WAIT_US ? "TtZXx" : "TtZXxD") && now < began + PATIENCE_US) {
        usleep(LOOK_US);
        now = now_us();
    }
}

void thaw_processes(void) { kill(-1, SIGCONT); }
