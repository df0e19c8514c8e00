// push_bench: what a push costs the training thread, against a bare memcpy.
//
//   push_bench [PUSHES]
//
// One frame of 16 KiB (4 signals x 32 layers x 32 heads) is pushed to a client
// whose sender records to a file, and the same bytes are copied into 256 private
// buffers in turn, one after the other, so that both see the same machine.
// Prints JSON: p50 and p99 of both in ns (with two clock reads each),
// their ratios, and the cost of a drop.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bellwether/client.h"

namespace {

constexpr size_t kBuffers = 256;
constexpr uint32_t kLayers = 32, kHeads = 32, kSignals = 4;
constexpr size_t kFrameBytes = size_t{kLayers} * kHeads * kSignals * sizeof(float);
constexpr int kBlock = 64;  // Pushes between two pauses: a quarter of the ring.
constexpr int kDrops = 1'000'000;

double Now() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double At(std::vector<double>* values, double quantile) {
  std::sort(values->begin(), values->end());
  return (*values)[static_cast<size_t>(quantile * static_cast<double>(values->size() - 1))];
}

bw_client* Create(const std::string& path, uint32_t ring_frames) {
  bw_client_options options{};
  options.struct_size = sizeof(options);
  options.layers = kLayers;
  options.heads = kHeads;
  options.ring_frames = ring_frames;
  options.run = "push_bench";
  options.record_path = path.c_str();
  options.sender_path = BELLWETHER_SENDER;
  bw_client* client = nullptr;
  if (bw_client_create(&options, &client) != BW_OK) {
    std::fprintf(stderr, "%s\n", bw_last_error());
    std::exit(1);
  }
  return client;
}

}  // namespace

int main(int argc, char** argv) {
  const int pushes = argc > 1 ? std::atoi(argv[1]) : 20'000;
  char folder[] = "/tmp/bwbenchXXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  const std::string path = std::string(folder) + "/run.bwrun";
  bw_client* client = Create(path, 0);

  const std::vector<float> values(kFrameBytes / sizeof(float), 1.5f);
  std::vector<bw_block> blocks(kSignals);
  for (uint32_t i = 0; i < kSignals; ++i) {
    blocks[i].signal = i + 1 < kSignals ? i + 1 : bw_signal_by_name("logit_max");
    blocks[i].layer_count = kLayers;
    blocks[i].head_count = kHeads;
    blocks[i].values = values.data() + size_t{i} * kLayers * kHeads;
  }
  bw_frame frame{};
  frame.struct_size = sizeof(frame);
  frame.block_count = kSignals;
  frame.blocks = blocks.data();
  std::vector<char> buffers(kBuffers * kFrameBytes, 1);

  std::vector<double> push_ns, copy_ns;
  uint64_t dropped = 0;
  size_t next = 0;
  for (int i = 0; i < pushes + 4 * static_cast<int>(kBuffers); i += kBlock) {
    const bool warm = i >= 4 * static_cast<int>(kBuffers);  // Every slot was touched.
    const auto push = [&] {
      const double start = Now();
      dropped += bw_client_push(client, &frame) != BW_OK;
      if (warm) push_ns.push_back(Now() - start);
    };
    const auto copy = [&] {
      const double start = Now();
      std::memcpy(&buffers[next++ % kBuffers * kFrameBytes], values.data(), kFrameBytes);
      if (warm) copy_ns.push_back(Now() - start);
    };
    // In turn, and each as often first: the first after a pause pays for it.
    for (int k = 0; k < kBlock; ++k) {
      if ((i / kBlock + k) % 2 == 0) {
        push();
        copy();
      } else {
        copy();
        push();
      }
    }
    if (bw_client_flush(client, 10'000) != BW_OK) std::fprintf(stderr, "%s\n", bw_last_error());
  }
  bw_client_destroy(client);

  bw_client* full = Create(path + ".full", 2);
  const double start = Now();
  uint64_t full_drops = 0;
  for (int i = 0; i < kDrops; ++i) full_drops += bw_client_push(full, &frame) == BW_DROPPED;
  const double drop_ns = (Now() - start) / kDrops;
  bw_client_destroy(full);

  const double push_p50 = At(&push_ns, 0.5), push_p99 = At(&push_ns, 0.99);
  const double copy_p50 = At(&copy_ns, 0.5), copy_p99 = At(&copy_ns, 0.99);
  std::printf(
      "{\"frame_bytes\": %zu, \"pushes\": %zu, \"dropped\": %llu, \"push_p50_ns\": %.0f, \"push_p99_ns\": %.0f, "
      "\"memcpy_p50_ns\": %.0f, \"memcpy_p99_ns\": %.0f, \"ratio_p50\": %.3f, \"ratio_p99\": %.3f, "
      "\"drop_ns\": %.1f, \"share_dropped_when_full\": %.4f}\n",
      kFrameBytes, push_ns.size(), static_cast<unsigned long long>(dropped), push_p50, push_p99, copy_p50, copy_p99,
      push_p50 / copy_p50, push_p99 / copy_p99, drop_ns, static_cast<double>(full_drops) / kDrops);
  return std::system((std::string("rm -rf ") + folder).c_str());
}
