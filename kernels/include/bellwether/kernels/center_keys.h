// center_keys.h: keys minus their mean, per sequence and key head.
//
// Softmax does not change when all keys of a sequence move by one vector, so
// centring is exact for any mask and GQA (not with softcap or learned sink
// logits).  It takes away the direction along which the biased delta pushes
// W_Q.  The map is a projection and symmetric: the backward is the same call
// on the gradient.
//
//   out_j = k_j - (1 / n) sum_i k_i      over the n visible tokens of j's sequence
//   out_j = k_j                          for a token that is not visible: padding
// Source: Bellwether, after arXiv:2510.04212, Section 3.3.

#ifndef BELLWETHER_KERNELS_CENTER_KEYS_H_
#define BELLWETHER_KERNELS_CENTER_KEYS_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

struct CenterKeysParams {
  DType dtype = DType::kFloat32;  // of k and out
  int64_t batch = 0;              // 0..2^20; 1 with cu_seqlens
  int64_t kv_heads = 0;           // 1..65536
  int64_t k_len = 0;              // 0..2^31-1
  int64_t head_dim = 0;           // 1..1024
  Tensor4 k;                      // [batch][kv_heads][k_len][head_dim]
  void* out = nullptr;            // the same shape; may be k with k's strides
  int64_t out_batch_stride = 0;
  int64_t out_head_stride = 0;
  int64_t out_token_stride = 0;
  // Packed sequences: sequence s is tokens cu_seqlens[s]..cu_seqlens[s+1]-1.
  // Starts at 0, never decreases, ends at k_len; a length may be 0.  Null: each
  // batch entry is one sequence.
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  int64_t sequences = 0;                // >= 1 with cu_seqlens
  ProbeVisible visible;                 // by key heads; absent = every token
};

// kCpu takes the mean in double, rounds the difference once to dtype, to nearest
// even, and is done on return.  kCuda sums in fp32 and subtracts in fp32 before it
// rounds; it enqueues one kernel on device.stream, allocates nothing, never
// synchronizes, and repeats bit for bit on GPUs of one kind.  It cannot look at
// cu_seqlens: offsets are clamped to 0..k_len, tokens of no sequence stay unwritten.
//
// A NaN or infinity makes its channel useless in its own sequence and head only.
// kInvalidArgument, kUnsupported (head_dim above 1024; kCuda: compute capability
// below 8.0, 2^31 blocks), kUnavailable, kDeviceError: nothing was written.  Any
// thread; calls that write the same memory must not overlap.
[[nodiscard]] Status CenterKeys(const CenterKeysParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_CENTER_KEYS_H_
