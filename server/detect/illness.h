// illness.h: which signs are of one illness, as data.
//
// A sign is what one family of rules has found.  An illness shows several: a learning rate that is too high
// lets the loss rise, then the gradient, then the scores.  Each cause has a rank, by how much it says, and
// the families whose signs follow from it.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_ILLNESS_H_
#define BELLWETHER_SERVER_DETECT_ILLNESS_H_

#include <cstdint>
#include <string_view>

#include "server/detect/finding.h"

namespace bellwether::server {

inline constexpr int64_t kAsLongAsItFires = -1;

struct IllnessCause {
  std::string_view name;  // As alerts tell it.
  int32_t rank;           // Larger: it says more.
  uint32_t explains;      // Families, by bit.
  // For so many steps since it was last found another sign follows from it.
  int64_t reach_steps;
};

constexpr uint32_t BitOf(Family family) { return 1u << static_cast<uint32_t>(family); }

// Of a sign of `family`; what is unknown explains what its family does.
const IllnessCause& CauseNamed(Family family, std::string_view cause);

// Whether a sign of `family` can follow from `cause`.
inline bool Explains(const IllnessCause& cause, Family family) { return (cause.explains & BitOf(family)) != 0; }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ILLNESS_H_
