// How long the CPU kernels take: the fast path beside the reference.
//
//   kernels_bench --benchmark_out=kernels.json --benchmark_out_format=json
//
// Shapes: "step" is the attention of a small model that trains on a CPU (batch
// 4, 1 head, 64 tokens of 64 channels); the others are sampled rows of larger
// ones.  Operands are random; nothing here depends on their values.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "bellwether/kernels/center_keys.h"
#include "bellwether/kernels/key_leak.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/spectral.h"
#include "kernels/backends.h"

namespace bellwether::kernels {
namespace {

std::vector<float> RandomFloats(int64_t count) {
  std::mt19937 rng(2510);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(rng);
  return values;
}

// Random bytes that are legal elements of the type: bf16 and fp16 of order 1.
std::vector<uint16_t> RandomHalves(int64_t count) {
  std::mt19937 rng(4212);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& x : values) {
    x = static_cast<uint16_t>(0x3c00 | (rng() & 0x80ff));
  }
  return values;
}

struct Attention {
  Attention(DType dtype, int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens, int64_t channels,
            uint32_t rows_per_head, bool with_delta)
      : floats(RandomFloats(batch * heads * tokens * channels)),
        halves(RandomHalves(batch * heads * tokens * channels)),
        out(static_cast<size_t>(heads * kProbeStatCount)) {
    const void* data =
        dtype == DType::kFloat32 ? static_cast<const void*>(floats.data()) : static_cast<const void*>(halves.data());
    const Tensor4 all{data, heads * tokens * channels, tokens * channels, channels};
    p.dtype = dtype;
    p.batch = batch;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.q_len = p.k_len = tokens;
    p.head_dim = p.v_dim = channels;
    p.q = p.k = all;
    if (with_delta) p.v = p.o = p.d_o = all;
    p.scale = 0.125f;
    p.causal = true;
    p.rows_per_head = rows_per_head;
    p.stat_stride = heads;
    p.out = out.data();
  }
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<float> out;
  ProbeParams p;
};

DType ToDType(int64_t value) { return static_cast<DType>(value); }

void BM_ProbeStep(benchmark::State& state) {
  Attention a(ToDType(state.range(0)), 4, 1, 1, 64, 64, static_cast<uint32_t>(state.range(1)), state.range(2) != 0);
  for (auto _ : state) {
    if (Probe(a.p, {}) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_ProbeStep)
    ->ArgNames({"dtype", "rows", "delta"})
    ->ArgsProduct({{0, 1, 2}, {0, 16}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);

void BM_ProbeStepReference(benchmark::State& state) {
  Attention a(ToDType(state.range(0)), 4, 1, 1, 64, 64, 0, true);
  for (auto _ : state) {
    if (cpu::ProbeReference(a.p) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_ProbeStepReference)->ArgName("dtype")->Arg(0)->Arg(1)->Unit(benchmark::kMicrosecond);

void BM_ProbeLong(benchmark::State& state) {
  Attention a(DType::kBFloat16, 1, 8, 2, state.range(0), 128, 64, true);
  const Device device{.threads = static_cast<uint32_t>(state.range(1))};
  for (auto _ : state) {
    if (Probe(a.p, device) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_ProbeLong)
    ->ArgNames({"tokens", "threads"})
    ->ArgsProduct({{1024, 4096}, {1, 2}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

void BM_ProbeLongReference(benchmark::State& state) {
  Attention a(DType::kBFloat16, 1, 8, 2, state.range(0), 128, 64, true);
  for (auto _ : state) {
    if (cpu::ProbeReference(a.p) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_ProbeLongReference)->ArgName("tokens")->Arg(1024)->Unit(benchmark::kMillisecond);

void BM_KeyLeak(benchmark::State& state) {
  Attention a(DType::kBFloat16, 4, 1, 1, state.range(0), 64, 0, false);
  float leak = 0, gradient = 0;
  KeyLeakParams p{.dtype = a.p.dtype,
                  .batch = 4,
                  .kv_heads = 1,
                  .k_len = state.range(0),
                  .head_dim = 64,
                  .d_k = a.p.k,
                  .leak_sum = &leak,
                  .gradient_sum = &gradient};
  for (auto _ : state) {
    if (KeyLeak(p, {}) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_KeyLeak)->ArgName("tokens")->Arg(64)->Arg(4096)->Unit(benchmark::kMicrosecond);

void BM_CenterKeys(benchmark::State& state) {
  Attention a(DType::kBFloat16, 4, 1, 1, state.range(0), 64, 0, false);
  std::vector<uint16_t> out(a.halves.size());
  CenterKeysParams p{.dtype = a.p.dtype,
                     .batch = 4,
                     .kv_heads = 1,
                     .k_len = state.range(0),
                     .head_dim = 64,
                     .k = a.p.k,
                     .out = out.data(),
                     .out_batch_stride = a.p.k.batch_stride,
                     .out_head_stride = a.p.k.head_stride,
                     .out_token_stride = a.p.k.token_stride};
  for (auto _ : state) {
    if (CenterKeys(p, {}) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_CenterKeys)->ArgName("tokens")->Arg(64)->Arg(4096)->Unit(benchmark::kMicrosecond);

void BM_SpectralNorms(benchmark::State& state) {
  const int64_t heads = state.range(0), rows = state.range(1), columns = state.range(2);
  const std::vector<float> weight = RandomFloats(heads * rows * columns);
  std::vector<float> sigma(static_cast<size_t>(heads));
  std::vector<float> direction(static_cast<size_t>(heads * rows));
  SpectralParams p{.heads = heads,
                   .rows = rows,
                   .columns = columns,
                   .weight = weight.data(),
                   .head_stride = rows * columns,
                   .row_stride = columns,
                   .column_stride = 1,
                   .sigma = sigma.data(),
                   .direction = direction.data()};
  for (auto _ : state) {
    if (SpectralNorms(p, {}) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_SpectralNorms)
    ->ArgNames({"heads", "rows", "columns"})
    ->Args({1, 64, 64})
    ->Args({6, 64, 384})
    ->Args({4, 128, 4096})
    ->Unit(benchmark::kMicrosecond);

void BM_IncrementRank(benchmark::State& state) {
  const int64_t rows = state.range(0), columns = state.range(1);
  const std::vector<float> now = RandomFloats(2 * rows * columns);
  std::vector<float> before = now;
  for (size_t i = 0; i < before.size(); ++i) before[i] *= i % 3 == 0 ? 0.999f : 1.001f;
  float rank = 0;
  const float* k = now.data() + rows * columns;
  const float* k_before = before.data() + rows * columns;
  IncrementRankParams p{.heads = 1,
                        .kv_heads = 1,
                        .rows = rows,
                        .columns = columns,
                        .wq = now.data(),
                        .wq_before = before.data(),
                        .wk = k,
                        .wk_before = k_before,
                        .q_head_stride = 0,
                        .q_row_stride = columns,
                        .k_head_stride = 0,
                        .k_row_stride = columns,
                        .effective_rank = &rank};
  for (auto _ : state) {
    if (IncrementRank(p, {}) != Status::kOk) state.SkipWithError(LastErrorMessage());
  }
}
BENCHMARK(BM_IncrementRank)
    ->ArgNames({"rows", "columns"})
    ->Args({64, 64})
    ->Args({64, 384})
    ->Args({128, 4096})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace bellwether::kernels

BENCHMARK_MAIN();
