// Fails on the first GPU: a kernel writes where there is no memory. Under MPS every client of the GPU hears of it.
//
//     nvcc -o client_fault client_fault.cu && ./client_fault
//
// Exits with 0 if the GPU failed.
__global__ void fail() { *reinterpret_cast<volatile int*>(8) = 1; }

int main() {
    fail<<<1, 1>>>();
    return cudaDeviceSynchronize() == cudaSuccess;
}
