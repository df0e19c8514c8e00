#include "backends.h"

namespace bellwether::kernels::cpu {

Status Probe(const ProbeParams& params, uint32_t) { return ProbeReference(params); }

}  // namespace bellwether::kernels::cpu
