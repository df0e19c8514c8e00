// Stands in for cuda/attention.cc in a build without CUDA.

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

Status Unavailable() { return Fail(Status::kUnavailable, "backend is 1 (CUDA), but this build has only 0 (CPU)"); }

}  // namespace

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams&) { return 0; }
size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams&) { return 0; }
Status AttentionForward(const AttentionForwardParams&, void*) { return Unavailable(); }
Status AttentionBackward(const AttentionBackwardParams&, void*) { return Unavailable(); }

}  // namespace bellwether::kernels::cuda
