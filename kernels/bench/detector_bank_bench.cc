// One tick of the detector bank over all series of many runs: the GPU beside one core of
// the CPU, in one process, on the same values; their hits must be equal.
//
//   detector_bank_bench [--runs 1000] [--heads 4096] [--ticks 20] [--growing 1024] [--percent 200]
//
// A run has four tracks, three of them with full windows of 64 batches, and five tests: by
// value, by rise, and three trends.  One head in `growing` grows, so that its trend is
// fitted.  Only heads above `percent` of the median head are looked at any closer: 200, and
// it is those that grow; 105, and it is a third of all.  Timed on the GPU: copying the newest values into pinned
// memory, both transfers and the kernels.  Prints JSON.

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bellwether/kernels/gpu_bank.h"

namespace {

using namespace bellwether::kernels;

constexpr int kTracks = 4;
constexpr int kTests = 5;
constexpr int32_t kWindow = 64;

struct Options {
  int64_t runs = 1000, heads = 4096, ticks = 20, growing = 1024, percent = 200;
};

// Noise of about a tenth around 1: cheap, and not the same in two heads or batches.
float Noise(uint64_t at) {
  uint64_t x = at * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 32;
  return 0.85f + 0.3f * static_cast<float>(x & 0xffffffu) / 16777216.0f;
}

class Run {
 public:
  Run(const Options& options, uint64_t key) : options_(options), key_(key) {
    const auto heads = static_cast<size_t>(options.heads);
    for (int t = 0; t < kTracks; ++t) {
      newest_[t].resize(heads);
      if (t < kTracks - 1) ring_[t].resize(heads * kWindow);
    }
    hits_.resize(static_cast<size_t>(kTests * HitWords(options.heads)));
    for (int32_t batch = 0; batch < kWindow; ++batch) WriteRow(batch);
    run_.key = key;
    run_.heads = options.heads;
    run_.tracks = kTracks;
    run_.hits = hits_.data();
  }

  void NextBatch(int32_t batch) {
    WriteRow(batch);
    for (int t = 0; t < kTracks; ++t) {
      BankTrack& track = run_.track[t];
      track = {.newest = newest_[t].data(), .fresh = true, .median = track.median};
      if (t == kTracks - 1) continue;
      track.ring = ring_[t].data();
      track.ring_median = ring_median_[t];
      track.ring_step = ring_step_[t];
      track.window = track.rows = kWindow;
      track.slot = batch % kWindow;
      track.next = (batch + 1) % kWindow;
      track.rows_written = batch + 1;
    }
    const BankWindow whole = {.rows = kWindow, .rise_min = 1.3, .doubling_steps_max = 2000};
    const BankWindow half = {.rows = kWindow / 2, .rise_min = 1.3, .doubling_steps_max = 1000};
    const double factor = static_cast<double>(options_.percent) / 100;
    const BankTest trend = {.factor = factor,
                            .windows = 2,
                            .window = {whole, half},
                            .trend = true,
                            .points_min = 24,
                            .z_min = 4,
                            .r2_min = 0.8};
    run_.tests = kTests;
    for (int t = 0; t < 3; ++t) {
      run_.test[t] = trend;
      run_.test[t].track = t;
    }
    run_.test[2].relative = true;
    run_.test[3] = {.track = 0, .factor = factor, .windows = 1, .window = {whole}};
    run_.test[4] = {.track = 3, .absolute = factor};
  }

  void Settle() {
    for (int t = 0; t < kTracks - 1; ++t) ring_median_[t][run_.track[t].slot] = run_.track[t].median;
  }

  BankRun* run() { return &run_; }
  const std::vector<uint64_t>& hits() const { return hits_; }

 private:
  void WriteRow(int32_t batch) {
    const auto heads = static_cast<size_t>(options_.heads);
    const float growth = std::exp2(static_cast<float>(batch % 192) / 16.0f);
    for (int t = 0; t < kTracks; ++t) {
      for (size_t h = 0; h < heads; ++h) {
        const bool grows = h % static_cast<size_t>(options_.growing) == 0;
        const uint64_t cell =
            ((key_ * kTracks + static_cast<uint64_t>(t)) << 40) + (static_cast<uint64_t>(batch) << 20) + h;
        newest_[t][h] = Noise(cell) * (grows ? growth : 1.0f);
      }
      if (t == kTracks - 1) continue;
      std::copy(newest_[t].begin(), newest_[t].end(),
                ring_[t].begin() + static_cast<int64_t>(batch % kWindow) * options_.heads);
      ring_step_[t][batch % kWindow] = static_cast<float>(20 * batch);
      if (batch < kWindow) ring_median_[t][batch] = 1.0f;
    }
  }

