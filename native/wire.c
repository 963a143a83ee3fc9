/* Sending and receiving messages. In: bytes from a socket whose other end may be hostile. Out: a message whose lengths agree, or none. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* Long enough for any header and an inline payload. One process handles one message at a time. */
static unsigned char buffer[INLINE_MAX + 512];

static int map_payload(struct message *message, size_t bytes) {
    struct stat info;
    int fd = message->fds[--message->fd_count];
    void *at = MAP_FAILED;
    if (bytes > 0 && bytes <= PAYLOAD_LIMIT && !fstat(fd, &info) && (size_t)info.st_size >= bytes)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return -1;
    message->payload = at;
    message->mapped = true;
    return 0;
}

/* Receives one message. Returns 1, 0 when the other end is closed, -1 with errno; EBADMSG for a message whose lengths disagree. */
ssize_t wire_receive(int socket, void *header, size_t header_bytes, struct message *message) {
    union {
        char space[CMSG_SPACE(sizeof message->fds)];
        struct cmsghdr align;
    } control;
    struct iovec parts = {buffer, sizeof buffer};
    struct msghdr envelope = {.msg_iov = &parts, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control};
    memset(message, 0, sizeof *message);
    ssize_t got = recvmsg(socket, &envelope, MSG_CMSG_CLOEXEC);
    if (got <= 0) return got;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(&envelope); part; part = CMSG_NXTHDR(&envelope, part))
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
            message->fd_count = (int)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(message->fds, CMSG_DATA(part), sizeof(int) * (size_t)message->fd_count);
        }
    struct warden_request start; /* both request headers begin with op, id, flags, payload_bytes */
    memcpy(&start, buffer, sizeof start);
    if ((size_t)got >= header_bytes && !(envelope.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
        memcpy(header, buffer, header_bytes);
        message->payload = buffer + header_bytes;
        message->payload_bytes = start.payload_bytes;
        bool in_fd = start.flags & PAYLOAD_IN_FD;
        if (in_fd ? message->fd_count > 0 && !map_payload(message, start.payload_bytes)
                  : (size_t)got == header_bytes + start.payload_bytes)
            return 1;
    }
    wire_release(message);
    errno = EBADMSG;
    return -1;
}

void wire_release(struct message *message) {
    for (int i = 0; i < message->fd_count; i++)
        if (message->fds[i] >= 0) close(message->fds[i]);
    if (message->mapped) munmap(message->payload, message->payload_bytes);
    message->fd_count = 0;
    message->mapped = false;
}

/* Sends a header, optional data and an optional descriptor (-1: none) as one message. */
int wire_send(int socket, const void *header, size_t header_bytes, const void *data, size_t data_bytes, int fd) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec parts[2] = {{(void *)header, header_bytes}, {(void *)data, data_bytes}};
    struct msghdr envelope = {.msg_iov = parts, .msg_iovlen = data_bytes ? 2 : 1};
    if (fd >= 0) {
        envelope.msg_control = control.space;
        envelope.msg_controllen = sizeof control;
        struct cmsghdr *part = CMSG_FIRSTHDR(&envelope);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(part), &fd, sizeof fd);
    }
    ssize_t sent;
    do sent = sendmsg(socket, &envelope, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}
