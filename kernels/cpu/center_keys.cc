// Two passes over each sequence: mean in double, then the difference, rounded
// once.  Units are (batch, head, sequence): nothing is shared between them.

#include <algorithm>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/parallel.h"

namespace bellwether::kernels::cpu {
namespace {

template <typename Element>
void CenterSequence(const CenterKeysParams& p, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  const ProbeVisible& v = p.visible;
  const auto visible = [&](int64_t j) {
    return v.data == nullptr || v.data[batch * v.batch_stride + head * v.head_stride + j * v.key_stride] != 0;
  };
  int64_t count = 0;
  double mean[kHeadDimMax];
  std::fill(mean, mean + p.head_dim, 0.0);
  for (int64_t j = begin; j < end; ++j) {
    if (!visible(j)) continue;
    ++count;
    const Element* k = RowOf<Element>(p.k, batch, head, j);
    for (int64_t c = 0; c < p.head_dim; ++c) mean[c] += static_cast<double>(ToFloat(k[c]));
  }
  for (int64_t c = 0; c < p.head_dim; ++c) mean[c] /= static_cast<double>(count);
  for (int64_t j = begin; j < end; ++j) {
    const Element* k = RowOf<Element>(p.k, batch, head, j);
    Element* out =
        static_cast<Element*>(p.out) + batch * p.out_batch_stride + head * p.out_head_stride + j * p.out_token_stride;
    const bool moves = visible(j);
    for (int64_t c = 0; c < p.head_dim; ++c) {
      Assign(out[c], static_cast<double>(ToFloat(k[c])) - (moves ? mean[c] : 0.0));
    }
  }
}

}  // namespace

Status CenterKeys(const CenterKeysParams& p, uint32_t threads) {
  const int64_t sequences = p.cu_seqlens != nullptr ? p.sequences : 1;
  const int64_t units = p.batch * p.kv_heads * sequences;
  const double elements =
      static_cast<double>(p.batch * p.kv_heads) * static_cast<double>(p.k_len) * static_cast<double>(p.head_dim);
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(units, UsefulThreads(threads, units, elements), [&](int64_t unit) {
      const int64_t sequence = unit % sequences;
      const int64_t row = unit / sequences;
      const int64_t begin = p.cu_seqlens != nullptr ? p.cu_seqlens[sequence] : 0;
      const int64_t end = p.cu_seqlens != nullptr ? p.cu_seqlens[sequence + 1] : p.k_len;
      if (begin < end) CenterSequence<Element>(p, row / p.kv_heads, row % p.kv_heads, begin, end);
    });
  });
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
