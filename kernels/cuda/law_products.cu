// Sums of products of two tensors: see law_products.h.
//
// Work      kBlocks blocks or fewer for each product; threads take elements in turn, four at a
//           time where both tensors lie so.
// Memory    reads both tensors once.
// Numerics  double as on the CPU; blocks add theirs in no fixed order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "error.h"
#include "law_product_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;
constexpr int64_t kOfThread = 16;  // Elements, before another block pays.

struct ProductsKernelParams {
  OrderedProduct products[kLawProductsMax];
  int blocks[kLawProductsMax];    // of each product
  bool vectors[kLawProductsMax];  // whether kWidth elements are read at once
  double* out;
};

template <class Element>
struct alignas(sizeof(Element) * kWidth) Four {
  Element at[kWidth];
};

template <class Element>
__device__ __forceinline__ void Read(const void* data, int64_t at, int64_t stride, bool vectors, float* to) {
  const auto* const from = static_cast<const Element*>(data) + at;
  if (vectors && stride == 1) {
    const auto four = *reinterpret_cast<const Four<Element>*>(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(four.at[i]);
  } else if (vectors) {  // Of stride 0: all the same.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(*from);
  } else {
    to[0] = static_cast<float>(*from);
  }
}

__device__ __forceinline__ void ReadOf(const OrderedOperand& operand, int64_t at, bool vectors, float* to) {
  const int64_t stride = operand.strides[2];
  if (operand.dtype == DType::kBFloat16) {
    Read<__nv_bfloat16>(operand.data, at, stride, vectors, to);
  } else if (operand.dtype == DType::kFloat16) {
    Read<__half>(operand.data, at, stride, vectors, to);
  } else {
    Read<float>(operand.data, at, stride, vectors, to);
  }
}

__device__ __forceinline__ double SquareOfUlpAt(float x, const SquareOfUlp& ulp) {
  const int exponent = static_cast<int>((__float_as_uint(x) >> 23) & 0xff);
  const int biased = 2 * max(exponent, ulp.least) + ulp.shift;
  return __hiloint2double(biased << 20, 0);
}

__device__ __forceinline__ bool IsNonfinite(float x) { return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u; }

// Grid: [blocks of the largest product, products].  Block: kThreads.
__global__ void __launch_bounds__(kThreads) ProductsKernel(const ProductsKernelParams kernel) {
  __shared__ double scratch[kThreads / 32];
  const int number = static_cast<int>(blockIdx.y);
  const int blocks = kernel.blocks[number];
  if (static_cast<int>(blockIdx.x) >= blocks) return;  // All threads alike.
  const OrderedProduct& p = kernel.products[number];
  const bool vectors = kernel.vectors[number];
  const int width = vectors ? kWidth : 1;
  const int64_t in_row = p.extents[2] / width;
  const int64_t rows = p.extents[0] * p.extents[1];
  const int64_t total = rows * in_row;
  const bool of_x = p.x.ulp.shift != 0, of_y = p.y.ulp.shift != 0;

  double sums[kLawProductStatCount] = {};
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < total; at += int64_t{blocks} * kThreads) {
    const int64_t row = rows == 1 ? 0 : at / in_row;
    const int64_t column = (at - row * in_row) * width;
    const int64_t outer = p.extents[0] == 1 ? 0 : row / p.extents[1];
    const int64_t inner = row - outer * p.extents[1];
    const auto place = [&](const OrderedOperand& of) {
      return outer * of.strides[0] + inner * of.strides[1] + column * of.strides[2];
    };
    float xs[kWidth], ys[kWidth];
    ReadOf(p.x, place(p.x), vectors, xs);
    ReadOf(p.y, place(p.y), vectors, ys);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= width) break;
      const double a = xs[i], b = ys[i], product = a * b;
      sums[kLawProductSum] += product;
      sums[kLawProductAbsSum] += fabs(product);
      if (of_x) sums[kLawProductXVariance] = fma(SquareOfUlpAt(xs[i], p.x.ulp), b * b, sums[kLawProductXVariance]);
      if (of_y) sums[kLawProductYVariance] = fma(SquareOfUlpAt(ys[i], p.y.ulp), a * a, sums[kLawProductYVariance]);
      if (IsNonfinite(xs[i])) sums[kLawProductXNonfinite] += 1;
      if (IsNonfinite(ys[i])) sums[kLawProductYNonfinite] += 1;
    }
  }
  double* const out = kernel.out + number * kLawProductStatCount;
#pragma unroll
  for (int stat = 0; stat < kLawProductStatCount; ++stat) {
    const double sum = SumOverBlock(sums[stat], scratch);
    const bool variance = stat == kLawProductXVariance || stat == kLawProductYVariance;
    if (threadIdx.x == 0 && sum != 0) atomicAdd(out + stat, variance ? sum / 12 : sum);  // A NaN is not 0.
  }
}

// Whether kWidth elements of the last dimension can be read at once.
bool ReadsVectors(const OrderedProduct& p, const OrderedOperand& of) {
  if (of.strides[2] == 0) return true;
  const int64_t bytes = kWidth * SizeOf(of.dtype);
  const auto whole = [&](int dim) { return p.extents[dim] <= 1 || of.strides[dim] % kWidth == 0; };
  return of.strides[2] == 1 && reinterpret_cast<uintptr_t>(of.data) % static_cast<uintptr_t>(bytes) == 0 && whole(0) &&
         whole(1);
}

}  // namespace

Status LawProducts(const LawProductsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  ProductsKernelParams kernel = {};
  kernel.out = p.out;
  int most = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    OrderedProduct& product = kernel.products[i];
    product = Ordered(p.products[i]);
    kernel.vectors[i] =
        product.extents[2] % kWidth == 0 && ReadsVectors(product, product.x) && ReadsVectors(product, product.y);
    const int64_t of_block = kThreads * kOfThread;
    const int64_t blocks = (product.Elements() + of_block - 1) / of_block;
    kernel.blocks[i] = static_cast<int>(std::min<int64_t>(blocks, 8 * gpu.multiprocessors));
    most = std::max(most, kernel.blocks[i]);
  }
  if (most == 0) return Status::kOk;
  const dim3 grid(static_cast<unsigned>(most), static_cast<unsigned>(p.count));
  ProductsKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(kernel);
  return LaunchResult(cudaGetLastError(), "the products of the laws");
}

}  // namespace bellwether::kernels::cuda
