// Reads a buffer once, sixteen bytes a thread and step: what memory can give to a kernel that does nothing else.
// Each block walks the buffer in strides of the whole grid; four loads are in flight before the first is used.

struct __align__(16) Vec {
    unsigned int x, y, z, w;
};

static __device__ __forceinline__ Vec load(const Vec* p) {
    Vec v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// count: vectors. Each block's place in sink gets a value that cannot be foreseen, so that no load can be left out. One
// place for all would take an atomic operation of every warp, one after the other: longer than reading a few MiB.
extern "C" __global__ void __launch_bounds__(512) read_all(const Vec* data, long long count, unsigned int* sink) {
    __shared__ unsigned int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    const long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const Vec a = load(data + i), b = load(data + i + stride);
        const Vec c = load(data + i + 2 * stride), d = load(data + i + 3 * stride);
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum += c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        const Vec a = load(data + i);
        sum += a.x ^ a.y ^ a.z ^ a.w;
    }
    atomicAdd(&total, sum);
    __syncthreads();
    if (threadIdx.x == 0) sink[blockIdx.x] = total;
}
