#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cpu {

Status AttentionLaws(const AttentionLawsParams&, uint32_t) {
  return Fail(Status::kUnsupported, "backend is 0 (CPU), but attention_laws is not built yet");
}

}  // namespace bellwether::kernels::cpu
