/* The recording: one line per call, written at once, so that it is complete up to the moment a process is
 * killed.
 *
 *   SEQUENCE THREAD NANOSECONDS NAME key=value ...
 *
 * Operations on streams carry r=ADDRESS:BYTES,... and w=... for what they read and write when they run.
 * Threads are numbered from 1 in the order of their first call; 0 is a stream's own thread. ThreadStart and
 * ThreadEnd bracket a thread's calls. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t at_thread_end;
static int file = -1;
static unsigned long sequence;
static int threads;
static __thread int thread_number = -1;

uint64_t ppfake_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void put(const char *text, va_list arguments, int thread) {
    char line[4096];
    pthread_mutex_lock(&guard);
    int n = snprintf(line, sizeof line, "%lu %d %llu ", ++sequence, thread, (unsigned long long)ppfake_now());
    n += vsnprintf(line + n, sizeof line - (size_t)n - 1, text, arguments);
    if (n > (int)sizeof line - 2) n = (int)sizeof line - 2;
    line[n++] = '\n';
    if (write(file, line, (size_t)n) != n) {
        fprintf(stderr, "fake: the recording cannot be written\n");
        abort();
    }
    pthread_mutex_unlock(&guard);
}

static void put_plain(int thread, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    put(format, arguments, thread);
    va_end(arguments);
}

static void thread_ends(void *number) { put_plain((int)(intptr_t)number, "ThreadEnd"); }

static void start(void) {
    const char *directory = fake_setting("RECORD");
    if (!directory || !*directory) return;
    char path[512];
    snprintf(path, sizeof path, "%s/%d.rec", directory, (int)getpid());
    file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) {
        fprintf(stderr, "fake: %s cannot be created\n", path);
        abort();
    }
    pthread_key_create(&at_thread_end, thread_ends);
}

void ppfake_worker_thread(void) { thread_number = 0; }
int ppfake_thread(void) { return thread_number; }
void ppfake_act_for(int thread) { thread_number = thread; }

void ppfake_record(const char *format, ...) {
    pthread_once(&once, start);
    if (file < 0) return;
    if (thread_number < 0) {
        thread_number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
        pthread_setspecific(at_thread_end, (void *)(intptr_t)thread_number);
        char name[32] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        for (char *c = name; *c; c++)
            if (*c == ' ') *c = '_';
        put_plain(thread_number, "ThreadStart name=%s", name);
    }
    va_list arguments;
    va_start(arguments, format);
    put(format, arguments, thread_number);
    va_end(arguments);
}

/* A line of the test's own: what the host reads and writes, where a phase begins. */
EXPORT void ppfake_note(const char *line) {
    ppfake_lock();
    ppfake_record("%s", line);
    ppfake_unlock();
}
