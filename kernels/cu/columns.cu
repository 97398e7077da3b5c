// Work along the columns of a matrix: bias, its gradient, and sums of partial rows. Option: REAL.

// y[t,o] += bias[o]. A thread keeps its eight columns of bias and walks down the rows.
extern "C" __global__ __launch_bounds__(128) void bias_add(Real* y, const Real* __restrict__ bias, u64 rows, u64 columns,
                                                           u32 wide) {
    const u64 column = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (column >= columns) return;
    if (wide) {
        const Eight add = load8(bias + column);
#pragma unroll 4
        for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
            Eight a = load8((const Real*)y + row * columns + column);
#pragma unroll
            for (int e = 0; e < 8; e++) a.v[e] += add.v[e];
            store8(y + row * columns + column, a);
        }
    } else {
        for (u64 row = blockIdx.y; row < rows; row += gridDim.y)
            for (u64 e = 0; e < 8 && column + e < columns; e++) {
                const u64 i = row * columns + column + e;
                y[i] = narrow<Real>(widen(y[i]) + widen(bias[column + e]));
            }
    }
}

// partials[blockIdx.y, :] = Σ of every gridDim.y-th row.
extern "C" __global__ __launch_bounds__(128) void row_partials(const Real* __restrict__ y, float* __restrict__ partials,
                                                               u64 rows, u64 columns, u32 wide) {
    const u64 column = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (column >= columns) return;
    float* target = partials + (u64)blockIdx.y * columns + column;
    if (wide) {
        Eight sum = {};
#pragma unroll 4
        for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
            Eight a = load8(y + row * columns + column);
#pragma unroll
            for (int e = 0; e < 8; e++) sum.v[e] += a.v[e];
        }
        store8(target, sum);
    } else {
        for (u64 e = 0; e < 8 && column + e < columns; e++) {
            float sum = 0.0f;
            for (u64 row = blockIdx.y; row < rows; row += gridDim.y) sum += widen(y[row * columns + column + e]);
            target[e] = sum;
        }
    }
}

// target[c] (+)= Σ_r partials[r, c]. Block of 32 columns by 32 groups of rows; groups are added in order.
template <class Target>
__device__ __forceinline__ void column_total(const float* __restrict__ partials, Target* target, u64 rows, u64 columns,
                                             u32 add) {
    __shared__ float sums[32][33];
    const u32 lane = threadIdx.x & 31, group = threadIdx.x >> 5;
    const u64 column = (u64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (u64 row = group; row < rows; row += 32) sum += partials[row * columns + column];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0 && column < columns) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < 32; k++) total += sums[k][lane];
        target[column] = narrow<Target>(add ? widen(target[column]) + total : total);
    }
}
extern "C" __global__ __launch_bounds__(1024) void column_sum_real(const float* partials, Real* target, u64 rows,
                                                                   u64 columns, u32 add) {
    column_total(partials, target, rows, columns, add);
}
extern "C" __global__ __launch_bounds__(1024) void column_sum_f32(const float* partials, float* target, u64 rows,
                                                                  u64 columns, u32 add) {
    column_total(partials, target, rows, columns, add);
}
