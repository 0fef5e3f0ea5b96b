/* Both ends of a shared memory: NumPy's allocator in this machine's process (a library) and, compiled for Arm, a server of
 * calls to kernels (a program). Addresses mean the same on both ends. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef __aarch64__

/* The functions of a PyDataMem_Handler (NumPy Enhancement Proposal 49). A block is a power of two, after a header that keeps
 * its exponent; free blocks are listed by exponent. NumPy calls with the interpreter's lock held. */

typedef struct block { uint64_t exponent; struct block *next; } block;
static block *spare[64];
static char *begin, *unused, *end;
static void *(*former_realloc)(void *, void *, size_t);
static void (*former_free)(void *, void *, size_t);

int start(int memory, char *address, size_t size, void *old_realloc, void *old_free) {
    begin = unused = mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, memory, 0);
    end = address + size;
    former_realloc = old_realloc, former_free = old_free;
    return unused == address;
}

static int here(void *at) { return begin <= (char *)at && (char *)at < end; }

void *take(void *context, size_t size) {
    int exponent = 64 - __builtin_clzl(size + sizeof(block) - 1 | 63);
    block *one = spare[exponent];
    if (one)
        spare[exponent] = one->next;
    else {
        if (unused + (1UL << exponent) > end)
            return NULL;
        one = (block *)unused;
        unused += 1UL << exponent;
        one->exponent = exponent;
    }
    return one + 1;
}

void *take_zeros(void *context, size_t count, size_t size) {
    void *at = take(context, count * size);
    return at ? memset(at, 0, count * size) : NULL;
}

void give(void *context, void *at, size_t size) {
    if (!at || !here(at)) {
        former_free(context, at, size);
        return;
    }
    block *one = (block *)at - 1;
    one->next = spare[one->exponent];
    spare[one->exponent] = one;
}

void *resize(void *context, void *at, size_t size) {
    if (at && !here(at))
        return former_realloc(context, at, size);
    void *to = take(context, size);
    if (to && at) {
        size_t had = (1UL << ((block *)at - 1)->exponent) - sizeof(block);
        memcpy(to, at, had < size ? had : size);
        give(context, at, 0);
    }
    return to;
}

#else

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

typedef void kernel(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);
struct call { int64_t function, x[18]; float number; int32_t padding; };
extern kernel *const functions[];  /* written beside the kernels */

int mlx_llama_yield(void) { return usleep(0); }

/* Integers are passed in x0 to x7, then on the stack, and a float in s0 wherever it stands among them (Procedure Call
 * Standard for the Arm 64-bit Architecture): one type serves all kernels. */
static void *serve(void *channel) {
    int at = (int)(intptr_t)channel;
    struct call c;
    int64_t *x = c.x;
    while (read(at, &c, sizeof c) == sizeof c) {
        if (c.function < 0)  /* its address, for other kernels to call */
            c.function = (int64_t)functions[-1 - c.function];
        else
            functions[c.function](x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
                                  x[14], x[15], x[16], x[17], c.number);
        if (write(at, &c.function, sizeof c.function) != sizeof c.function)
            break;
    }
    exit(0);
}

/* Arguments: descriptor of the memory, its address and size, then a descriptor for each thread that calls. */
int main(int count, char **arguments) {
    char *address = (char *)strtoul(arguments[2], NULL, 0);
    if (mmap(address, strtoul(arguments[3], NULL, 0), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, atoi(arguments[1]), 0)
            != address)
        return perror("shared memory"), 1;
    for (int i = 4; i < count; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)atoi(arguments[i])))
            return perror("a thread"), 1;
    }
    pause();
}

#endif
