// eta_text.h: how long is left, in words.  Pure; any thread.

#ifndef BELLWETHER_SERVER_MODEL_ETA_TEXT_H_
#define BELLWETHER_SERVER_MODEL_ETA_TEXT_H_

#include <string>

#include "server/model/alert_transition.h"

namespace bellwether::server {

// "500 steps (80 %: 400 to 900), about 25 min"; without the time where no step's was told.  "" if nothing is known.
std::string EtaText(const Eta& eta);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ETA_TEXT_H_
