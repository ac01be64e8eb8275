/* What the files of the fake driver that keep memory share. All of it is called under the lock. */
#ifndef PP_FAKE_MEMORY_H
#define PP_FAKE_MEMORY_H

#include "fake.h"

#include <stdio.h>

enum memory_kind { OF_DEVICE, PAGE_LOCKED, REGISTERED, MAPPED };

struct allocation {
    address at;
    uint64_t bytes, mapped;
    uint8_t *shadow; /* where its bytes are */
    enum memory_kind kind;
    int device;                /* OF_DEVICE: whose memory it is */
    struct physical *physical; /* MAPPED: what is mapped here */
    unsigned access;           /* MAPPED: a bit for each device that may touch it */
    bool of_peer;              /* MAPPED: by a handle that was imported */
    int pins;
    bool freed;
};

/* The newest allocation that holds the address, freed or not. */
struct allocation *fake_find(address at);
struct allocation *fake_add(struct allocation value);
/* Frees it; while a stream uses it that is a fault, and the bytes stay until the stream is done. */
void fake_release(struct allocation *allocation);
/* Addresses that no host can touch and that were never given out, a multiple of `alignment`; 0 where there are
 * none left. Place MAX_DEVICES is for those that belong to no device. */
address fake_addresses(int place, uint64_t bytes, uint64_t alignment);
/* Takes memory of a device, or gives it back. */
int fake_take(int device, uint64_t bytes);
void fake_give(int device, uint64_t bytes);

/* cuda_device.c */
int fake_check_device(int device);
/* The number of a GPU among all of the host, and the one in this process of such a GPU; -1: there is none. */
int fake_physical_device(int device);
int fake_visible_device(int physical);

/* cuda_vmm.c: a mapping of it is gone. */
void fake_unmapped(struct physical *physical);

/* cuda_host.c: whether other processes have this host memory, too. */
bool fake_is_shared(const struct allocation *allocation);
/* cuda_host.c: the next mapping in /proc/self/maps; false behind the last one. */
struct mapping {
    unsigned long long from, to, offset, device, inode;
    bool shared;
};
bool fake_next_mapping(FILE *maps, struct mapping *mapping);

/* cuda_watch.c: from here on what hosts do with shared memory that is registered is recorded; and no more. */
void fake_watch(struct allocation *allocation);
void fake_watch_no_more(struct allocation *allocation);

#endif
