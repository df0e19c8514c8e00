#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cpu {

Status AttentionShadow(const AttentionShadowParams&, uint32_t) {
  return Fail(Status::kUnsupported, "backend is 0 (CPU), but attention_shadow is not built yet");
}

}  // namespace bellwether::kernels::cpu
