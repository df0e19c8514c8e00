// convert.h: plain structs of the store <-> messages of proto/bellwether/v1.
//
// Total functions: every value has a counterpart; nothing is validated here.  What the
// wire of ingest has, too, is in server/ingest/encode.h.

#ifndef BELLWETHER_SERVER_QUERY_CONVERT_H_
#define BELLWETHER_SERVER_QUERY_CONVERT_H_

#include <string_view>

#include "bellwether/v1/query.pb.h"
#include "server/ingest/encode.h"
#include "server/model/action.h"
#include "server/query/server_info.h"
#include "server/store/alert_store.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"

namespace bellwether::server {

// loss is NaN while the newest step has none.
v1::Run ToProto(const RunSnapshot& run);
// Those that the run's job has named itself; ToProto() has them where the snapshot has its rows.
void AddOwnSignals(const RunRows& rows, v1::Run* run);
RunEvent FromProto(const v1::Event& event);
v1::Eta ToProto(const Eta& eta);
v1::SiblingBand ToProto(const SiblingBand& band);
// `runs` knows the uuid; a run that left the table has none.
v1::Transition ToProto(const AlertTransition& transition, const RunTable& runs);
v1::Alert ToProto(const AlertView& alert, const RunTable& runs);
v1::FalseAlarm ToProto(const FalseAlarm& said);
// `uuid` is the run's.
v1::Action ToProto(const Action& action, const RunUuid& uuid);
v1::AuditEntry ToProto(const AuditEntry& entry);
v1::Series ToProto(SeriesPoints points, std::string_view signal, const SeriesKey& key);
v1::ServerInfo ToProto(const ServerInfo& info);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_CONVERT_H_
