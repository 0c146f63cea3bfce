/* Fill memory from a socket or from files, and digest blocks of it while they are in a cache of the
 * processor: many system calls by one call, without Python. See bulk.py, its one caller. */

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define STEP_BYTES ((uint64_t)512 * 1024) /* of one system call */
#define STEP_PIECES 64
#define PATHS 3
#define CALL_MS 100 /* after which a call returns, so that Python handles signals such as Ctrl-C */

typedef uint64_t (*digest_function)(const void *, size_t);

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

struct piece {
    uint64_t address, size;
    uint64_t counted; /* bytes of it that blocks count: all, or none */
};

struct block {
    uint64_t start, end; /* bytes counted over all pieces; in memory one behind another */
};

struct memory {
    const struct piece *pieces; /* filled one after another */
    uint64_t piece_count;
    const struct block *blocks; /* in the same order */
    uint64_t block_count;
    uint64_t *digests; /* one for each block */
    digest_function digest; /* or NULL: they are digested already */
    uint64_t filled, counted; /* bytes that are there */
    uint64_t piece, offset;   /* where the next byte goes */
    uint64_t block;           /* the next to digest */
    uint64_t first, before;   /* a piece not behind its start, and bytes counted before that one */
};

/* Note that so many more bytes are there, and digest the blocks that are whole. */
static void advance(struct memory *memory, uint64_t count)
{
    memory->filled += count;
    for (; memory->piece < memory->piece_count; memory->piece++, memory->offset = 0) {
        const struct piece *piece = &memory->pieces[memory->piece];
        uint64_t left = piece->size - memory->offset, came = count < left ? count : left;
        memory->counted += piece->counted ? came : 0;
        memory->offset += came;
        count -= came;
        if (memory->offset < piece->size)
            break;
    }
    for (; memory->block < memory->block_count; memory->block++) {
        const struct block *block = &memory->blocks[memory->block];
        if (block->end > memory->counted)
            break;
        if (!memory->digest)
            continue;
        const struct piece *piece = &memory->pieces[memory->first];
        for (; block->start >= memory->before + piece->counted; piece++, memory->first++)
            memory->before += piece->counted;
        uint64_t at = piece->address + block->start - memory->before;
        memory->digests[memory->block] =
            memory->digest((const void *)(uintptr_t)at, block->end - block->start);
    }
}

/* Fill a step of what is left, of so many bytes at most: 0, or an error; ENODATA at the end of the
 * file or connection. */
static int fill(struct memory *memory, int descriptor, bool is_socket, uint64_t most)
{
    struct iovec parts[STEP_PIECES];
    struct msghdr message = {.msg_iov = parts};
    uint64_t offset = memory->offset, bytes = 0, count = 0;
    for (uint64_t i = memory->piece; i < memory->piece_count; i++, offset = 0) {
        uint64_t left = memory->pieces[i].size - offset;
        if (count == STEP_PIECES || bytes == most)
            break;
        if (left > most - bytes)
            left = most - bytes;
        parts[count++] = (struct iovec){(void *)(uintptr_t)(memory->pieces[i].address + offset), left};
        bytes += left;
    }
    message.msg_iovlen = count;
    ssize_t came = is_socket ? recvmsg(descriptor, &message, MSG_WAITALL)
                             : readv(descriptor, parts, (int)count);
    if (came < 0)
        return errno;
    advance(memory, (uint64_t)came);
    return came ? 0 : ENODATA;
}

struct question {
    const char *bytes;
    uint64_t size;
    uint64_t after; /* bytes of answers */
};

/* Receive what is left, from `filled` bytes on, and send each question in its time. Returns bytes
 * that are there: less than all if nothing came for as long as the socket's options say, or after
 * CALL_MS. Or an error, less than 0. Digests of earlier bytes stay as they are. */
int64_t receive(int descriptor, const struct piece *pieces, uint64_t piece_count,
                const struct block *blocks, uint64_t block_count, uint64_t *digests,
                digest_function digest, uint64_t filled, const struct question *question,
                uint64_t question_count)
{
    struct memory memory = {.pieces = pieces,
                            .piece_count = piece_count,
                            .blocks = blocks,
                            .block_count = block_count,
                            .digests = digests,
                            .digest = filled ? NULL : digest};
    int64_t ends_at_ms = now_ms() + CALL_MS;
    int flags = fcntl(descriptor, F_GETFL), error = 0;
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags & ~O_NONBLOCK) < 0)
        return -errno;
    advance(&memory, filled);
    memory.digest = digest;
    while (!error) {
        for (; question_count && question->after <= memory.filled; question++, question_count--)
            if (send(descriptor, question->bytes, question->size, MSG_NOSIGNAL) !=
                (ssize_t)question->size)
                error = EPIPE;
        if (error || memory.piece == piece_count || now_ms() >= ends_at_ms)
            break;
        /* What is behind the next question's place was perhaps not asked for. */
        uint64_t asked = question_count ? question->after - memory.filled : STEP_BYTES;
        error = fill(&memory, descriptor, true, asked < STEP_BYTES ? asked : STEP_BYTES);
    }
    fcntl(descriptor, F_SETFL, flags);
    if (!error || error == EAGAIN || error == EINTR)
        return (int64_t)memory.filled;
    return error == ENODATA ? -ECONNRESET : -error;
}

static bool is_there(const char *const *paths)
{
    for (int i = 0; i < PATHS; i++)
        if (access(paths[i], F_OK) == 0)
            return true;
    return false;
}

static bool is_read(const char *const *paths, struct memory *memory, uint64_t spare_bytes)
{
    int descriptor = -1, error = 0;
    char beyond;
    for (int i = 0; descriptor < 0 && i < PATHS; i++)
        descriptor = open(paths[i], O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor < 0)
        return false;
    advance(memory, 0);
    while ((!error || error == EINTR) && memory->piece < memory->piece_count)
        error = fill(memory, descriptor, false, STEP_BYTES);
    bool is_whole = !error && read(descriptor, &beyond, 1) == 0;
    close(descriptor);
    return is_whole && (memory->filled < spare_bytes || is_there(paths));
}

/* Read files, each the first of its paths that opens, into memory of exactly their lengths, from
 * `first` on. Returns the next one to read: after CALL_MS perhaps not the last. A file of
 * `spare_bytes` or more that has no path any more after that may have been written again. */
uint64_t read_files(uint64_t first, uint64_t file_count, const char *const *paths, const struct piece *pieces,
                const uint64_t *piece_counts, const struct block *blocks,
                const uint64_t *block_counts, uint64_t *digests, digest_function digest,
                bool *are_whole, uint64_t spare_bytes)
{
    int64_t ends_at_ms = now_ms() + CALL_MS;
    for (uint64_t i = 0; i < file_count; i++) {
        if (i > first && now_ms() >= ends_at_ms)
            return i;
        struct memory memory = {.pieces = pieces,
                                .piece_count = piece_counts[i],
                                .blocks = blocks,
                                .block_count = block_counts[i],
                                .digests = digests,
                                .digest = digest};
        if (i >= first)
            are_whole[i] = is_read(paths, &memory, spare_bytes);
        paths += PATHS;
        pieces += piece_counts[i];
        blocks += block_counts[i];
        digests += block_counts[i];
    }
    return file_count;
}
