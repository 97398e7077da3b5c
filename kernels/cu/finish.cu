// The closing of the global norm, in the order of operations of the CPU backend. Compiled with --fmad=false.

// control[0..4] as laid out in kernels/src/ops.rs.
extern "C" __global__ void norm_finish(const double* __restrict__ slots, u64 count, float max_norm, float loss_scale,
                                       float* control) {
    if (threadIdx.x != 0) return;
    double total = 0.0;
#pragma unroll 8
    for (u64 i = 0; i < count; i++) total += slots[i];
    const float norm = (float)(sqrt(total) / (double)loss_scale);
    const bool finite = fabsf(norm) < INFINITE;
    float clip = 1.0f;
    if (max_norm != 0.0f) clip = fminf(max_norm / (norm + 1e-6f), 1.0f);
    control[0] = finite ? clip / loss_scale : 0.0f;
    control[1] = norm;
    control[2] = finite ? 1.0f : 0.0f;
    control[3] = 0.0f;
}
