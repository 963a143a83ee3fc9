/* Configuring the current network namespace over netlink. In: nothing but the namespace. Out: every address is local, so that whatever
 * is sent anywhere arrives here; and, when asked for, every TCP connection arrives at one port. Needs CAP_NET_ADMIN over the namespace. */
#define _GNU_SOURCE
#include "warden.h"
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <linux/if_addr.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static const char TABLE[] = "egress", BEFORE[] = "before", CHAIN[] = "out";
enum { NEW_PER_S = 100, NEW_AT_ONCE = 200 }; /* what the host process takes, too */

/* Messages to the kernel, one after another. Large enough for all that this file ever builds. */
struct letter {
    _Alignas(4) unsigned char bytes[4096];
    size_t length;
    size_t message;           /* where the message under construction begins */
    uint32_t sequence;
};

static void put(struct letter *letter, const void *data, size_t bytes) {
    if (letter->length + NLMSG_ALIGN(bytes) > sizeof letter->bytes) _exit(1); /* a mistake in this file */
    memcpy(letter->bytes + letter->length, data, bytes);
    letter->length += NLMSG_ALIGN(bytes);
}

static void begin(struct letter *letter, uint16_t type, uint16_t flags, const void *header, size_t bytes) {
    struct nlmsghdr head = {.nlmsg_type = type, .nlmsg_flags = NLM_F_REQUEST | flags, .nlmsg_seq = ++letter->sequence};
    letter->message = letter->length;
    put(letter, &head, sizeof head);
    put(letter, header, bytes);
}

static void end(struct letter *letter) {
    ((struct nlmsghdr *)(letter->bytes + letter->message))->nlmsg_len = (uint32_t)(letter->length - letter->message);
}

static void attribute(struct letter *letter, uint16_t type, const void *data, size_t bytes) {
    struct nlattr head = {.nla_len = (uint16_t)(sizeof head + bytes), .nla_type = type};
    put(letter, &head, sizeof head);
    put(letter, data, bytes);
}

static void text(struct letter *letter, uint16_t type, const char *value) { attribute(letter, type, value, strlen(value) + 1); }

static void number(struct letter *letter, uint16_t type, uint32_t value) { /* nf_tables speaks network byte order */
    value = htonl(value);
    attribute(letter, type, &value, sizeof value);
}

static size_t open_nest(struct letter *letter, uint16_t type) {
    size_t at = letter->length;
    attribute(letter, type | NLA_F_NESTED, NULL, 0);
    return at;
}

static void close_nest(struct letter *letter, size_t at) {
    ((struct nlattr *)(letter->bytes + at))->nla_len = (uint16_t)(letter->length - at);
}

static int error_of(unsigned char *answer, ssize_t got) {
    for (struct nlmsghdr *head = (struct nlmsghdr *)answer; NLMSG_OK(head, got); head = NLMSG_NEXT(head, got)) {
        struct nlmsgerr *result = NLMSG_DATA(head);
        if (head->nlmsg_type == NLMSG_ERROR && result->error) return -result->error;
    }
    return 0;
}

/* Sends a letter and reads one acknowledgement for its last message, or the first failure. Returns 0, or -1 with errno. */
static int deliver(int family, const struct letter *letter) {
    _Alignas(4) unsigned char answer[8192];
    struct timeval patience = {.tv_sec = 5};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, family), error = 0;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t got = send(fd, letter->bytes, letter->length, 0);
    if (got >= 0) got = recv(fd, answer, sizeof answer, 0);
    error = got < 0 ? errno : error_of(answer, got);
    close(fd);
    return error ? (errno = error, -1) : 0;
}

static int make_local(unsigned char family) {
    struct letter letter = {0};
    struct rtmsg route = {.rtm_family = family, .rtm_table = RT_TABLE_LOCAL, .rtm_protocol = RTPROT_STATIC,
                          .rtm_scope = RT_SCOPE_HOST, .rtm_type = RTN_LOCAL};
    uint32_t loopback = if_nametoindex("lo");
    begin(&letter, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_ACK, &route, sizeof route);
    attribute(&letter, RTA_OIF, &loopback, sizeof loopback);
    end(&letter);
    return deliver(NETLINK_ROUTE, &letter);
}

