// grpc_weaknesses.h: which known weaknesses the linked gRPC has, and what keeps
// strangers from them; said at each start.

#ifndef BELLWETHER_SERVER_NET_GRPC_WEAKNESSES_H_
#define BELLWETHER_SERVER_NET_GRPC_WEAKNESSES_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellwether::server {

struct GrpcWeakness {
  const char* id;     // CVE
  const char* what;   // In a few words.
  const char* since;  // First version that has it; "" = all.
  const char* fixed;  // First version that does not.
};
std::span<const GrpcWeakness> GrpcWeaknesses();

// Those that `version` ("1.51.1") has.  A distribution may have mended some of
// them without a new version: then the list says too much, never too little.
std::vector<const GrpcWeakness*> WeaknessesOf(std::string_view version);

enum class Exposure { kLocal, kCertificates, kAnybody };
// Into the log: information, or a warning where anybody could use them.
void TellWeaknesses(const std::string& version, Exposure exposure);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_GRPC_WEAKNESSES_H_
