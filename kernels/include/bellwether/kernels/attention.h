// attention.h: the stabilized attention.
//
// The backward of attention needs delta = rowsum(dO * O).  From an O rounded to
// 16 bits delta is biased, dQ gets a rank-one error that points the same way
// step after step, and training can diverge.  Mode hp removes the bias: it also
// returns what rounding O took away, and divides by the sum of the probabilities
// as they were rounded, so that delta = rowsum(dO * (O + O_lo)) is the sum that
// the backward's exact probabilities ask for.
//
//   S = scale Q K^T;  m = rowmax S;  P = exp(S - m);  l = rowsum P
//   Pr = P rounded to the input type;  lt = rowsum Pr
//   O = Pr V / (hp ? lt : l);  L = m + ln l;  O_lo = bf16(O - round(O))
//
// Source: after arXiv:2510.04212, Section 3.3.

#ifndef BELLWETHER_KERNELS_ATTENTION_H_
#define BELLWETHER_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

enum class AttentionMode : int {
  kFa = 0,   // as FlashAttention computes it: the baseline
  kHp = 1,   // unbiased delta
  kHpm = 2,  // hp whose backward reads the same rounded P: not built yet
};

struct AttentionForwardParams {
  DType dtype = DType::kBFloat16;  // of q, k, v, o: bf16 or fp16
  AttentionMode mode = AttentionMode::kHp;
  int64_t batch = 0;      // >= 0
  int64_t heads = 0;      // of q, 1..65536
  int64_t kv_heads = 0;   // divides heads; query head h reads h / (heads / kv_heads)
  int64_t q_len = 0;      // >= 0
  int64_t k_len = 0;      // >= 1
  int64_t head_dim = 0;   // 64 or 128
  Tensor4 q;              // [batch][heads][q_len][head_dim]
  Tensor4 k, v;           // [batch][kv_heads][k_len][head_dim]
  float scale = 0;        // of the scores; finite, > 0
  bool causal = false;    // key j is allowed for row t if j <= t + k_len - q_len
  int32_t window = 0;     // 0 = none; no other value is supported yet
  float softcap = 0;      // 0 = none; no other value is supported yet
  Tensor4 o;              // out, written through: [batch][heads][q_len][head_dim]
  Tensor4 o_lo;           // out, bf16, the residual; absent = not wanted; not in kFa
  float* lse = nullptr;   // out: L, natural log; -inf for a row without any key
  int64_t lse_batch_stride = 0, lse_head_stride = 0;  // tokens are adjacent
  // AttentionForwardWorkspaceBytes() bytes of device memory, 4-byte aligned, of
  // any content; or null, and causal rows are balanced less well.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams& params);

// Enqueues on device.stream and returns; allocates nothing, never synchronizes.
// A row without any allowed key gets O = 0 and O_lo = 0.
//
// kUnsupported: mode kHpm, not kCuda on a GPU of compute capability 9.0, another dtype or
// head_dim, window or softcap, a base that is not 16-byte aligned, a stride of
// q, k, v, o or o_lo that is not a multiple of 8 elements, more than 2^30 tokens.  kInvalidArgument: a
// bound above is violated.  In both nothing was written.  kDeviceError: the
// launch failed.  Any thread; calls that write the same memory must not overlap.
[[nodiscard]] Status AttentionForward(const AttentionForwardParams& params, const Device& device);

// Backward:
//   P = exp(S - L);  delta = rowsum(dO * (O + O_lo));  dS = P * (dO V^T - delta)
//   dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO
// dK and dV are sums over the query heads of their group, taken in fp32.
struct AttentionBackwardParams {
  AttentionForwardParams forward;  // as it was called; its workspace is not read,
                                   // o, o_lo and lse are inputs now
  Tensor4 d_o;                     // like q
  Tensor4 dq, dk, dv;              // out, written through; like q, k, v
  void* workspace = nullptr;       // AttentionBackwardWorkspaceBytes(), 16-byte aligned
  size_t workspace_bytes = 0;
};

size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& params);

// As AttentionForward.  Also kUnsupported: nothing to do (batch or q_len 0, where
// dk and dv would have to be cleared).  With o_lo absent delta
// comes from the rounded O.  The order in which key tiles are added to dQ is not
// fixed: its last bits may differ between launches; dK and dV repeat exactly.
[[nodiscard]] Status AttentionBackward(const AttentionBackwardParams& params,
                                       const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_ATTENTION_H_
