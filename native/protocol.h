/* Messages between the host process and the warden, and between the host and the agent inside a sandbox.
 *
 * All travel over SOCK_SEQPACKET sockets: one message is one datagram, a fixed header and then its payload. A payload longer
 * than INLINE_MAX comes as a sealed memfd in the message's ancillary data instead (PAYLOAD_IN_FD). Integers are native-endian:
 * both ends are the same machine. `src/sandmill/sandboxes/backends/native/wire.py` is the other side of this file. */
#pragma once
#include <stdint.h>

enum {
    PROTOCOL_VERSION = 1,
    INLINE_MAX = 48 * 1024,      /* payload bytes inside a message */
    OUTPUT_CHUNK = 48 * 1024,    /* captured output bytes inside one message */
    PAYLOAD_LIMIT = 1 << 30,     /* nobody may make us map more than this */
};

/* Flags of requests. */
enum {
    PAYLOAD_IN_FD = 1,           /* the last descriptor is a memfd that holds the payload */
    EXEC_CAPTURE = 2,            /* collect output here and send it with the exit message; otherwise three descriptors come along */
    EXEC_MERGE = 4,              /* captured stderr goes where stdout goes */
    EXEC_TTY = 8,                /* descriptor 0 becomes the controlling terminal */
    EXEC_HOME = 16,              /* cwd is the sandbox's own workdir: when it was deleted, start in / instead of failing */
    OPEN_PARENTS = 32,           /* create missing parent folders first */
    REMOVE_TREE = 64,            /* a folder with everything in it */
    HURRY = 128,                 /* WARDEN_HURRY: processes are being killed; without it, that is over */
    EGRESS_ALLOW = 256,          /* CREATE: listeners for DNS, HTTP and TLS in the sandbox's network (egress.c) */
    EGRESS_OPEN = 512,           /* CREATE: listeners for DNS and for every TCP port */
    CREATE_IMAGE = 1024,          /* CREATE: the payload names layers */
    CREATE_ON_HOST = 2048,        /* CREATE_IMAGE: the layers lie above this machine's own base */
    CREATE_PROVEN = 8192,         /* CREATE: one like it came up whole, so this one may report before it has closed itself in (spawn.c) */
    EXEC_INPUT = 4096,            /* to a guest, without EXEC_CAPTURE: standard input will come by AGENT_INPUT */
};

/* Who: a uid inside the sandbox in the lower half, its gid in the upper. */
#define UID_OF(who) ((who) & 0xffff)
#define GID_OF(who) ((who) >> 16)

/* ---- host -> warden ---- */
enum { WARDEN_SETUP = 1, WARDEN_CREATE, WARDEN_DESTROY, WARDEN_HURRY /* no answer */ };

struct warden_request {
    uint32_t op, sequence, flags, payload_bytes;
    uint64_t memory_bytes, disk_bytes; /* CREATE */
    uint32_t cpu_us;                   /* CREATE, HURRY: cpu time per 100 ms, 0: no quota */
    uint32_t processes;                /* CREATE */
    uint32_t slot;                     /* DESTROY, HURRY */
    uint32_t who;                      /* CREATE: owner of workdir and files (below); who commands run as */
};

/* SETUP's payload is a batch (below) that fills the skeleton. CREATE's payload is the workdir, NUL, then a batch of files; with
 * CREATE_IMAGE the names of layers, the topmost first and joined by ':', and a NUL lie between them. With EGRESS_ALLOW or EGRESS_OPEN
 * its first descriptor is a SEQPACKET socket on which, before AGENT_READY, one message comes back: a byte that counts the listening
 * sockets, and these as its descriptors, in the order of egress.c. */

struct warden_reply {
    uint32_t op, sequence;
    int32_t error;            /* errno, 0 when fine */
    uint32_t slot;            /* CREATE; also names the sandbox in DESTROY's answer */
    int32_t pid;              /* CREATE: of the sandbox's init, in the host's pid namespace */
    int32_t wait_status;      /* DESTROY: how that init ended */
    uint64_t oom_kills;       /* DESTROY: processes that the memory limit killed */
    uint64_t cpu_us;          /* DESTROY: cpu time used, 0 when unknown */
    char stage[32];           /* what failed */
};                            /* CREATE's answer carries the agent's socket as its one descriptor */

/* ---- host -> agent ---- */
enum { AGENT_READY = 1, AGENT_EXEC, AGENT_SIGNAL, AGENT_KILL_TREE, AGENT_KILL_ALL, AGENT_PING, AGENT_OPEN, AGENT_WRITE,
       AGENT_REMOVE, AGENT_MKDIR, AGENT_OUTPUT, AGENT_EXIT, AGENT_STARTED,
       AGENT_WRITTEN /* hands back the folder of everything the sandbox wrote */, AGENT_FREEZE, AGENT_THAW,
       AGENT_PART, AGENT_INPUT };
/* The last two are between host and guest (guest.c) only: a piece of a payload, before the rest of it; bytes for a command's standard
 * input (none: its end), answered with how many it has taken in all (user_us) or EPIPE. */

struct agent_request {
    uint32_t op, id, flags, payload_bytes;
    uint32_t who;             /* who acts: EXEC, OPEN, WRITE, REMOVE, MKDIR */
    uint32_t first, second;   /* EXEC: argc, envc. SIGNAL: number. OPEN: open(2) flags, mode. MKDIR: -, mode */
    uint32_t stdin_bytes;     /* EXEC_CAPTURE: bytes at the end of the payload fed to standard input */
    uint64_t max_output;      /* EXEC_CAPTURE: bytes kept per stream */
};
/* EXEC's payload: cwd, argv..., env..., each ended by NUL, then stdin bytes. Other payloads: an absolute path and NUL, or a batch. */

/* ---- agent -> host ---- */
enum { OUTPUT_TRUNCATED = 1, OUTPUT_FLOODED = 2, NOT_STARTED = 4 };

struct agent_reply {
    uint32_t op, id;
    int32_t status;           /* errno, or for AGENT_EXIT the wait status (an errno when NOT_STARTED) */
    uint32_t flags;
    uint32_t out_bytes, err_bytes; /* OUTPUT and EXIT: captured bytes that follow this header */
    uint64_t user_us, system_us, max_rss_kib, duration_us; /* EXIT */
};                            /* READY and WRITE carry a text after the header: what failed. A second READY with NOT_STARTED: CREATE_PROVEN erred */

/* ---- a batch: many files, folders and links in one payload ---- */
struct batch_entry {
    uint32_t mode;            /* file type and permissions as in st_mode: regular, folder or link */
    uint32_t modified;        /* of a regular file: when, in seconds since 1970; 0: now */
    uint32_t path_bytes, data_bytes; /* the path (no NUL) and the contents or link target follow, unpadded */
};
