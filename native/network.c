/* Network namespaces. In: a sandbox that starts or has ended. Out: a namespace that holds nothing but a raised loopback device, no
 * other process is in, and nothing was ever sent in.
 *
 * Making and removing one is the most costly part of a sandbox. With root, the warden owns them (so that nobody in a sandbox has any
 * right over its own), and one in which the kernel counted not one packet, failure or open socket serves the next sandbox. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_SPARES = 512, MOST_COUNTERS = 16384 };
/* What a namespace says of its past. Of sockstat the first line only: the others count the whole machine's. */
static const char *const RECORDS[] = {"dev", "snmp", "netstat", "snmp6", "sockstat"};

static int home = -1, spares[MOST_SPARES], spare_count, old_count; /* the first `old_count` have waited since the last network_expire */
static char untouched[MOST_COUNTERS];

const char *network_raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return NULL; /* a kernel without IPv4 has no loopback to raise */
    int failed = ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
    return failed ? "loopback" : NULL;
}

static int here(void) { return open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC); }

static size_t read_record(const char *name, char *text, size_t room) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/net/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;
    if (fd < 0) return 0;
    for (ssize_t got; length < room && (got = read(fd, text + length, room - length)) > 0;) length += (size_t)got;
    close(fd);
    const char *line_end = strcmp(name, "sockstat") ? NULL : memchr(text, '\n', length);
    return line_end ? (size_t)(line_end - text) : length;
}

/* The current namespace's counters as text. False when they do not fit. */
static bool read_counters(char text[MOST_COUNTERS]) {
    size_t length = 0;
    for (size_t i = 0; i < COUNT(RECORDS); i++) length += read_record(RECORDS[i], text + length, MOST_COUNTERS - 1 - length);
    text[length] = 0;
    return length && length < MOST_COUNTERS - 1;
}

static int make(void) {
    if (unshare(CLONE_NEWNET)) return -1;
    int fd = network_raise_loopback() ? -1 : here();
    if (fd >= 0 && !*untouched && !read_counters(untouched)) *untouched = 0;
    return fd;
}

/* Enters a namespace for a sandbox: what is started next is born in it. Returns its descriptor, or -1 with errno. */
int network_enter(void) {
    if (home < 0 && (home = here()) < 0) return -1;
    int fd = spare_count ? spares[--spare_count] : make();
    if (old_count > spare_count) old_count = spare_count;
    if (fd >= 0 && !setns(fd, CLONE_NEWNET)) return fd;
    int error = errno;
    if (fd >= 0) close(fd);
    network_leave();
    errno = error;
    return -1;
}

/* Enters a namespace that no other sandbox ever gets: it goes with its last process and socket. Returns 0, or -1 with errno. */
int network_enter_own(void) {
    if (home < 0 && (home = here()) < 0) return -1;
    if (unshare(CLONE_NEWNET)) return -1;
    return network_raise_loopback() ? -1 : 0;
}

/* Back to where the warden lives. */
void network_leave(void) {
    if (home >= 0 && setns(home, CLONE_NEWNET)) _exit(1);
}

/* Takes back the namespace of a sandbox whose last process is dead. */
void network_release(int fd) {
    static char counters[MOST_COUNTERS];
    if (fd < 0) return;
    bool clean = spare_count < MOST_SPARES && *untouched && !setns(fd, CLONE_NEWNET);
    if (clean) {
        clean = read_counters(counters) && !strcmp(counters, untouched);
        network_leave();
    }
    if (clean) spares[spare_count++] = fd;
    else close(fd);
}

/* Closes those that nobody came for since the last call. Returns whether some are left. */
bool network_expire(void) {
    for (int i = 0; i < old_count; i++) close(spares[i]);
    spare_count -= old_count;
    memmove(spares, spares + old_count, (size_t)spare_count * sizeof *spares);
    old_count = spare_count;
    return spare_count;
}
