// identity.h: a caller's identity, and its rights to runs.

#ifndef BELLWETHER_SERVER_ACCESS_IDENTITY_H_
#define BELLWETHER_SERVER_ACCESS_IDENTITY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace bellwether::server {

enum class Role : uint8_t {
  kRead = 1,   // ask about runs
  kWrite = 2,  // send a run's frames, import a run
  kAct = 4,    // acknowledge, silence, annotate; propose, approve, undo actions; holds kRead
  kAdmin = 8,  // policies, reload; holds all others
};
const char* NameOf(Role role);

// What a tenant's identities may use together; 0 = no limit.
struct Quota {
  int64_t connections_max = 0;        // Peers that hold a stream.
  int64_t streams_max = 0;            // Of trainers.
  int64_t runs_max = 0;               // Runs that have a stream.
  int64_t frames_per_second_max = 0;  // Messages with a seq; a second's worth may come at once.
  int64_t bytes_per_second_max = 0;
};

struct Identity {
  std::string name;    // [a-zA-Z0-9_.@/-]{1,64}; "" = no particular identity.
  std::string tenant;  // Whose quota counts; "" = none.
  uint8_t roles = 0;   // Of Role, with what they hold.
  // Names of runs; patterns of util/glob.h.
  std::vector<std::string> runs;
  // Runs more, whose names begin with what the certificate names, to the letter.  Behind it stands one of these
  // patterns; "" is the name alone.
  std::string own_run;
  std::vector<std::string> behind_own_run;

  bool Has(Role role) const { return (roles & static_cast<uint8_t>(role)) != 0; }
  bool Covers(std::string_view run) const;
  bool CoversAll() const;
};
using IdentityPtr = std::shared_ptr<const Identity>;

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_IDENTITY_H_