static int add_address(unsigned char family, const void *address, size_t bytes) {
    struct letter letter = {0};
    struct ifaddrmsg header = {.ifa_family = family, .ifa_prefixlen = (unsigned char)(8 * bytes), .ifa_flags = IFA_F_NODAD,
                               .ifa_scope = RT_SCOPE_UNIVERSE, .ifa_index = if_nametoindex("lo")};
    begin(&letter, RTM_NEWADDR, NLM_F_CREATE | NLM_F_ACK, &header, sizeof header);
    attribute(&letter, IFA_LOCAL, address, bytes);
    attribute(&letter, IFA_ADDRESS, address, bytes);
    end(&letter);
    return deliver(NETLINK_ROUTE, &letter);
}

/* Makes every address one of this namespace's own, and gives it one of a global kind: resolvers that are asked only for the families
 * that the machine has (AI_ADDRCONFIG) do not count 127.0.0.1. `both`: of IPv6 too, unless the kernel has none; without it IPv6 is
 * local all the same, but no program is led to it. Returns 0, or -1 with errno. */
int netlink_make_everything_local(bool both) {
    static const unsigned char v4[] = {198, 19, 255, 254}, v6[16] = {0x20, 0x01, 0x00, 0x02, [15] = 1}; /* of the ranges for benchmarks */
    if (make_local(AF_INET) || add_address(AF_INET, v4, sizeof v4)) return -1;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return 0;
    close(fd);
    return make_local(AF_INET6) || (both && add_address(AF_INET6, v6, sizeof v6)) ? -1 : 0;
}

static void nft_begin(struct letter *letter, uint16_t type, uint16_t flags) {
    struct nfgenmsg header = {.nfgen_family = NFPROTO_INET, .version = NFNETLINK_V0};
    begin(letter, (uint16_t)(NFNL_SUBSYS_NFTABLES << 8 | type), flags, &header, sizeof header);
}

static void nft_edge(struct letter *letter, uint16_t type) { /* the first and the last message of a transaction */
    struct nfgenmsg header = {.version = NFNETLINK_V0, .res_id = htons(NFNL_SUBSYS_NFTABLES)};
    begin(letter, type, 0, &header, sizeof header);
    end(letter);
}

struct expression {
    size_t element, data;
};

static struct expression open_expression(struct letter *letter, const char *name) {
    struct expression at = {.element = open_nest(letter, NFTA_LIST_ELEM)};
    text(letter, NFTA_EXPR_NAME, name);
    at.data = open_nest(letter, NFTA_EXPR_DATA);
    return at;
}

static void close_expression(struct letter *letter, struct expression at) {
    close_nest(letter, at.data);
    close_nest(letter, at.element);
}

static void load_meta(struct letter *letter, uint32_t key) {
    struct expression at = open_expression(letter, "meta");
    number(letter, NFTA_META_DREG, NFT_REG_1);
    number(letter, NFTA_META_KEY, key);
    close_expression(letter, at);
}

static void load_bytes(struct letter *letter, uint32_t base, uint32_t offset, uint32_t bytes) {
    struct expression at = open_expression(letter, "payload");
    number(letter, NFTA_PAYLOAD_DREG, NFT_REG_1);
    number(letter, NFTA_PAYLOAD_BASE, base);
    number(letter, NFTA_PAYLOAD_OFFSET, offset);
    number(letter, NFTA_PAYLOAD_LEN, bytes);
    close_expression(letter, at);
}

static void value(struct letter *letter, uint16_t type, const void *data, size_t bytes) {
    size_t at = open_nest(letter, type);
    attribute(letter, NFTA_DATA_VALUE, data, bytes);
    close_nest(letter, at);
}

