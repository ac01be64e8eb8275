/* Faults on purpose: PP_FAKE_FAULTS="ncclSend:3:6,cuStreamWaitEvent:17:skip" = what happens at the k-th call
 * (from 1) of a function in this process, or at every call where k is 0.
 *
 *   a number   the call fails with that code and does nothing
 *   skip       it reports success, does nothing and is not recorded
 *   hang       it never returns
 *   wait       it begins only when the file PP_FAKE_GATE is gone
 * and for transfers:
 *   half       it is done with half the size
 *   thread     it is issued from a thread of its own
 *   free       its buffer is freed right after it was queued
 *   swap       it changes places with the next one of its communicator
 *   sync       the stream is synchronized right after it
 * and for copies:
 *   flip       a bit of it arrives as its opposite
 * and for a word that a stream writes:
 *   early      it is written at once, whatever the stream has still to do
 *   other      another stream writes it */
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct planned {
    char function[48];
    unsigned long at, seen;
    struct fault fault;
} plan[16];
static unsigned planned_count;
static char read_from[512];

static struct fault parse(const char *what) {
    static const struct {
        const char *name;
        enum fault_kind kind;
    } words[] = {
        {"skip", FAULT_SKIP}, {"hang", FAULT_HANG}, {"half", FAULT_HALF}, {"thread", FAULT_THREAD},
        {"free", FAULT_FREE}, {"swap", FAULT_SWAP}, {"sync", FAULT_SYNC}, {"wait", FAULT_WAIT},
        {"flip", FAULT_FLIP},   {"early", FAULT_EARLY}, {"other", FAULT_OTHER},
    };
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(words[i].name, what) == 0) return (struct fault){words[i].kind, 0};
    return (struct fault){FAULT_CODE, atoi(what)};
}

/* Reads the setting again when it has changed; the counts then start anew. */
static void read_plan(void) {
    const char *text = fake_setting("FAULTS");
    if (!text) text = "";
    if (strcmp(text, read_from) == 0) return;
    snprintf(read_from, sizeof read_from, "%s", text);
    planned_count = 0;
    char copy[512], *rest = copy, *item;
    snprintf(copy, sizeof copy, "%s", text);
    while ((item = strsep(&rest, ",")) && planned_count < sizeof plan / sizeof *plan) {
        struct planned *p = &plan[planned_count];
        char what[16];
        if (!*item) continue;
        memset(p, 0, sizeof *p);
        if (sscanf(item, "%47[^:]:%lu:%15s", p->function, &p->at, what) != 3) {
            fprintf(stderr, "fake: PP_FAKE_FAULTS: cannot read \"%s\"\n", item);
            abort();
        }
        p->fault = parse(what);
        planned_count++;
    }
}

struct fault ppfake_fault(const char *function) {
    struct fault due = {FAULT_NONE, 0};
    pthread_mutex_lock(&guard);
    read_plan();
    for (unsigned i = 0; i < planned_count; i++)
        if (strcmp(plan[i].function, function) == 0 && (!plan[i].at || ++plan[i].seen == plan[i].at))
            due = plan[i].fault;
    pthread_mutex_unlock(&guard);
    if (due.kind != FAULT_NONE && due.kind != FAULT_SKIP)
        ppfake_record("Injected function=%s kind=%d code=%d", function, due.kind, due.code);
    if (due.kind != FAULT_WAIT) return due;
    fake_wait_at_gate();
    return (struct fault){FAULT_NONE, 0};
}

/* Waits until the file PP_FAKE_GATE is gone. Each thread that comes to the gate adds a byte to the file
 * PP_FAKE_GATE.reached. */
void fake_wait_at_gate(void) {
    char gate[512], reached[528];
    const char *set = fake_setting("GATE");
    snprintf(gate, sizeof gate, "%s", set ? set : "");
    snprintf(reached, sizeof reached, "%s.reached", gate);
    int file = open(reached, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, "", 1) != 1) {
        fprintf(stderr, "fake: PP_FAKE_GATE: %s cannot be written\n", reached);
        abort();
    }
    close(file);
    while (access(gate, F_OK) == 0) usleep(500);
}

void fake_hang(void) {
    for (;;) pause();
}
EXPORT void ppfake_hang(void) { fake_hang(); }
