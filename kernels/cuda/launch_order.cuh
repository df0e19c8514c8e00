// launch_order.cuh: kernels of which one may start while the one before it ends (programmatic
// dependent launch).  Before Hopper a launch waits by itself.

#ifndef BELLWETHER_KERNELS_CUDA_LAUNCH_ORDER_CUH_
#define BELLWETHER_KERNELS_CUDA_LAUNCH_ORDER_CUH_

namespace bellwether::kernels::cuda {

// The next launch, if it may, starts as soon as every block has said so or is done.
__device__ __forceinline__ void LetNextLaunchStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch before is done, and what it wrote is there.
__device__ __forceinline__ void AwaitLaunchBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAUNCH_ORDER_CUH_
