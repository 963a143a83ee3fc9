/* Terminals that a guest makes for commands. In: whose; sizes; keys. Out: a pseudo-terminal's outer end, for the relay, and the command's.
 *
 * gVisor's line discipline is not whole, and what it leaves out is done here where that is possible from outside. It is told by its not
 * knowing, from the outer end, who is in the foreground. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

enum { LONGEST_LINE = 4096 };

/* The command's end. gVisor knows it by its path only. */
static int other_end(int terminal) {
    int locked = 0, number;
    char path[32];
    if (ioctl(terminal, TIOCSPTLCK, &locked)) return -1;
    int end = ioctl(terminal, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (end >= 0 || errno != ENOTTY || ioctl(terminal, TIOCGPTN, &number)) return end;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    if ((end = open_inside(path, O_RDWR, 0)) >= 0) fcntl(end, F_SETFL, 0);
    return end;
}

/* A terminal of this place's own devpts. It belongs to the command's user, who may open it again by its name; where the right to give it
 * away is missing, only that fails. Returns the outer end, which never blocks, or -1 with errno. */
int terminal_open(uint32_t who, int *end) {
    int terminal = open_inside("/dev/ptmx", O_RDWR, 0);
    if (terminal < 0) return -1;
    if ((*end = other_end(terminal)) < 0) {
        int error = errno;
        close(terminal);
        errno = error;
        return -1;
    }
    if (fchown(*end, UID_OF(who), (gid_t)-1)) errno = 0;
    return terminal;
}

static bool is_whole(int terminal) {
    pid_t foreground;
    return !ioctl(terminal, TIOCGPGRP, &foreground);
}

/* Returns false when nobody was told: gVisor changes the size without a word. */
bool terminal_resize(int terminal, uint32_t rows, uint32_t columns) {
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    return ioctl(terminal, TIOCSWINSZ, &size) || is_whole(terminal);
}

/* Writes keys, as `write` does. gVisor leaves the key that sent a signal in the line, and what was typed before it: both are erased, or
 * they would stand before whatever is typed next. */
ssize_t terminal_type(int terminal, const unsigned char *keys, size_t bytes, size_t *line_bytes) {
    static unsigned char erasing[LONGEST_LINE];
    struct termios modes;
    bool signals = false;
    size_t count = 0;
    if (is_whole(terminal) || tcgetattr(terminal, &modes) || !(modes.c_lflag & ICANON) || !(modes.c_lflag & ISIG))
        return write(terminal, keys, bytes);
    while (count < bytes && !signals) {
        unsigned char key = keys[count++];
        *line_bytes = key == '\n' || key == '\r' || key == modes.c_cc[VEOF] ? 0 : *line_bytes + 1;
        signals = key == modes.c_cc[VINTR] || key == modes.c_cc[VQUIT] || key == modes.c_cc[VSUSP];
    }
    ssize_t done = write(terminal, keys, count);
    if (!signals || done != (ssize_t)count) return done;
    if (*line_bytes > LONGEST_LINE) *line_bytes = LONGEST_LINE;
    memset(erasing, modes.c_cc[VERASE], *line_bytes);
    if (write(terminal, erasing, *line_bytes) < 0) return done;
    *line_bytes = 0;
    return done;
}
