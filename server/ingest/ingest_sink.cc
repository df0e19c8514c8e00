#include "server/ingest/ingest_sink.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr char kMoved[] = "bellwether.moved";

}  // namespace

absl::Status MovedTo(const std::string& address) {
  absl::Status status = absl::UnavailableError(absl::StrCat("the server at ", address, " serves this run"));
  status.SetPayload(kMoved, absl::Cord(address));
  return status;
}

std::optional<std::string> MovedAddress(const absl::Status& status) {
  const auto address = status.GetPayload(kMoved);
  if (!address.has_value()) return std::nullopt;
  return std::string(*address);
}

}  // namespace bellwether::server
