// ranges.h: ranges that clients' numbers and people's share.

#ifndef BELLWETHER_SERVER_MODEL_RANGES_H_
#define BELLWETHER_SERVER_MODEL_RANGES_H_

#include <cstdint>

namespace bellwether::server {

// Of a step, from 0 on: a double, as JSON has it, holds no larger integer exactly.
inline constexpr int64_t kStepMax = int64_t{1} << 53;

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_RANGES_H_
