// The host's side of the detector bank on a GPU: what a pass sends, and the copies of the
// runs' windows.
//
// A pass is one transfer there, three kernels and one transfer back, whatever the number
// of runs.  What is sent lies in one pinned buffer whose layout Plan() makes.

#include "bellwether/kernels/gpu_bank.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cpu/parallel.h"
#include "cuda/detector_bank.cuh"

namespace bellwether::kernels::cuda {
namespace {

// Copying what is sent is bound by memory: more threads would only wait.
constexpr uint32_t kFillThreadsMax = 8;

thread_local std::string last_error;

bool Ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  last_error = std::string(what) + ": " + cudaGetErrorString(error);
  return false;
}

// Memory on the device that grows, with its pinned twin on the host if wanted.
class Buffer {
 public:
  explicit Buffer(bool twin) : twin_(twin) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Release(); }

  bool Reserve(size_t bytes) {
    if (bytes <= bytes_) return true;
    Release();
    const size_t wanted = bytes + bytes / 2;
    if (!Ok(cudaMalloc(reinterpret_cast<void**>(&device_), wanted), "memory for a pass") ||
        (twin_ && !Ok(cudaMallocHost(reinterpret_cast<void**>(&host_), wanted), "pinned memory for a pass"))) {
      return false;
    }
    bytes_ = wanted;
    return true;
  }
  unsigned char* host() const { return host_; }
  unsigned char* device() const { return device_; }

 private:
  void Release() {
    if (host_ != nullptr) cudaFreeHost(host_);
    if (device_ != nullptr) cudaFree(device_);
    host_ = device_ = nullptr;
    bytes_ = 0;
  }

