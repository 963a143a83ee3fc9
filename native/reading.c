/* Files and folders on their way from a guest to its host. In: descriptors that the agent opened. Out: pieces, then the reply itself.
 *
 * A piece of each at a time, so that a large file delays no command. */
#define _GNU_SOURCE
#include "warden.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MOST_READINGS = 256,
    LONGEST_NAME = 256,
    FOLDER = 1,                  /* flag of an OPEN's reply: what came is a listing */
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

static struct reading readings[MOST_READINGS];

/* The agent's answer to an OPEN; false when it is none of ours. */
bool reading_opened(struct agent_reply *reply, int fd) {
    struct reading *reading = NULL;
    struct stat info;
    for (int i = 0; i < MOST_READINGS && !reading; i++)
        if (readings[i].used && readings[i].id == reply->id) reading = &readings[i];
    if (!reading) return false;
    if (!reply->status && (fd < 0 || fstat(fd, &info))) reply->status = EIO;
    if (!reply->status && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) reply->status = EINVAL;
    if (!reply->status) {
        reading->fd = fd;
        return true;
    }
    if (fd >= 0) close(fd);
    reading->used = false;
    frame_send(reply, NULL, 0);
    return true;
}

/* Something will be opened, of which the host wants `limit` bytes at most. False when there are too many already. */
bool reading_begin(uint32_t id, uint64_t limit) {
    for (int i = 0; i < MOST_READINGS; i++) {
        if (readings[i].used) continue;
        readings[i] = (struct reading){.used = true, .id = id, .fd = -1, .left = limit};
        return true;
    }
    return false;
}

static void end_reading(struct reading *reading, int status, uint32_t flags) {
    struct agent_reply reply = {.op = AGENT_OPEN, .id = reading->id, .status = status, .flags = flags};
    frame_send(&reply, NULL, 0);
    if (reading->fd >= 0) close(reading->fd);
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
        buffer_append(&out, &one, sizeof one);
        buffer_append(&out, entry->d_name, one.name_bytes);
    }
    for (size_t at = 0; at < out.bytes; at += OUTPUT_CHUNK)
        output_send(reading->id, false, out.data + at, out.bytes - at < OUTPUT_CHUNK ? out.bytes - at : OUTPUT_CHUNK);
    free(out.data);
    int status = list ? 0 : errno;
    if (list) closedir(list), reading->fd = -1;
    end_reading(reading, status, FOLDER);
}

/* A piece at a time, so that a large file delays no other command. */
static void send_piece(struct reading *reading) {
    static unsigned char piece[OUTPUT_CHUNK];
    struct stat info;
    if (fstat(reading->fd, &info)) return end_reading(reading, errno, 0);
    if (S_ISDIR(info.st_mode)) return send_listing(reading);
    if (!reading->left) return end_reading(reading, 0, 0);
    ssize_t got = read(reading->fd, piece, reading->left < OUTPUT_CHUNK ? (size_t)reading->left : OUTPUT_CHUNK);
    if (got > 0) {
        output_send(reading->id, false, piece, (size_t)got);
        reading->left -= (uint64_t)got;
    } else end_reading(reading, got < 0 ? errno : 0, 0);
}

/* Whether there is anything to send. */
bool readings_wait(void) {
    for (int i = 0; i < MOST_READINGS; i++)
        if (readings[i].used && readings[i].fd >= 0) return true;
    return false;
}

void readings_move(void) {
    for (int i = 0; i < MOST_READINGS; i++)
        if (readings[i].used && readings[i].fd >= 0) send_piece(&readings[i]);
}
