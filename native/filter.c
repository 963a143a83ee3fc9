/* The system-call filter. In: nothing. Out: every process of the sandbox, the agent included, bound by it for good.
 *
 * Numbers up to LAST_KNOWN are allowed unless listed; younger ones answer ENOSYS, so a call that a newer kernel adds is closed
 * until someone has looked at it. A call of a foreign architecture kills. The program is a balanced search over ranges of
 * numbers with the same answer (about seven comparisons), generated for whatever architecture this is compiled for. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the warden's system-call filter knows x86_64 and aarch64"
#endif

enum answer { ALLOW, REFUSE, ABSENT, CLONE, SOCKET, IOCTL };
enum { LAST_KNOWN = 462 /* mseal, Linux 6.10 */, MOST = 1024 };

static const int REFUSED[] = {
    /* kernel, clocks, modules, quotas, swap */
    __NR_acct, __NR_bpf, __NR_clock_adjtime, __NR_clock_settime, __NR_delete_module, __NR_finit_module, __NR_init_module,
    __NR_kexec_load, __NR_perf_event_open, __NR_quotactl, 443 /* quotactl_fd */, __NR_reboot, __NR_settimeofday, __NR_swapoff,
    __NR_swapon, __NR_syslog, __NR_vhangup, __NR_fanotify_init,
#ifdef __NR_lookup_dcookie
    __NR_lookup_dcookie,
#endif
#ifdef __NR_nfsservctl
    __NR_nfsservctl,
#endif
#ifdef __NR_kexec_file_load
    __NR_kexec_file_load,
#endif
    /* mounts and namespaces */
    __NR_mount, __NR_umount2, __NR_pivot_root, __NR_chroot, __NR_unshare, __NR_setns, __NR_name_to_handle_at,
    __NR_open_by_handle_at, 428 /* open_tree */, 429 /* move_mount */, 430 /* fsopen */, 431 /* fsconfig */, 432 /* fsmount */,
    433 /* fspick */, 442 /* mount_setattr */, 457 /* statmount */, 458 /* listmount */,
    /* other processes, keys, memory placement */
    __NR_ptrace, __NR_process_vm_readv, __NR_process_vm_writev, __NR_kcmp, 438 /* pidfd_getfd */, 440 /* process_madvise */,
    __NR_add_key, __NR_request_key, __NR_keyctl, __NR_mbind, __NR_set_mempolicy, __NR_get_mempolicy, __NR_migrate_pages,
    __NR_move_pages, 450 /* set_mempolicy_home_node */, __NR_userfaultfd, 459 /* lsm_get_self_attr */, 460 /* lsm_set_self_attr */,
    461 /* lsm_list_modules */,
#ifdef __x86_64__
    __NR_create_module, __NR_get_kernel_syms, __NR_query_module, __NR_ioperm, __NR_iopl, __NR__sysctl, __NR_sysfs, __NR_uselib,
    __NR_ustat, __NR_modify_ldt,
#endif
};
/* ENOSYS makes libraries fall back: libc from clone3 (whose flags a filter cannot read) to clone, runtimes from io_uring to epoll. */
static const int ABSENTEES[] = {435 /* clone3 */, 425, 426, 427 /* io_uring_setup, _enter, _register */};

struct program {
    struct sock_filter code[MOST];
    size_t length;
    unsigned char answers[LAST_KNOWN + 2];
    int starts[LAST_KNOWN + 2]; /* first number of each range */
    int ranges;
};

static void emit(struct program *p, uint16_t code, uint8_t yes, uint8_t no, uint32_t k) {
    p->code[p->length++] = (struct sock_filter){code, yes, no, k};
}

static void answer(struct program *p, int error) {
    emit(p, BPF_RET | BPF_K, 0, 0, error ? SECCOMP_RET_ERRNO | (uint32_t)error : SECCOMP_RET_ALLOW);
}

static void load_argument(struct program *p, int index) { /* its low 32 bits: all that these calls look at */
    emit(p, BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, args) + 8 * (uint32_t)index);
}

static void check_clone(struct program *p) { /* no new namespaces */
    load_argument(p, 0);
    emit(p, BPF_JMP | BPF_JSET | BPF_K, 0, 1,
         CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET);
    answer(p, EPERM);
    answer(p, 0);
}

static void check_socket(struct program *p) { /* local, internet, and routing netlink; vsock would reach the hypervisor */
    load_argument(p, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 5, 0, AF_UNIX);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 4, 0, AF_INET);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 3, 0, AF_INET6);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 0, 3, AF_NETLINK);
    load_argument(p, 2);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0 /* NETLINK_ROUTE */);
    answer(p, 0);
    answer(p, EAFNOSUPPORT);
}

static void check_ioctl(struct program *p) { /* typing into the terminal of whoever looks on */
    load_argument(p, 1);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 0x5412 /* TIOCSTI */);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0x541C /* TIOCLINUX */);
    answer(p, EPERM);
    answer(p, 0);
}

static void leaf(struct program *p, enum answer kind) {
    switch (kind) {
    case CLONE: check_clone(p); break;
    case SOCKET: check_socket(p); break;
    case IOCTL: check_ioctl(p); break;
    default: answer(p, kind == ALLOW ? 0 : kind == REFUSE ? EPERM : ENOSYS);
    }
}

/* Emits the search over ranges first..last. A jump reaches 255 instructions; the tree's halves stay far below that. */
static void search(struct program *p, int first, int last) {
    if (first == last) {
        leaf(p, p->answers[p->starts[first]]);
        return;
    }
    int middle = (first + last + 1) / 2;
    size_t jump = p->length;
    emit(p, BPF_JMP | BPF_JGE | BPF_K, 0, 0, (uint32_t)p->starts[middle]);
    search(p, first, middle - 1);
    p->code[jump].jt = (uint8_t)(p->length - jump - 1);
    search(p, middle, last);
}

static void generate(struct program *p) {
    for (size_t i = 0; i < COUNT(REFUSED); i++) p->answers[REFUSED[i]] = REFUSE;
    for (size_t i = 0; i < COUNT(ABSENTEES); i++) p->answers[ABSENTEES[i]] = ABSENT;
    p->answers[__NR_clone] = CLONE;
    p->answers[__NR_socket] = SOCKET;
    p->answers[__NR_ioctl] = IOCTL;
    p->answers[LAST_KNOWN + 1] = ABSENT; /* and everything above, x32 numbers included */
    for (int number = 0; number < LAST_KNOWN + 2; number++)
        if (number == 0 || p->answers[number] != p->answers[number - 1]) p->starts[p->ranges++] = number;
    emit(p, BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, arch));
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, ARCHITECTURE);
    emit(p, BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS);
    emit(p, BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr));
    search(p, 0, p->ranges - 1);
}

static struct program program;

/* Generates the program once, in the warden; sandboxes inherit the memory. */
void filter_prepare(void) {
    if (!program.length) generate(&program);
}

int filter_install(void) {
    struct sock_fprog loaded = {(unsigned short)program.length, program.code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &loaded);
}
