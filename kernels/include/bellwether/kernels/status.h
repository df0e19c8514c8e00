// status.h: the result of a kernel call.
//
// Kernels are called from training processes, so they never throw, print or
// exit; every failure is one of these codes and one sentence.

#ifndef BELLWETHER_KERNELS_STATUS_H_
#define BELLWETHER_KERNELS_STATUS_H_

namespace bellwether::kernels {

enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,  // The caller broke a documented precondition.
  kUnsupported = 2,      // Legal, but no kernel here handles it; fall back.
  kUnavailable = 3,      // This build or this machine lacks the backend.
  kDeviceError = 4,      // The device failed, or memory ran out.
};

// What was wrong with the last failing call of this thread: field, value,
// legal range.  Valid until the thread's next failing call; "" before the
// first.  Any thread.
const char* LastErrorMessage();

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_STATUS_H_
