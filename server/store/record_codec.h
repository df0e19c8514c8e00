// record_codec.h: stored records as bytes, each with a version byte first.
//
// Decoders take any bytes: DATA_LOSS if they are not a record of a version this
// server knows; older versions are read.  Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_RECORD_CODEC_H_
#define BELLWETHER_SERVER_STORE_RECORD_CODEC_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/model/action.h"
#include "server/store/baseline_percentiles.h"
#include "server/store/database.h"

namespace bellwether::server {

std::string EncodeRunRecord(const RunRecord& run);
absl::StatusOr<RunRecord> DecodeRunRecord(std::string_view bytes);

std::string EncodeRankRecord(const RankRecord& rank);
absl::StatusOr<RankRecord> DecodeRankRecord(std::string_view bytes);

std::string EncodeRunEvent(const RunEvent& event);
absl::StatusOr<RunEvent> DecodeRunEvent(std::string_view bytes);

std::string EncodeTransition(const AlertTransition& transition);
absl::StatusOr<AlertTransition> DecodeTransition(std::string_view bytes);

std::string EncodeAlertNote(const Database::AlertNote& note);
absl::StatusOr<Database::AlertNote> DecodeAlertNote(std::string_view bytes);

std::string EncodeAction(const Action& action);
absl::StatusOr<Action> DecodeAction(std::string_view bytes);

std::string EncodeActionRequest(const ActionRequest& request);
absl::StatusOr<ActionRequest> DecodeActionRequest(std::string_view bytes);

std::string EncodeAuditEntry(const AuditEntry& entry);
absl::StatusOr<AuditEntry> DecodeAuditEntry(std::string_view bytes);

std::string EncodeBaselinePercentiles(const BaselinePercentiles& bands);
absl::StatusOr<BaselinePercentiles> DecodeBaselinePercentiles(std::string_view bytes);

std::string EncodeRunRows(const RunRows& rows);
absl::StatusOr<RunRows> DecodeRunRows(std::string_view bytes);

// A run's saved state, compressed.
std::string PackState(std::string_view state);
absl::StatusOr<std::string> UnpackState(std::string_view bytes);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RECORD_CODEC_H_
