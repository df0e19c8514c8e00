// The fast path: units of one sequence, one key head and at most kUnitRows
// query rows, spread over threads; their sums are added in unit order, so the
// result does not depend on the threads.

#include <atomic>

#include "backends.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "cpu/probe_unit.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

double Operations(const ProbePlan& plan) {
  return static_cast<double>(plan.p.batch * plan.p.heads) * static_cast<double>(plan.rows) *
         static_cast<double>(plan.p.k_len) * static_cast<double>(plan.p.head_dim + plan.v_dim);
}

// Adds all units' sums to the caller's memory, head by head in unit order.
void StoreAll(const ProbePlan& plan, const double* sums, const double* coherence) {
  const ProbeParams& p = plan.p;
  const int64_t unit_size = plan.group * kProbeStatCount;
  for (int64_t head = 0; head < p.heads; ++head) {
    const int64_t kv_head = head / plan.group;
    double total[kProbeStatCount];
    ClearSums(total);
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      const int64_t first = (batch * p.kv_heads + kv_head) * plan.chunks;
      for (int64_t unit = first; unit < first + plan.chunks; ++unit) {
        MergeSums(sums + unit * unit_size + head % plan.group * kProbeStatCount, total);
      }
    }
    StoreSums(p, head, total);
  }
  for (int64_t kv_head = 0; p.kv_out != nullptr && kv_head < p.kv_heads; ++kv_head) {
    double total = 0;
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      total += coherence[(batch * p.kv_heads + kv_head) * plan.chunks];
    }
    p.kv_out[kProbeKvSequences * p.kv_stat_stride + kv_head] += static_cast<float>(p.batch);
    float& out = p.kv_out[kProbeKvKeyCoherenceSum * p.kv_stat_stride + kv_head];
    out = static_cast<float>(static_cast<double>(out) + total);
  }
}

}  // namespace

Status Probe(const ProbeParams& params, uint32_t threads) {
  if (params.batch == 0 || params.q_len == 0 || params.k_len == 0) return Status::kOk;
  const ProbePlan plan(params);
  const uint32_t workers = UsefulThreads(threads, plan.units, Operations(plan));
  const int64_t unit_size = plan.group * kProbeStatCount;
  const int64_t each = plan.ScratchSize();
  const Buffer sums(plan.units * (unit_size + 1));
  const Buffer scratch(each * static_cast<int64_t>(workers));
  if (sums.data() == nullptr || scratch.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
  }
  double* coherence = sums.data() + plan.units * unit_size;
  std::atomic<int64_t> next{0};
  WithElement(params.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      ProbeUnit<Element> probe(plan, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < plan.units;) {
        const int64_t sequence = unit / plan.chunks;
        const int64_t first = unit % plan.chunks * kUnitRows;
        probe.Run(sequence / params.kv_heads, sequence % params.kv_heads, first,
                  std::min(first + kUnitRows, plan.group * plan.rows), sums.data() + unit * unit_size,
                  coherence + unit);
      }
    });
  });
  StoreAll(plan, sums.data(), coherence);
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
