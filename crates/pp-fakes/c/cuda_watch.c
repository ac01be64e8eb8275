/* What hosts read and write in shared memory that is registered, with PP_FAKE_WATCH=1: the recording then shows
 * which number a host has seen. A host reads without any call, so the page is taken away from it: an access
 * faults, is led to another mapping of the page for one instruction, and is recorded where the word has another
 * value than this thread saw last.
 *
 *   HostLoad addr=ADDRESS value=N     HostStore addr=ADDRESS value=N
 *
 * A read sees a copy, so the value in the recording is the one that was read.
 *
 * With PP_FAKE_WATCH=2 the memory may hold more than words: a page that is accessed in another way, as by a copy
 * of many bytes, is let go. And what ranks without a device do there is recorded, too, if they are threads of this
 * process: all mappings of the memory are watched.
 *
 *   HostMap addr=ADDRESS len=BYTES file=FILE from=OFFSET */
#define _GNU_SOURCE
#include "memory.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined __x86_64__
void fake_watch(struct allocation *a) {
    (void)a;
    if (!fake_setting_number("WATCH", 0)) return;
    fprintf(stderr, "fake: PP_FAKE_WATCH needs an x86-64 processor\n");
    abort();
}
void fake_watch_no_more(struct allocation *a) { (void)a; }
#else

#include <sys/mman.h>
#include <ucontext.h>

#define PAGE 4096ull
#define MAX_WATCHED 64
#define TRAP_FLAG 0x100

static struct watched {
    address at, end; /* 0: free */
    intptr_t to_shadow;
    unsigned number;
    const struct allocation *of;
    bool has_bytes; /* beside words */
} watched[MAX_WATCHED];
static unsigned watched_so_far;
/* One host writes at a time, so that what is there behind it is what it has written. */
static bool is_written;
static struct sigaction on_fault, on_step;

/* The access that this thread is making. */
static __thread struct {
    struct watched *place; /* NULL: none */
    address word;
    uint32_t before;
    bool writes, keeps_base;
    int base;
    intptr_t moved;
    uint32_t copy[16];
} now;
/* What this thread has seen last. */
static __thread struct {
    address word;
    unsigned number;
    uint32_t value;
} seen[256];

static uint32_t load(const struct watched *w, address word) {
    return __atomic_load_n((uint32_t *)(uintptr_t)(word + (address)w->to_shadow), __ATOMIC_ACQUIRE);
}

/* The register, as an index of gregs, that is the base of the address in an instruction; whether the
 * instruction replaces that register. -1: the access cannot be led elsewhere. */
static int base_of(const uint8_t *code, bool *replaced) {
    static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    uint8_t rex = 0;
    while (*code && strchr("\x66\x67\x2e\x36\x3e\x26\x64\x65\xf0\xf2\xf3", *code)) code++;
    if ((*code & 0xf0) == 0x40) rex = *code++;
    bool two = *code == 0x0f;
    uint8_t opcode = two ? *++code : *code, modrm = code[1], sib = code[2];
    bool has_sib = (modrm & 7) == 4;
    unsigned base = (has_sib ? sib & 7u : modrm & 7u) | (rex & 1u) << 3;
    unsigned reg = (modrm >> 3 & 7u) | (rex & 4u) << 1;
    bool is_load = two ? (opcode & 0xf6) == 0xb6 : opcode == 0x8b || opcode == 0x63;
    bool has_operand = two ? (opcode >= 0xa0 && opcode < 0xc2) || opcode == 0xc3 || opcode == 0xc7
                           : opcode < 0x40 || (opcode >= 0x80 && opcode < 0x8c) || opcode == 0x63 ||
                                 opcode == 0xc6 || opcode == 0xc7 || opcode >= 0xf6;
    bool has_register = two || opcode < 0x40 || opcode == 0x63 || (opcode >= 0x84 && opcode < 0x8c);
    *replaced = is_load && reg == base;
    if (!has_operand || modrm >= 0xc0 || (modrm < 0x40 && (base & 7) == 5) ||
        (has_register && reg == base && !is_load))
        return -1;
    return registers[base];
}

static void fault(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    address at = (address)(uintptr_t)info->si_addr;
    struct watched *w = watched;
    while (w < watched + MAX_WATCHED && !(at >= w->at && at < w->end)) w++;
    if (w == watched + MAX_WATCHED || now.place) {
        sigaction(signal, &on_fault, NULL); /* it faults again */
        return;
    }
    bool replaced;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    now.base = base_of(code, &replaced);
    if (now.base < 0 && w->has_bytes) {
        mprotect((void *)(uintptr_t)(at & ~(PAGE - 1)), PAGE, PROT_READ | PROT_WRITE);
        return;
    }
    if (now.base < 0) {
        fprintf(stderr, "fake: PP_FAKE_WATCH: the access by %02x %02x %02x %02x cannot be led elsewhere\n",
                code[0], code[1], code[2], code[3]);
        abort();
    }
    now.word = at & ~3ull;
    now.before = load(w, now.word);
    now.writes = registers[REG_ERR] & 2;
    now.keeps_base = !replaced;
    now.moved = w->to_shadow;
    if (!now.writes) {
        memset(now.copy, 0, sizeof now.copy);
        now.copy[0] = now.before;
        for (unsigned i = 1; i < 4 && now.word + 4 * i < w->end; i++) now.copy[i] = load(w, now.word + 4 * i);
        now.moved = (intptr_t)((uintptr_t)now.copy - now.word);
    }
    while (now.writes && __atomic_test_and_set(&is_written, __ATOMIC_ACQUIRE)) sched_yield();
    now.place = w;
    registers[now.base] += now.moved;
    registers[REG_EFL] |= TRAP_FLAG;
}

