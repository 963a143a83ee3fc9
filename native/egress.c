/* The ways out of a sandbox with egress. In: a fresh network namespace that the caller is in and has CAP_NET_ADMIN over. Out: its
 * listening sockets, sent to the host process, which decides what becomes of each connection.
 *
 * The namespace has no device but its loopback and every address is local, so these sockets are all there is to reach: what has no
 * listener is refused by the kernel. EGRESS_ALLOW: one each for DNS (UDP, TCP), HTTP and TLS. EGRESS_OPEN: DNS over UDP, and one to
 * which every TCP connection is led. A wildcard address of IPv6 takes IPv4 too. */
#define _GNU_SOURCE
#include "warden.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 128, MOST_LISTENERS = 4, DNS = 53, HTTP = 80, TLS = 443, EVERY_PORT = 1 };

/* A socket bound to `port` of every address. Returns it, or -1 with errno. */
static int listener(int type, uint16_t port) {
    struct sockaddr_in6 wide = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    struct sockaddr_in narrow = {.sin_family = AF_INET, .sin_port = htons(port)};
    const int off = 0;
    int fd = socket(AF_INET6, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool both = fd >= 0;
    if (!both) fd = socket(AF_INET, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (both && setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off)) goto fail;
    if (bind(fd, both ? (struct sockaddr *)&wide : (struct sockaddr *)&narrow, both ? sizeof wide : sizeof narrow)) goto fail;
    if (type == SOCK_STREAM && listen(fd, BACKLOG)) goto fail;
    return fd;
fail:;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int send_all(int socket, const int *fds, size_t count) {
    union {
        char space[CMSG_SPACE(sizeof(int) * MOST_LISTENERS)];
        struct cmsghdr align;
    } control = {0};
    unsigned char how_many = (unsigned char)count;
    struct iovec part = {&how_many, 1};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                              .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
    struct cmsghdr *ancillary = CMSG_FIRSTHDR(&envelope);
    ancillary->cmsg_level = SOL_SOCKET;
    ancillary->cmsg_type = SCM_RIGHTS;
    ancillary->cmsg_len = CMSG_LEN(sizeof(int) * count);
    memcpy(CMSG_DATA(ancillary), fds, sizeof(int) * count);
    ssize_t sent;
    do sent = sendmsg(socket, &envelope, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}

/* Opens the ways out that `flags` ask for and sends them over `socket`. Returns NULL, or what failed with errno. */
const char *egress_open(int socket, uint32_t flags) {
    static const struct {
        int type;
        uint16_t port;
    } NAMED[] = {{SOCK_DGRAM, DNS}, {SOCK_STREAM, DNS}, {SOCK_STREAM, HTTP}, {SOCK_STREAM, TLS}},
      ANY[] = {{SOCK_DGRAM, DNS}, {SOCK_STREAM, EVERY_PORT}};
    bool any = flags & EGRESS_OPEN;
    size_t wanted = any ? COUNT(ANY) : COUNT(NAMED), count = 0;
    int fds[MOST_LISTENERS];
    const char *failed = NULL;
    if (netlink_make_everything_local(any)) return "egress routes";
    if (any && netlink_redirect_tcp(EVERY_PORT)) return "egress redirection (nf_tables)";
    for (; !failed && count < wanted; count++)
        if ((fds[count] = listener((any ? ANY : NAMED)[count].type, (any ? ANY : NAMED)[count].port)) < 0) failed = "egress listeners";
    if (failed) count--;
    else if (send_all(socket, fds, count)) failed = "egress hand-over";
    int error = errno;
    for (size_t i = 0; i < count; i++) close(fds[i]);
    errno = error;
    return failed;
}

/* In the sandbox's root: names its own loopback as the name server, whatever an image had there (often a link to nowhere). */
int egress_name_server(void) {
    static const char path[] = "/etc/resolv.conf", content[] = "nameserver 127.0.0.1\n";
    if (unlink(path) && errno != ENOENT) return -1;
    if (make_parents(path)) return -1;
    int fd = open_inside(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
    ssize_t done = fd < 0 ? -1 : write(fd, content, sizeof content - 1);
    int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return done < 0 ? -1 : 0;
}
