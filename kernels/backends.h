// backends.h: one declaration per kernel and backend.  Private to kernels/ and
// its tests and benchmarks.
//
// Both columns always link: what a build has no CUDA version of answers
// kUnavailable (cuda/*unavailable.cc), so callers never need an #ifdef.
// Parameters are validated.

#ifndef BELLWETHER_KERNELS_BACKENDS_H_
#define BELLWETHER_KERNELS_BACKENDS_H_

#include "bellwether/kernels/attention.h"
#include "bellwether/kernels/attention_laws.h"
#include "bellwether/kernels/center_keys.h"
#include "bellwether/kernels/key_leak.h"
#include "bellwether/kernels/law_modules.h"
#include "bellwether/kernels/law_products.h"
#include "bellwether/kernels/law_sums.h"
#include "bellwether/kernels/module_stats.h"
#include "bellwether/kernels/moment_lag.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/spectral.h"
#include "bellwether/kernels/tensor_stats.h"

namespace bellwether::kernels::cpu {

// The definition, row by row, one thread: what Probe is tested against.
Status ProbeReference(const ProbeParams& params);
Status Probe(const ProbeParams& params, uint32_t threads);
Status AttentionLaws(const AttentionLawsParams& params, uint32_t threads);
Status AttentionShadow(const AttentionShadowParams& params, uint32_t threads);
Status KeyLeak(const KeyLeakParams& params, uint32_t threads);
Status LawEqualRows(const LawEqualRowsParams& params, uint32_t threads);
Status LawLogits(const LawLogitsParams& params, uint32_t threads);
Status LawNorms(const LawNormsParams& params, uint32_t threads);
Status LawProducts(const LawProductsParams& params, uint32_t threads);
Status LawSums(const LawSumsParams& params, uint32_t threads);
Status ModuleStats(const ModuleStatsParams& params, uint32_t threads);
Status MomentLags(const MomentLagsParams& params);
Status TensorStats(const TensorStatsParams& params, uint32_t threads);
Status CenterKeys(const CenterKeysParams& params, uint32_t threads);
Status SpectralNorms(const SpectralParams& params, uint32_t threads);
Status IncrementRank(const IncrementRankParams& params, uint32_t threads);

// Keys of one tile of the tiled softmax; tests vary it, since what is rounded
// depends on the running maximum.
inline constexpr int64_t kAttentionTileKeys = 128;
Status AttentionForward(const AttentionForwardParams& params, uint32_t threads, int64_t tile_keys = kAttentionTileKeys);
Status AttentionBackward(const AttentionBackwardParams& params, uint32_t threads);

}  // namespace bellwether::kernels::cpu

namespace bellwether::kernels::cuda {

// Of the current device: what this build has for CUDA runs on it.
bool IsAvailable();
Status Probe(const ProbeParams& params, void* stream);
Status AttentionLaws(const AttentionLawsParams& params, void* stream);
Status AttentionShadow(const AttentionShadowParams& params, void* stream);
Status KeyLeak(const KeyLeakParams& params, void* stream);
Status LawEqualRows(const LawEqualRowsParams& params, void* stream);
Status LawLogits(const LawLogitsParams& params, void* stream);
Status LawNorms(const LawNormsParams& params, void* stream);
Status LawProducts(const LawProductsParams& params, void* stream);
Status LawSums(const LawSumsParams& params, void* stream);
Status ModuleStats(const ModuleStatsParams& params, void* stream);
Status MomentLags(const MomentLagsParams& params, void* stream);
Status TensorStats(const TensorStatsParams& params, void* stream);
Status CenterKeys(const CenterKeysParams& params, void* stream);
Status SpectralNorms(const SpectralParams* each, int64_t count, void* stream);
size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams& params);
size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& params);
Status AttentionForward(const AttentionForwardParams& params, void* stream);
Status AttentionBackward(const AttentionBackwardParams& params, void* stream);

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_BACKENDS_H_
