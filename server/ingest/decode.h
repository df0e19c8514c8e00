// decode.h: the wire's messages into plain ones, or a reason why not.
//
// Everything a client can get wrong is found here, before anything is
// allocated for it: every range, every size, every count.  An error is
// INVALID_ARGUMENT and names the field, its value and the legal range.  NaN and
// infinity are values like any other.

#ifndef BELLWETHER_SERVER_INGEST_DECODE_H_
#define BELLWETHER_SERVER_INGEST_DECODE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bellwether/v1/ingest.pb.h"
#include "server/ingest/message.h"

namespace bellwether::server {

struct DecodeLimits {
  int32_t layers_max = 512;
  int32_t heads_max = 1024;
  int32_t head_dim_max = 1024;
  int32_t blocks_max = 64;
  int32_t parts_max = 1024;
  uint32_t world_max = 4096;
  int32_t spectrum_rows_max = 512;
  size_t labels_max = 16;
  size_t label_bytes_max = 128;
  size_t text_bytes_max = 256;
  uint64_t losses_max = uint64_t{1} << 53;  // Frames that a client says were dropped, or sent without heads.
};

inline constexpr uint32_t kProtocolVersion = 1;
// What hello.client_version begins with where the server itself imports a recording
// (run_import.h); which one follows.
inline constexpr std::string_view kImportOf = "import of ";

// [a-zA-Z0-9_.:/-]{1,128}
bool IsRunName(std::string_view name);

// `layout` is that of the stream's Hello, nullptr before it: then only a Hello
// passes (FAILED_PRECONDITION otherwise).
absl::StatusOr<IngestMessage> Decode(const v1::ClientMessage& message, const Layout* layout,
                                     const DecodeLimits& limits);

// The payloads of the server's own log records.
std::string EncodeStepClosed(const StepClosedMessage& message);
std::string EncodeSilence(const SilenceMessage& message);
std::string EncodeRunSilent(const RunSilentMessage& message);
std::string EncodeSpectra(const SpectraMessage& message);
std::string EncodeActionRequest(const ActionRequestMessage& message);
std::string EncodePolicy(const PolicyMessage& message);
std::string EncodeActionSent(const ActionSentMessage& message);
absl::StatusOr<IngestMessage> DecodeRecord(const WalRecord& record, const Layout* layout, const DecodeLimits& limits);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_DECODE_H_