  const Options options_;
  const uint64_t key_;
  std::vector<float> newest_[kTracks], ring_[kTracks];
  float ring_median_[kTracks][kWindow] = {}, ring_step_[kTracks][kWindow] = {};
  std::vector<uint64_t> hits_;
  BankRun run_;
};

double MillisecondsOf(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// Of processor time, so that a busy machine does not count.
double ThreadMilliseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

std::string Quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  char text[100];
  std::snprintf(text, sizeof text, "{\"median\": %.3f, \"q1\": %.3f, \"q3\": %.3f, \"max\": %.3f}",
                values[values.size() / 2], values[values.size() / 4], values[values.size() * 3 / 4], values.back());
  return text;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    int64_t* const value = name == "--runs"      ? &options.runs
                           : name == "--heads"   ? &options.heads
                           : name == "--ticks"   ? &options.ticks
                           : name == "--growing" ? &options.growing
                           : name == "--percent" ? &options.percent
                                                 : nullptr;
    if (value == nullptr || (*value = std::atoll(argv[i + 1])) < 1) {
      std::fprintf(stderr,
                   "usage: detector_bank_bench [--runs N] [--heads N] [--ticks N] [--growing N] [--percent N]\n");
      return 2;
    }
  }
  bw_bank* bank = nullptr;
  char device[256] = "none";
  if (bw_bank_open(&bank, device) != 0) std::fprintf(stderr, "no GPU: %s\n", bw_bank_error());

  std::vector<std::unique_ptr<Run>> runs;
  std::vector<BankRun*> pass;
  for (int64_t r = 0; r < options.runs; ++r) {
    runs.push_back(std::make_unique<Run>(options, static_cast<uint64_t>(r + 1)));
    pass.push_back(runs.back()->run());
  }
  std::vector<double> cpu, gpu;
  int64_t hits = 0;
  bool equal = true;
  for (int64_t tick = 0; tick < options.ticks; ++tick) {
    for (const auto& run : runs) run->NextBatch(kWindow + static_cast<int32_t>(tick));
    std::vector<std::vector<uint64_t>> of_gpu;
    if (bank != nullptr) {
      int failed = 0;
      gpu.push_back(
          MillisecondsOf([&] { failed = bw_bank_evaluate(bank, pass.data(), static_cast<int32_t>(pass.size())); }));
      if (failed != 0) {
        std::fprintf(stderr, "%s\n", bw_bank_error());
        return 1;
      }
      for (const auto& run : runs) of_gpu.push_back(run->hits());
    }
    const double begin = ThreadMilliseconds();
    for (BankRun* run : pass) cpu::EvaluateDetectors(run);
    cpu.push_back(ThreadMilliseconds() - begin);
    for (size_t r = 0; r < runs.size(); ++r) {
      equal = equal && (of_gpu.empty() || of_gpu[r] == runs[r]->hits());
      for (const uint64_t word : runs[r]->hits()) hits += __builtin_popcountll(word);
      runs[r]->Settle();
    }
  }
  // The first pass sends all windows.
  if (gpu.size() > 1) gpu.erase(gpu.begin());
  const int64_t series = options.runs * options.heads * kTracks;
  std::printf(
      "{\"device\": \"%s\", \"series\": %lld, \"runs\": %lld, \"ticks\": %lld, \"growing\": %lld, \"percent\": %lld,\n",
      device, static_cast<long long>(series), static_cast<long long>(options.runs),
      static_cast<long long>(options.ticks), static_cast<long long>(options.growing),
      static_cast<long long>(options.percent));
  std::printf(" \"hits_per_tick\": %lld,\n", static_cast<long long>(hits / options.ticks));
  std::printf(" \"cpu_one_core_ms\": %s", Quartiles(cpu).c_str());
  if (!gpu.empty())
    std::printf(",\n \"gpu_ms\": %s, \"hits_equal\": %s", Quartiles(gpu).c_str(), equal ? "true" : "false");
  std::printf("}\n");
  if (bank != nullptr) bw_bank_close(bank);
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return Main(argc, argv); }
