// alert_places.h: where an alert lies, beside its heads.
//
// What detectors say of places other than heads stands in their evidence:
//   * of an expert the layer and the expert, as layer and head;
//   * of a tensor or a module its name, in the text;
//   * of ranks that differ the number of each, as the value of kDifferingRank;
//   * of sequences their losses and ids, as the job gave them, in the text of the
//     largest loss.

#ifndef BELLWETHER_SERVER_MODEL_ALERT_PLACES_H_
#define BELLWETHER_SERVER_MODEL_ALERT_PLACES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/alert_transition.h"

namespace bellwether::server {

inline constexpr char kDifferingRank[] = "differing_rank";  // The signal of such evidence; of no catalogue.

struct AlertPlaces {
  // Each once, in the order of the evidence, which has the worst of a sign first.
  std::vector<std::string> tensors, modules;
  std::vector<Head> experts;  // The head is the expert.
  std::vector<int64_t> ranks;
  std::string sequences;  // Empty: none is named.
};

AlertPlaces PlacesOf(const std::vector<Evidence>& evidence);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ALERT_PLACES_H_
