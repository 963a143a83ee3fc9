/* Messages as frames on standard input and output. In: bytes; replies. Out: whole frames; bytes.
 *
 * A frame is its length (32 bits) and the message; in text mode, for transports that carry text only, a line of base64. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LONGEST_FRAME = 1 << 20 /* a longer payload comes in AGENT_PARTs */ };

static bool text;
static struct buffer input;

void frames_begin(bool as_text) { text = as_text; }

/* Nothing can go on: the host learns of it by the end of the stream. */
_Noreturn void guest_give_up(const char *why) {
    fprintf(stderr, "sandmill guest: %s\n", why);
    exit(1);
}

void buffer_append(struct buffer *buffer, const void *data, size_t bytes) {
    if (buffer->room - buffer->bytes < bytes) {
        size_t room = 2 * (buffer->bytes + bytes);
        if (!(buffer->data = realloc(buffer->data, room))) guest_give_up("out of memory");
        buffer->room = room;
    }
    if (bytes) memcpy(buffer->data + buffer->bytes, data, bytes);
    buffer->bytes += bytes;
}

static void write_out(const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes) {
        ssize_t done = write(1, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) exit(0);
        at += done;
        bytes -= (size_t)done;
    }
}

static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static size_t to_text(const unsigned char *from, size_t bytes, char *to) {
    char *at = to;
    for (size_t i = 0; i < bytes; i += 3) {
        size_t left = bytes - i;
        uint32_t word = (uint32_t)from[i] << 16 | (left > 1 ? (uint32_t)from[i + 1] << 8 : 0) | (left > 2 ? from[i + 2] : 0);
        *at++ = DIGITS[word >> 18];
        *at++ = DIGITS[word >> 12 & 63];
        *at++ = left > 1 ? DIGITS[word >> 6 & 63] : '=';
        *at++ = left > 2 ? DIGITS[word & 63] : '=';
    }
    *at++ = '\n';
    return (size_t)(at - to);
}

void frame_send(const struct agent_reply *reply, const void *data, size_t bytes) {
    static unsigned char frame[4 + sizeof *reply + INLINE_MAX + 512];
    static char line[2 * sizeof frame];
    uint32_t length = (uint32_t)(sizeof *reply + bytes);
    memcpy(frame, &length, 4);
    memcpy(frame + 4, reply, sizeof *reply);
    if (bytes) memcpy(frame + 4 + sizeof *reply, data, bytes);
    if (text) write_out(line, to_text(frame + 4, length, line));
    else write_out(frame, 4 + length);
}

static int digit(unsigned char letter) {
    const char *at = letter ? strchr(DIGITS, letter) : NULL;
    return at ? (int)(at - DIGITS) : -1;
}

/* In place: what comes out is shorter. */
static size_t from_text(unsigned char *data, size_t bytes) {
    size_t out = 0;
    uint32_t word = 0;
    int have = 0;
    for (size_t i = 0; i < bytes && data[i] != '='; i++) {
        int value = digit(data[i]);
        if (value < 0) continue;
        word = word << 6 | (uint32_t)value;
        if (++have % 4 == 0) data[out++] = (unsigned char)(word >> 16), data[out++] = (unsigned char)(word >> 8), data[out++] = (unsigned char)word;
    }
    if (have % 4 == 2) data[out++] = (unsigned char)(word >> 4);
    if (have % 4 == 3) data[out++] = (unsigned char)(word >> 10), data[out++] = (unsigned char)(word >> 2);
    return out;
}

/* Takes the first frame that is there whole, at `at`. Returns the bytes that it took, 0 when there is none. */
static size_t next_frame(size_t at, void (*take)(const unsigned char *frame, size_t bytes)) {
    size_t left = input.bytes - at;
    unsigned char *start = input.data + at;
    if (text) {
        unsigned char *end = memchr(start, '\n', left);
        if (!end) return left > 2 * LONGEST_FRAME ? (guest_give_up("a frame that is too long"), 0) : 0;
        size_t length = from_text(start, (size_t)(end - start));
        if (length) take(start, length);
        return (size_t)(end - start) + 1;
    }
    uint32_t length;
    if (left < sizeof length) return 0;
    memcpy(&length, start, sizeof length);
    if (length > LONGEST_FRAME) guest_give_up("a frame that is too long");
    if (left - sizeof length < length) return 0;
    take(start + sizeof length, length);
    return sizeof length + length;
}

/* Reads what is there and hands on each frame that is whole. Returns false at the end of the stream. */
bool frames_take(void (*take)(const unsigned char *frame, size_t bytes)) {
    static unsigned char fresh[65536];
    ssize_t got = read(0, fresh, sizeof fresh);
    size_t at = 0, took;
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    if (got <= 0) return false;
    buffer_append(&input, fresh, (size_t)got);
    while ((took = next_frame(at, take))) at += took;
    memmove(input.data, input.data + at, input.bytes - at);
    input.bytes -= at;
    return true;
}

/* A piece of a command's output or of a file. */
void output_send(uint32_t id, bool is_err, const void *data, size_t bytes) {
    struct agent_reply reply = {.op = AGENT_OUTPUT, .id = id};
    *(is_err ? &reply.err_bytes : &reply.out_bytes) = (uint32_t)bytes;
    frame_send(&reply, data, bytes);
}
