// Work of a given length that needs nothing but time: every block spins until `nanoseconds` have passed since it began.
// The clock ticks in steps of 32 ns (on some devices 1 us). Grid: as many blocks as shall be busy; block: 32 or more.

#include <cstdint>

__device__ inline uint64_t now() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void spin(uint64_t nanoseconds) {
    const uint64_t start = now();
    while (now() - start < nanoseconds) {
        __nanosleep(20);
    }
}