  const bool twin_;
  unsigned char* host_ = nullptr;
  unsigned char* device_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out aligned pieces of a buffer that may not exist yet.
class Layout {
 public:
  size_t Take(size_t bytes) {
    const size_t at = size_;
    size_ += (bytes + 255) / 256 * 256;
    return at;
  }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

// A run's windows on the device.
struct Copy {
  float* rings = nullptr;  // The tracks' rings, one behind the other.
  size_t floats = 0;
  int64_t rows_written[kBankTracksMax] = {};
};

}  // namespace

class GpuBank {
 public:
  ~GpuBank() {
    for (auto& [key, copy] : copies_) cudaFree(copy.rings);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  bool Open(char* device) {
    cudaDeviceProp properties;
    if (!Ok(cudaSetDevice(0), "cudaSetDevice") ||
        !Ok(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties") ||
        !Ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate")) {
      return false;
    }
    multiprocessors_ = properties.multiProcessorCount;
    std::snprintf(device, 256, "%s", properties.name);
    return true;
  }

  bool Evaluate(BankRun* const* runs, int32_t count) {
    if (count == 0) return true;
    if (!Ok(cudaSetDevice(0), "cudaSetDevice")) return false;
    Plan(runs, count);
    if (!in_.Reserve(sent_.size()) || !out_.Reserve(returned_.size()) || !work_.Reserve(work_bytes_)) {
      return false;
    }
    copies_now_.clear();
    for (int32_t r = 0; r < count; ++r) {
      copies_now_.push_back(CopyOf(*runs[r]));
      if (copies_now_.back() == nullptr) return false;
    }
    const uint32_t threads = cpu::UsefulThreads(std::min(kFillThreadsMax, std::thread::hardware_concurrency()), count,
                                                static_cast<double>(sent_.size() / sizeof(float)));
    cpu::ParallelFor(count, threads, [&](int64_t r) {
      Fill(*runs[r], static_cast<int32_t>(r), copies_now_[static_cast<size_t>(r)]->rings);
    });
    DevicePass pass;
    pass.tracks = reinterpret_cast<DeviceTrack*>(in_.device() + tracks_at_);
    pass.runs = reinterpret_cast<DeviceRun*>(in_.device() + runs_at_);
    pass.chunks = reinterpret_cast<const Chunk*>(in_.device() + chunks_at_);
    pass.medians = reinterpret_cast<float*>(out_.device());
    pass.fit_count = reinterpret_cast<uint32_t*>(work_.device());
    pass.fits = reinterpret_cast<FitRequest*>(work_.device() + 256);
    pass.track_count = track_count_;
    pass.chunk_count = chunk_count_;
    if (!Ok(cudaMemcpyAsync(in_.device(), in_.host(), sent_.size(), cudaMemcpyHostToDevice, stream_),
            "sending a pass") ||
        !Ok(cudaMemsetAsync(work_.device(), 0, sizeof(uint32_t), stream_), "cudaMemset") ||
        !Ok(LaunchDetectorPass(pass, multiprocessors_, stream_), "starting a pass") ||
        !Ok(cudaMemcpyAsync(out_.host(), out_.device(), returned_.size(), cudaMemcpyDeviceToHost, stream_),
            "fetching a pass") ||
        !Ok(cudaStreamSynchronize(stream_), "a pass")) {
      return false;
    }
    for (int32_t r = 0; r < count; ++r) Return(runs[r], r);
    return true;
  }

  bool Forget(uint64_t key) {
    const auto copy = copies_.find(key);
    if (copy == copies_.end()) return true;
    float* const rings = copy->second.rings;
    copies_.erase(copy);
    return Ok(cudaFree(rings), "cudaFree");
  }

 private:
  struct Place {
    int32_t first_track = 0, first_chunk = 0, chunks = 0;
    size_t rows_at = 0;  // In what is sent.
    size_t hits_at = 0;  // In what comes back.
  };

  static size_t RowBytes(const BankRun& run) { return (static_cast<size_t>(run.heads) * sizeof(float) + 15) / 16 * 16; }
  static bool SendsRow(const BankTrack& track) { return track.fresh && track.slot >= 0 && track.holes; }

  void Plan(BankRun* const* runs, int32_t count) {
    places_.assign(static_cast<size_t>(count), {});
    track_count_ = chunk_count_ = 0;
    size_t fits = 0;
    for (int32_t r = 0; r < count; ++r) {
      const BankRun& run = *runs[r];
      Place& place = places_[static_cast<size_t>(r)];
      place.first_track = track_count_;
      place.first_chunk = chunk_count_;
      place.chunks = run.tests == 0 ? 0 : static_cast<int32_t>((run.heads + kBankThreads - 1) / kBankThreads);
      track_count_ += run.tracks;
      chunk_count_ += place.chunks;
      for (int32_t t = 0; t < run.tests; ++t) fits += run.test[t].trend ? static_cast<size_t>(run.heads) : 0;
    }
    sent_ = {};
    tracks_at_ = sent_.Take(static_cast<size_t>(track_count_) * sizeof(DeviceTrack));
    runs_at_ = sent_.Take(static_cast<size_t>(count) * sizeof(DeviceRun));
    chunks_at_ = sent_.Take(static_cast<size_t>(chunk_count_) * sizeof(Chunk));
    returned_ = {};
    returned_.Take(static_cast<size_t>(track_count_) * sizeof(float));
    for (int32_t r = 0; r < count; ++r) {
      const BankRun& run = *runs[r];
      size_t rows = 0;
      for (int32_t t = 0; t < run.tracks; ++t) {
        rows += run.track[t].newest != nullptr ? 1 : 0;
        rows += SendsRow(run.track[t]) ? 1 : 0;
      }
      Place& place = places_[static_cast<size_t>(r)];
      place.rows_at = sent_.Take(rows * RowBytes(run));
      place.hits_at = returned_.Take(static_cast<size_t>(run.tests * HitWords(run.heads)) * sizeof(uint64_t));
    }
    work_bytes_ = 256 + fits * sizeof(FitRequest);
  }

  // The run's copy, complete but for the row that this pass sends; null on failure.
  Copy* CopyOf(const BankRun& run) {
    size_t floats = 0;
    for (int32_t t = 0; t < run.tracks; ++t) floats += RingFloats(run, t);
    Copy& copy = copies_[run.key];
    if (copy.floats != floats) {
      if (copy.rings != nullptr) cudaFree(copy.rings);
      copy = {};
      if (!Ok(cudaMalloc(reinterpret_cast<void**>(&copy.rings), std::max(floats, size_t{1}) * sizeof(float)),
              "memory for a run's windows")) {
        copies_.erase(run.key);
        return nullptr;
      }
      copy.floats = floats;
      std::fill(std::begin(copy.rows_written), std::end(copy.rows_written), -1);
    }
    size_t at = 0;
    for (int32_t t = 0; t < run.tracks; ++t) {
      const BankTrack& track = run.track[t];
      if (track.ring == nullptr) continue;
      const bool one_more = track.fresh && copy.rows_written[t] + 1 == track.rows_written;
      if (!one_more && copy.rows_written[t] != track.rows_written &&
          !Ok(cudaMemcpyAsync(copy.rings + at, track.ring, RingFloats(run, t) * sizeof(float), cudaMemcpyHostToDevice,
                              stream_),
              "sending a run's windows")) {
        return nullptr;
      }
      copy.rows_written[t] = track.rows_written;
      at += RingFloats(run, t);
    }
    return &copy;
  }

  static size_t RingFloats(const BankRun& run, int32_t t) {
    const BankTrack& track = run.track[t];
    return track.ring == nullptr ? 0 : static_cast<size_t>(track.window) * static_cast<size_t>(run.heads);
  }

  // Writes what is sent of a run; `rings` is its copy on the device.
  void Fill(const BankRun& run, int32_t r, float* rings) {
    const Place& place = places_[static_cast<size_t>(r)];
    size_t row_at = place.rows_at;
    const auto send = [&](const float* values) {
      std::memcpy(in_.host() + row_at, values, static_cast<size_t>(run.heads) * sizeof(float));
      const auto* const sent = reinterpret_cast<const float*>(in_.device() + row_at);
      row_at += RowBytes(run);
      return sent;
    };
    size_t ring_at = 0;
    for (int32_t t = 0; t < run.tracks; ++t) {
      const BankTrack& from = run.track[t];
      DeviceTrack to = {};
      to.heads = run.heads;
      to.window = from.window;
      to.rows = from.rows;
      to.next = from.next;
      to.slot = from.slot;
      to.fresh = from.fresh;
      to.median = from.median;
      if (from.newest != nullptr) to.newest = send(from.newest);
      if (from.ring != nullptr) {
        to.ring = rings + ring_at;
        ring_at += RingFloats(run, t);
        std::copy(from.ring_median, from.ring_median + from.window, to.ring_median);
        std::copy(from.ring_step, from.ring_step + from.window, to.ring_step);
        if (from.fresh) {
          to.row = SendsRow(from) ? send(from.ring + int64_t{from.slot} * run.heads) : to.newest;
        }
      }
      std::memcpy(in_.host() + tracks_at_ + static_cast<size_t>(place.first_track + t) * sizeof to, &to, sizeof to);
    }
    DeviceRun to = {};
    to.heads = run.heads;
    to.first_track = place.first_track;
    to.tests = run.tests;
    std::copy(run.test, run.test + run.tests, to.test);
    to.hits = reinterpret_cast<uint32_t*>(out_.device() + place.hits_at);
    std::memcpy(in_.host() + runs_at_ + static_cast<size_t>(r) * sizeof to, &to, sizeof to);
    auto* const chunks = reinterpret_cast<Chunk*>(in_.host() + chunks_at_) + place.first_chunk;
    for (int32_t c = 0; c < place.chunks; ++c) chunks[c] = {r, c * kBankThreads};
  }

  void Return(BankRun* run, int32_t r) const {
    const Place& place = places_[static_cast<size_t>(r)];
    const auto* const medians = reinterpret_cast<const float*>(out_.host()) + place.first_track;
    for (int32_t t = 0; t < run->tracks; ++t) {
      if (run->track[t].fresh) run->track[t].median = medians[t];
    }
    std::memcpy(run->hits, out_.host() + place.hits_at,
                static_cast<size_t>(run->tests * HitWords(run->heads)) * sizeof(uint64_t));
  }

  cudaStream_t stream_ = nullptr;
  int multiprocessors_ = 0;
  std::unordered_map<uint64_t, Copy> copies_;  // Whose values stay where they are.
  Buffer in_{true}, out_{true}, work_{false};
  // The pass that is being made.
  std::vector<Place> places_;
  std::vector<Copy*> copies_now_;
  Layout sent_, returned_;
  size_t tracks_at_ = 0, runs_at_ = 0, chunks_at_ = 0, work_bytes_ = 0;
  int32_t track_count_ = 0, chunk_count_ = 0;
};

}  // namespace bellwether::kernels::cuda

struct bw_bank {
  bellwether::kernels::cuda::GpuBank bank;
};

extern "C" {

uint32_t bw_bank_abi(void) { return bellwether::kernels::kBankAbi; }

const char* bw_bank_error(void) { return bellwether::kernels::cuda::last_error.c_str(); }

int bw_bank_open(bw_bank** bank, char* device) {
  auto* const opened = new bw_bank;
  if (!opened->bank.Open(device)) {
    delete opened;
    return 1;
  }
  *bank = opened;
  return 0;
}

void bw_bank_close(bw_bank* bank) { delete bank; }

int bw_bank_evaluate(bw_bank* bank, bellwether::kernels::BankRun* const* runs, int32_t count) {
  return bank->bank.Evaluate(runs, count) ? 0 : 1;
}

int bw_bank_forget(bw_bank* bank, uint64_t key) { return bank->bank.Forget(key) ? 0 : 1; }

}  // extern "C"
