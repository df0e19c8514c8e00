// The fast path: units of one sequence, one key head and at most kUnitRows
// query rows, spread over threads; their sums are added in unit order, so the
// result does not depend on the threads.

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

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
void StoreAll(const ProbePlan& plan, const double* sums, const KeySums* keys) {
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
    KeySums total;
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      const KeySums& of_sequence = keys[(batch * p.kv_heads + kv_head) * plan.chunks];
      total.sequences += of_sequence.sequences;
      total.coherence += of_sequence.coherence;
    }
    StoreKeySums(p, kv_head, total);
  }
}

}  // namespace

Status Probe(const ProbeParams& params, uint32_t threads) {
  if (params.batch == 0 || params.q_len == 0 || params.k_len == 0) return Status::kOk;
  const ProbePlan plan(params);
  const uint32_t workers = UsefulThreads(threads, plan.units, Operations(plan));
  const int64_t unit_size = plan.group * kProbeStatCount;
  const int64_t each = plan.ScratchSize();
  const Buffer sums(plan.units * unit_size);
  const Buffer scratch(each * static_cast<int64_t>(workers));
  const std::unique_ptr<KeySums[]> keys(new (std::nothrow) KeySums[static_cast<size_t>(plan.units)]);
  if (sums.data() == nullptr || scratch.data() == nullptr || keys == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
  }
  std::atomic<int64_t> next{0};
  WithElement(params.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      ProbeUnit<Element> probe(plan, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < plan.units;) {
        const int64_t sequence = unit / plan.chunks;
        const int64_t first = unit % plan.chunks * kUnitRows;
        keys[static_cast<size_t>(unit)] =
            probe.Run(sequence / params.kv_heads, sequence % params.kv_heads, first,
                      std::min(first + kUnitRows, plan.group * plan.rows), sums.data() + unit * unit_size);
      }
    });
  });
  StoreAll(plan, sums.data(), keys.get());
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
