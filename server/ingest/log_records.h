// log_records.h: what is in the payload of a log record.
//
// A client's message is logged as it came, and what the server says itself in forms of
// its own.  Both are read back as plain messages, free of protobuf.

#ifndef BELLWETHER_SERVER_INGEST_LOG_RECORDS_H_
#define BELLWETHER_SERVER_INGEST_LOG_RECORDS_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/message.h"
#include "server/store/log_backend.h"

namespace bellwether::server {

// Of kind kMessage: an event that a person wrote, as a client would have said it.  `seq`: of
// the client's message that it stands for.
std::string EncodeEvent(const RunEvent& event, uint64_t seq = 1);
std::string EncodeStepClosed(const StepClosedMessage& message);
std::string EncodeSilence(const SilenceMessage& message);
std::string EncodeRunSilent(const RunSilentMessage& message);
std::string EncodeSpectra(const SpectraMessage& message);
std::string EncodeActionRequest(const ActionRequestMessage& message);
std::string EncodePolicy(const PolicyMessage& message);
std::string EncodeFalseAlarm(const FalseAlarmMessage& message);
std::string EncodeRename(const RenameMessage& message);
std::string EncodeActionSent(const ActionSentMessage& message);

// `layout` is that of the run, nullptr before its Hello.  DATA_LOSS: it cannot be
// parsed; other errors as Decode().
absl::StatusOr<IngestMessage> DecodeRecord(const WalRecord& record, const Layout* layout, const DecodeLimits& limits);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_LOG_RECORDS_H_
