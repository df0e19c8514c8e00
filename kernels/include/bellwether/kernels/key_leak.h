// key_leak.h: how much of the key gradient must be zero and is not.
//
// Softmax does not change when every key of a sequence moves by the same
// vector, so in exact arithmetic sum_j dK_j = 0 for each sequence and key head,
// whatever the mask.  What a kernel leaves there is its own error: the bias of
// delta as it reaches the weights.  Not so with softcap or learned sink logits:
// do not call it there.
//
//   leak_sum     += sum over sequences of |sum_j dK_j|
//   gradient_sum += sum over sequences of sum_j |dK_j|
// Source: Bellwether, after arXiv:2510.04212, Section 3.3.

#ifndef BELLWETHER_KERNELS_KEY_LEAK_H_
#define BELLWETHER_KERNELS_KEY_LEAK_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

struct KeyLeakParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;               // sequences, 0..2^20
  int64_t kv_heads = 0;            // 1..65536
  int64_t k_len = 0;               // tokens of each sequence, 0..2^31-1
  int64_t head_dim = 0;            // 1..1024
  Tensor4 d_k;                     // [batch][kv_heads][k_len][head_dim]
  float* leak_sum = nullptr;       // [kv_heads], added to; gradient units
  float* gradient_sum = nullptr;   // [kv_heads], added to; gradient units
  const uint64_t* gate = nullptr;  // [kGateWords] where the kernel runs; null = open, 0
};

// Sums in double.  A NaN or infinity in dK makes both sums of its head NaN or
// infinite and no other.  kCpu is done on return; kCuda enqueues one kernel.  kInvalidArgument,
// kUnsupported (head_dim above 1024; kCuda: above 256), kUnavailable, kDeviceError: nothing was
// written.  Any thread; calls that add to the same memory must not overlap.
[[nodiscard]] Status KeyLeak(const KeyLeakParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_KEY_LEAK_H_
