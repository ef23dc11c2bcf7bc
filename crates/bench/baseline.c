/*
 * A lower bound for the cost of an NBD server: memory, plain sockets, one recv and one sendmsg for each batch of requests, a thread for
 * each connection. It does no more than the protocol asks (fixed newstyle, simple replies, reads and writes), so what
 * it costs is what the kernel's sockets and one copy of the data cost. It stands on no other part of the project and
 * trusts its client; it is a measure, not a server to use.
 *
 *     baseline SOCKET BYTES
 */
#include <endian.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define BUFFER (4u << 20) /* more than the largest request of the bench: 1 MiB and its header */
#define BATCH 512         /* replies of one sendmsg: two vectors each, and the kernel takes 1024 */

enum { OPT_EXPORT_NAME = 1, OPT_ABORT = 2, OPT_INFO = 6, OPT_GO = 7 };
enum { CMD_READ = 0, CMD_WRITE = 1, CMD_DISC = 2 };

struct __attribute__((packed)) option { uint64_t magic; uint32_t option, length; };
struct __attribute__((packed)) option_reply { uint64_t magic; uint32_t option, type, length; };
struct __attribute__((packed)) info { uint16_t type; uint64_t size; uint16_t flags; };
struct __attribute__((packed)) request { uint32_t magic; uint16_t flags, type; uint64_t cookie, offset; uint32_t length; };
struct __attribute__((packed)) reply { uint32_t magic, error; uint64_t cookie; };

static char *memory;
static uint64_t size;
static const uint16_t flags = 1 | 1 << 8; /* HAS_FLAGS, CAN_MULTI_CONN */

static int get(int fd, void *to, size_t length) {
    return recv(fd, to, length, MSG_WAITALL) == (ssize_t)length;
}

static int put(int fd, const void *from, size_t length) {
    return send(fd, from, length, MSG_NOSIGNAL) == (ssize_t)length;
}

static int answer(int fd, uint32_t option, uint32_t type, const void *data, uint32_t length) {
    struct option_reply reply = {htobe64(0x3e889045565a9), option, htobe32(type), htobe32(length)};
    return put(fd, &reply, sizeof reply) && (!length || put(fd, data, length));
}

/* The handshake, up to the option that starts transmission. */
static int handshake(int fd) {
    char data[4096];
    uint32_t client;
    memcpy(data, "NBDMAGICIHAVEOPT\0\3", 18); /* fixed newstyle, no zeroes */
    if (!put(fd, data, 18) || !get(fd, &client, 4))
        return 0;
    for (;;) {
        struct option asked;
        struct info info = {0, htobe64(size), htobe16(flags)};
        if (!get(fd, &asked, sizeof asked))
            return 0;
        uint32_t option = be32toh(asked.option), length = be32toh(asked.length);
        if (length > sizeof data || (length && !get(fd, data, length)))
            return 0;
        if (option == OPT_EXPORT_NAME)
            return put(fd, &info.size, 10) && (be32toh(client) & 2 || put(fd, memset(data, 0, 124), 124));
        if (option == OPT_GO || option == OPT_INFO) {
            if (!answer(fd, asked.option, 3, &info, sizeof info) || !answer(fd, asked.option, 1, NULL, 0))
                return 0;
            if (option == OPT_GO)
                return 1;
        } else if (option == OPT_ABORT || !answer(fd, asked.option, 0x80000001, NULL, 0)) {
            return 0;
        }
    }
}

static int send_all(int fd, struct iovec *vectors, size_t count) {
    while (count) {
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent <= 0)
            return 0;
        for (; count && (size_t)sent >= vectors->iov_len; vectors++, count--)
            sent -= vectors->iov_len;
        if (count) {
            vectors->iov_base = (char *)vectors->iov_base + sent;
            vectors->iov_len -= sent;
        }
    }
    return 1;
}

static void serve(int fd, char *buffer) {
    static __thread struct reply replies[BATCH];
    static __thread struct iovec vectors[2 * BATCH];
    size_t held = 0, count = 0;
    for (;;) {
        /* A full batch may have left whole requests behind: answer those before waiting for more. */
        ssize_t got = count == BATCH ? 0 : recv(fd, buffer + held, BUFFER - held, 0);
        if (count < BATCH && got <= 0)
            return;
        held += got;
        size_t at = 0, used = 0;
        count = 0;
        while (held - at >= sizeof(struct request) && count < BATCH) {
            struct request request;
            memcpy(&request, buffer + at, sizeof request);
            uint64_t offset = be64toh(request.offset), length = be32toh(request.length);
            uint16_t type = be16toh(request.type);
            if (type > CMD_WRITE || length > size || offset > size - length)
                return;
            size_t whole = sizeof request + (type == CMD_WRITE ? length : 0);
            if (held - at < whole)
                break;
            if (type == CMD_WRITE)
                memcpy(memory + offset, buffer + at + sizeof request, length);
            at += whole;
            replies[count] = (struct reply){htobe32(0x67446698), 0, request.cookie};
            vectors[used++] = (struct iovec){&replies[count++], sizeof(struct reply)};
            if (type == CMD_READ)
                vectors[used++] = (struct iovec){memory + offset, length};
        }
        if (used && !send_all(fd, vectors, used))
            return;
        memmove(buffer, buffer + at, held -= at);
    }
}

static void *connection(void *argument) {
    int fd = (int)(intptr_t)argument;
    char *buffer = malloc(BUFFER);
    if (buffer && handshake(fd))
        serve(fd, buffer);
    free(buffer);
    close(fd);
    return NULL;
}

int main(int count, char **arguments) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (count != 3 || strlen(arguments[1]) >= sizeof address.sun_path)
        return fprintf(stderr, "usage: baseline SOCKET BYTES\n"), 2;
    strcpy(address.sun_path, arguments[1]);
    size = strtoull(arguments[2], NULL, 10);
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (memory == MAP_FAILED || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64))
        return perror("baseline"), 1;
    for (;;) {
        pthread_t thread;
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0 && !pthread_create(&thread, NULL, connection, (void *)(intptr_t)fd))
            pthread_detach(thread);
    }
}