static void step(int signal, siginfo_t *info, void *context) {
    (void)info;
    if (!now.place) {
        sigaction(signal, &on_step, NULL);
        raise(signal);
        return;
    }
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    registers[REG_EFL] &= ~TRAP_FLAG;
    if (now.keeps_base) registers[now.base] -= now.moved;
    uint32_t value = now.writes ? load(now.place, now.word) : now.before;
    if (now.writes) __atomic_clear(&is_written, __ATOMIC_RELEASE);
    address mixed = now.word / 4 + now.word / PAGE + now.place->number * 31;
    unsigned slot = (unsigned)(mixed % (sizeof seen / sizeof *seen));
    bool is_known = seen[slot].word == now.word && seen[slot].number == now.place->number;
    if (!is_known || seen[slot].value != value || now.writes)
        ppfake_record("%s addr=%#llx value=%u", now.writes ? "HostStore" : "HostLoad",
                      (unsigned long long)now.word, value);
    seen[slot].word = now.word;
    seen[slot].number = now.place->number;
    seen[slot].value = value;
    now.place = NULL;
}

static address whole(const struct allocation *a, address *end) {
    *end = (a->at + a->bytes + PAGE - 1) & ~(PAGE - 1);
    return a->at & ~(PAGE - 1);
}

static void watch(const struct allocation *a, address at, address end, intptr_t to_shadow, bool has_bytes) {
    struct watched *w = watched;
    /* What was unmapped there is gone. */
    for (; w < watched + MAX_WATCHED; w++)
        if (w->at < end && at < w->end) w->at = w->end = 0;
    for (w = watched; w < watched + MAX_WATCHED && w->at;) w++;
    if (w == watched + MAX_WATCHED) abort();
    *w = (struct watched){at, end, to_shadow, ++watched_so_far, a, has_bytes};
    mprotect((void *)(uintptr_t)at, end - at, PROT_NONE);
}

/* The mappings of the memory, but for the one of the driver itself. */
static void each_mapping(const struct allocation *a,
                         void (*act)(const struct allocation *a, const struct mapping *driver,
                                     const struct mapping *m)) {
    struct mapping driver, m;
    address shadow = (address)(uintptr_t)a->shadow;
    FILE *maps = fopen("/proc/self/maps", "re");
    bool is_found = false;
    while (!is_found && fake_next_mapping(maps, &driver)) is_found = driver.from <= shadow && shadow < driver.to;
    if (maps) rewind(maps);
    while (is_found && fake_next_mapping(maps, &m))
        if (m.inode == driver.inode && m.device == driver.device && m.from != driver.from) act(a, &driver, &m);
    if (maps) fclose(maps);
}

static void watch_other(const struct allocation *a, const struct mapping *driver, const struct mapping *m) {
    address end, at = whole(a, &end);
    if (m->from < end && at < m->to) return;
    ppfake_record("HostMap addr=%#llx len=%llu file=%llx.%llu from=%llu", m->from, m->to - m->from, m->device,
                  m->inode, m->offset);
    watch(a, m->from, m->to, (intptr_t)(driver->from - driver->offset + m->offset - m->from), true);
}

static void open_again(const struct allocation *a, const struct mapping *driver, const struct mapping *m) {
    (void)driver;
    for (struct watched *w = watched; w < watched + MAX_WATCHED; w++)
        if (w->of == a && w->at < m->to && m->from < w->end)
            mprotect((void *)(uintptr_t)m->from, m->to - m->from, PROT_READ | PROT_WRITE);
}

void fake_watch(struct allocation *a) {
    uint64_t how = fake_setting_number("WATCH", 0);
    if (!how) return;
    if (!watched_so_far) {
        struct sigaction action = {.sa_flags = SA_SIGINFO};
        action.sa_sigaction = fault;
        sigaction(SIGSEGV, &action, &on_fault);
        action.sa_sigaction = step;
        sigaction(SIGTRAP, &action, &on_step);
    }
    address end, at = whole(a, &end);
    watch(a, at, end, (intptr_t)((uintptr_t)a->shadow - a->at), how > 1);
    if (how > 1) each_mapping(a, watch_other);
}

void fake_watch_no_more(struct allocation *a) {
    if (watched_so_far) each_mapping(a, open_again);
    for (struct watched *w = watched; w < watched + MAX_WATCHED; w++)
        if (w->of == a) w->at = w->end = 0;
}
#endif
