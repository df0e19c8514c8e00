// attention_bwd_shapes.cuh: the backward kernels that are built, of one type and head dim.
//
// Kernels says of which template they are, as BwdKernels of attention_bwd.cuh does: Make()
// launches one, and kExact<general, rounded, row sums> is whether registers suffice for the
// errors of delta before dS is rounded, beside rowsum(dS) or without it.  Else they come
// from rowsum(dS), which has the noise of that rounding.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/attention_convert.h"
#include "cuda/sm90/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

template <class Kernels, bool kGeneral, bool kRounded>
BwdLauncher MakeBwdLauncher(const AttentionBackwardParams& p) {
  constexpr bool kCentred = Kernels::template kExact<kGeneral, kRounded, true>;
  constexpr bool kAlone = Kernels::template kExact<kGeneral, kRounded, false>;
  if (p.forward.stats != nullptr) {
    if constexpr (kCentred) {
      return Kernels::template Make<kGeneral, kRounded, true, true>();
    } else if constexpr (kAlone) {
      if (!p.center) return Kernels::template Make<kGeneral, kRounded, false, true>();
    }
    return Kernels::template Make<kGeneral, kRounded, true, false>();
  }
  return p.center ? Kernels::template Make<kGeneral, kRounded, true, false>()
                  : Kernels::template Make<kGeneral, kRounded, false, false>();
}

// Whether a call is plain: it has neither masks and turns, nor rounded P, nor rowsum(dS) of it.
inline bool IsPlain(const AttentionBackwardParams& p) {
  return !IsGeneral(p) && p.forward.mode != AttentionMode::kHpm && !p.center && p.forward.stats == nullptr;
}

template <class Kernels>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p) {
  const bool general = IsGeneral(p);
  if (p.forward.mode == AttentionMode::kHpm) {
    return general ? MakeBwdLauncher<Kernels, true, true>(p) : MakeBwdLauncher<Kernels, false, true>(p);
  }
  return general ? MakeBwdLauncher<Kernels, true, false>(p) : MakeBwdLauncher<Kernels, false, false>(p);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
