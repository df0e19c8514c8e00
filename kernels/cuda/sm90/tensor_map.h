// tensor_map.h: how the copy engine sees a [batch][head][token][channel] view.
//
// A map has five dimensions: channel, x, y, z, head.  In a batch a token is
// (token, batch, 0) and x ends with the sequence.  Of packed sequences it is
// (2^30 - length + token, start + length, 2^30), whose address is start +
// token.  For the strides of x and y are those of a token, and that of z makes
// 2^30 (x + z) vanish modulo 2^64.  So x ends with *each* sequence, and what
// lies behind it reads as 0, never as the next one.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_
#define BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "bellwether/kernels/attention.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels::cuda::sm90 {

struct TensorMapShape {
  int64_t channels, tokens, heads, batch;  // packed: all tokens, batch ignored
  bool packed;
};

inline TensorMapShape QueryShape(const AttentionForwardParams& a) {
  return {a.head_dim, a.q_len, a.heads, a.batch, a.cu_seqlens_q != nullptr};
}

inline TensorMapShape OutputShape(const AttentionForwardParams& a) {
  return {ValueDim(a), a.q_len, a.heads, a.batch, a.cu_seqlens_q != nullptr};
}

inline TensorMapShape ValueShape(const AttentionForwardParams& a) {
  return {ValueDim(a), a.k_len, a.kv_heads, a.batch, a.cu_seqlens_q != nullptr};
}

inline TensorMapShape KeyShape(const AttentionForwardParams& a) {
  return {a.head_dim, a.k_len, a.kv_heads, a.batch, a.cu_seqlens_q != nullptr};
}

// A box is 64 channels of `box_tokens` tokens, swizzled by 128 bytes; what lies
// outside reads as 0.  Needs no link to libcuda: the driver's entry point is
// looked up at run time.  kUnavailable without a driver, kUnsupported if it
// refuses the strides.
Status EncodeTensorMap(const char* field, const Tensor4& tensor, const TensorMapShape& shape, DType dtype,
                       int box_tokens, CUtensorMap* map);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_
