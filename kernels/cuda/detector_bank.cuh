// detector_bank.cuh: what the host sends to the kernels of the detector bank.

#ifndef BELLWETHER_KERNELS_CUDA_DETECTOR_BANK_CUH_
#define BELLWETHER_KERNELS_CUDA_DETECTOR_BANK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "bellwether/kernels/detector_bank.h"

namespace bellwether::kernels::cuda {

// A track on the device.  `newest` and `row` lie in what the pass sent along; `ring` in
// the run's copy.
struct DeviceTrack {
  const float* newest;  // [heads] or null
  const float* row;     // [heads], goes to `slot` of the ring; null: nothing does
  float* ring;          // [window][heads] or null
  int64_t heads;
  int32_t window, rows, next, slot;
  bool fresh;
  float median;
  float ring_median[kBankRowsMax];
  float ring_step[kBankRowsMax];
};

struct DeviceRun {
  int64_t heads;
  int32_t first_track;  // Of this run among all tracks of the pass.
  int32_t tests;
  BankTest test[kBankTestsMax];
  uint32_t* hits;  // [tests][2 HitWords(heads)], 0 at first
};

// A block's share of a run.
struct Chunk {
  int32_t run;
  int32_t first_head;
};

// A head whose rise calls for a fit.
struct FitRequest {
  int32_t run, head;
  int32_t test;
  int32_t windows;  // Bit w: window w has risen.
};

struct DevicePass {
  DeviceTrack* tracks;
  DeviceRun* runs;
  const Chunk* chunks;
  float* medians;  // [tracks]
  FitRequest* fits;
  uint32_t* fit_count;  // 0 at first
  int32_t track_count, chunk_count;
};

inline constexpr int kBankThreads = 256;

// Enqueues the pass; `multiprocessors` of the device.
cudaError_t LaunchDetectorPass(const DevicePass& pass, int multiprocessors, cudaStream_t stream);

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_DETECTOR_BANK_CUH_