static void go_on_if(struct letter *letter, uint32_t operation, const void *data, size_t bytes) {
    struct expression at = open_expression(letter, "cmp");
    number(letter, NFTA_CMP_SREG, NFT_REG_1);
    number(letter, NFTA_CMP_OP, operation);
    value(letter, NFTA_CMP_DATA, data, bytes);
    close_expression(letter, at);
}

static void mask(struct letter *letter, const unsigned char kept[1], const unsigned char flipped[1]) {
    struct expression at = open_expression(letter, "bitwise");
    number(letter, NFTA_BITWISE_SREG, NFT_REG_1);
    number(letter, NFTA_BITWISE_DREG, NFT_REG_1);
    number(letter, NFTA_BITWISE_LEN, 1);
    value(letter, NFTA_BITWISE_MASK, kept, 1);
    value(letter, NFTA_BITWISE_XOR, flipped, 1);
    close_expression(letter, at);
}

static void verdict(struct letter *letter, uint32_t code) {
    struct expression at = open_expression(letter, "immediate");
    number(letter, NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
    size_t data = open_nest(letter, NFTA_IMMEDIATE_DATA), inner = open_nest(letter, NFTA_DATA_VERDICT);
    number(letter, NFTA_VERDICT_CODE, code);
    close_nest(letter, inner);
    close_nest(letter, data);
    close_expression(letter, at);
}

static void untracked(struct letter *letter) {
    close_expression(letter, open_expression(letter, "notrack"));
    verdict(letter, NF_ACCEPT);
}

static void go_on_if_beyond(struct letter *letter, uint32_t per_s, uint32_t burst) {
    const uint64_t rate = htobe64(per_s), second = htobe64(1);
    struct expression at = open_expression(letter, "limit");
    attribute(letter, NFTA_LIMIT_RATE, &rate, sizeof rate);
    attribute(letter, NFTA_LIMIT_UNIT, &second, sizeof second);
    number(letter, NFTA_LIMIT_BURST, burst);
    number(letter, NFTA_LIMIT_TYPE, NFT_LIMIT_PKTS);
    number(letter, NFTA_LIMIT_FLAGS, NFT_LIMIT_F_INV);
    close_expression(letter, at);
}

static void redirect(struct letter *letter, uint16_t port) {
    uint16_t wire = htons(port);
    struct expression at = open_expression(letter, "immediate");
    number(letter, NFTA_IMMEDIATE_DREG, NFT_REG_1);
    value(letter, NFTA_IMMEDIATE_DATA, &wire, sizeof wire);
    close_expression(letter, at);
    at = open_expression(letter, "redir");
    number(letter, NFTA_REDIR_REG_PROTO_MIN, NFT_REG_1);
    close_expression(letter, at);
}

static size_t open_rule(struct letter *letter, const char *chain, uint16_t flags) {
    nft_begin(letter, NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND | flags);
    text(letter, NFTA_RULE_TABLE, TABLE);
    text(letter, NFTA_RULE_CHAIN, chain);
    return open_nest(letter, NFTA_RULE_EXPRESSIONS);
}

static void close_rule(struct letter *letter, size_t at) {
    close_nest(letter, at);
    end(letter);
}

static void go_on_if_loopback(struct letter *letter, unsigned char family) {
    static const unsigned char v4_net[] = {127}, v6_address[16] = {[15] = 1};
    load_meta(letter, NFT_META_NFPROTO);
    go_on_if(letter, NFT_CMP_EQ, &family, 1);
    load_bytes(letter, NFT_PAYLOAD_NETWORK_HEADER, family == NFPROTO_IPV4 ? 16 : 24, family == NFPROTO_IPV4 ? 1 : 16);
    if (family == NFPROTO_IPV4) go_on_if(letter, NFT_CMP_EQ, v4_net, sizeof v4_net);
    else go_on_if(letter, NFT_CMP_EQ, v6_address, sizeof v6_address);
}

static void make_chain(struct letter *letter, const char *name, const char *type, int priority) {
    nft_begin(letter, NFT_MSG_NEWCHAIN, NLM_F_CREATE);
    text(letter, NFTA_CHAIN_TABLE, TABLE);
    text(letter, NFTA_CHAIN_NAME, name);
    size_t hook = open_nest(letter, NFTA_CHAIN_HOOK);
    number(letter, NFTA_HOOK_HOOKNUM, NF_INET_LOCAL_OUT);
    number(letter, NFTA_HOOK_PRIORITY, (uint32_t)priority);
    close_nest(letter, hook);
    text(letter, NFTA_CHAIN_TYPE, type);
    end(letter);
}

/* Before connections are tracked. The table of those is kernel memory that no limit of the sandbox covers: only what is redirected gets
 * into it, and new connections at a bounded rate. */
static void spare_the_tracker(struct letter *letter, uint16_t port) {
    static const unsigned char tcp = IPPROTO_TCP, families[] = {NFPROTO_IPV4, NFPROTO_IPV6}, syn_ack[] = {0x12}, syn[] = {0x02}, none[] = {0};
    const uint16_t wire = htons(port);
    make_chain(letter, BEFORE, "filter", -300);
    size_t rule = open_rule(letter, BEFORE, 0);
    load_meta(letter, NFT_META_L4PROTO);
    go_on_if(letter, NFT_CMP_NEQ, &tcp, sizeof tcp);
    untracked(letter);
    close_rule(letter, rule);
    rule = open_rule(letter, BEFORE, 0); /* the listener's answers, whose addresses must be translated back */
    load_bytes(letter, NFT_PAYLOAD_TRANSPORT_HEADER, 0, sizeof wire);
    go_on_if(letter, NFT_CMP_EQ, &wire, sizeof wire);
    verdict(letter, NF_ACCEPT);
    close_rule(letter, rule);
    for (size_t i = 0; i < COUNT(families); i++) {
        rule = open_rule(letter, BEFORE, 0);
        go_on_if_loopback(letter, families[i]);
        untracked(letter);
        close_rule(letter, rule);
    }
    rule = open_rule(letter, BEFORE, 0);
    load_bytes(letter, NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1);
    mask(letter, syn_ack, none);
    go_on_if(letter, NFT_CMP_EQ, syn, sizeof syn);
    go_on_if_beyond(letter, NEW_PER_S, NEW_AT_ONCE);
    verdict(letter, NF_DROP);
    close_rule(letter, rule);
}

/* What goes to the namespace's own loopback stays what it is: a sandbox may talk to its own servers. All other TCP goes to `port`. */
static void redirect_the_rest(struct letter *letter, uint16_t port) {
    static const unsigned char tcp = IPPROTO_TCP, families[] = {NFPROTO_IPV4, NFPROTO_IPV6};
    size_t rule;
    make_chain(letter, CHAIN, "nat", -100);
    for (size_t i = 0; i < COUNT(families); i++) {
        rule = open_rule(letter, CHAIN, 0);
        go_on_if_loopback(letter, families[i]);
        verdict(letter, NF_ACCEPT);
        close_rule(letter, rule);
    }
    rule = open_rule(letter, CHAIN, NLM_F_ACK);
    load_meta(letter, NFT_META_L4PROTO);
    go_on_if(letter, NFT_CMP_EQ, &tcp, sizeof tcp);
    redirect(letter, port);
    close_rule(letter, rule);
}

/* Leads every TCP connection that is not to the namespace's own loopback to `port`, whatever its address and port were; the listener
 * finds those by SO_ORIGINAL_DST. Returns 0, or -1 with errno. */
int netlink_redirect_tcp(uint16_t port) {
    struct letter letter = {0};
    nft_edge(&letter, NFNL_MSG_BATCH_BEGIN);
    nft_begin(&letter, NFT_MSG_NEWTABLE, NLM_F_CREATE);
    text(&letter, NFTA_TABLE_NAME, TABLE);
    end(&letter);
    spare_the_tracker(&letter, port);
    redirect_the_rest(&letter, port);
    nft_edge(&letter, NFNL_MSG_BATCH_END);
    return deliver(NETLINK_NETFILTER, &letter);
}
