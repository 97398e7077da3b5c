// target[i] = source[i] between f32, f16 and bf16. Options: SOURCE, TARGET.

extern "C" __global__ __launch_bounds__(256) void cast(const SOURCE* __restrict__ source, TARGET* __restrict__ target,
                                                       u64 eights, u64 count) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 i = start;
    for (; i + step < eights; i += 2 * step) {
        Raw8<SOURCE> a = load_raw(source + i * 8);
        Raw8<SOURCE> b = load_raw(source + (i + step) * 8);
        store8(target + i * 8, unpack(a));
        store8(target + (i + step) * 8, unpack(b));
    }
    if (i < eights) store8(target + i * 8, load8(source + i * 8));
    for (u64 j = eights * 8 + start; j < count; j += step) target[j] = narrow<TARGET>(widen(source[j]));
}
