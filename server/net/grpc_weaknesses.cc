#include "server/net/grpc_weaknesses.h"

#include <array>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr GrpcWeakness kWeaknesses[] = {
    {"CVE-2023-1428", "an abort on some header values", "1.51.0", "1.53.0"},
    {"CVE-2023-4785", "a listener that dies when descriptors run out (ours does not)", "1.23.0", "1.57.0"},
    {"CVE-2023-32731", "header tables that get out of step behind a proxy", "1.53.0", "1.53.1"},
    {"CVE-2023-32732", "connections that a bad base64 header ends", "1.53.0", "1.53.1"},
    {"CVE-2023-33953", "CPU and memory without bound in header parsing", "", "1.56.2"},
    {"CVE-2023-44487", "rapid reset of streams", "", "1.66.0"},
    {"CVE-2024-7246", "header tables that a proxy's other clients can read or poison", "", "1.65.4"},
    {"CVE-2024-11407", "wrong bytes with zero-copy sends (off here)", "", "1.66.2"},
};

using Version = std::array<int, 3>;

Version Parse(std::string_view text) {
  Version version{};
  size_t i = 0;
  for (const absl::string_view part :
       absl::StrSplit(absl::string_view(text.data(), text.size()), absl::ByAnyChar(".-+"))) {
    if (i == version.size() || !absl::SimpleAtoi(part, &version[i])) break;
    ++i;
  }
  return version;
}

}  // namespace

std::span<const GrpcWeakness> GrpcWeaknesses() { return kWeaknesses; }

std::vector<const GrpcWeakness*> WeaknessesOf(std::string_view version) {
  const Version ours = Parse(version);
  std::vector<const GrpcWeakness*> found;
  for (const GrpcWeakness& weakness : kWeaknesses) {
    if (ours >= Parse(weakness.since) && ours < Parse(weakness.fixed)) found.push_back(&weakness);
  }
  return found;
}

void TellWeaknesses(const std::string& version, Exposure exposure) {
  std::vector<std::string> ids;
  for (const GrpcWeakness* const weakness : WeaknessesOf(version)) ids.emplace_back(weakness->id);
  if (ids.empty()) {
    LogInfo("gRPC {}: no weakness is known to this program", version);
    return;
  }
  const std::string all = absl::StrJoin(ids, ", ");
  switch (exposure) {
    case Exposure::kLocal:
      LogInfo("gRPC {} has {}; it is reached from this machine only", version, all);
      return;
    case Exposure::kCertificates:
      LogInfo("gRPC {} has {}; strangers end at the handshake, holders of certificates do not", version, all);
      return;
    case Exposure::kAnybody:
      LogWarning("gRPC {} has {}; anybody who can connect can use them: ask for certificates (tls.client_ca_file)",
                 version, all);
      return;
  }
}

}  // namespace bellwether::server
