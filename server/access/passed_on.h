// passed_on.h: the seal by which one server of a cluster asks another for a
// caller.
//
// The server that a caller came to knows its identity.  The server of the run
// believes that name, because it is sealed with a key that only servers of the
// cluster can read (HMAC-SHA256).  A seal holds for one method, for a minute.
// It names an identity, not its rights.  Those stand in the files of the server
// that is asked, which checks the call as any other.
//
//   seal = base64url(text) "." base64url(HMAC(key, text))
//   text = fields, each as "<bytes>:<field>": version, Unix ms, method, who, name,
//          own_run, from
//
// The time is the database's, so that servers' clocks may differ.  A call that
// was passed on is never passed on again.
//
// Pure functions; any thread.

#ifndef BELLWETHER_SERVER_ACCESS_PASSED_ON_H_
#define BELLWETHER_SERVER_ACCESS_PASSED_ON_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace bellwether::server {

inline constexpr char kPassedOnMetadatum[] = "x-bellwether-passed-on";
inline constexpr int64_t kPassedOnMsMax = 60'000;  // A seal is good so long, before and after its time.
inline constexpr size_t kPassedOnBytesMax = 4096;

struct PassedOn {
  enum class Who : uint8_t {
    kServer = 1,     // The other server itself; reads only.
    kEverybody = 2,  // A server that asks no caller for an identity.
    kPage = 3,       // A caller with the page's token.
    kNamed = 4,      // An identity of the access file, by its name.
  };
  Who who = Who::kEverybody;
  std::string name;     // Of kNamed.
  std::string own_run;  // The run that the caller's certificate names, if one does.
  std::string from;     // The caller's address, for the audit.
};

std::string SealPassedOn(const PassedOn& passed_on, std::string_view method, std::string_view key, int64_t now_unix_ms);
// UNAUTHENTICATED: the seal is not from that key, not for that method, or too
// old or new; the message names which.
absl::StatusOr<PassedOn> OpenPassedOn(std::string_view seal, std::string_view method, std::string_view key,
                                      int64_t now_unix_ms);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_PASSED_ON_H_
